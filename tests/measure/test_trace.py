"""The trace that `savings` writes and the simulator reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tpspec.comm.messages import Stats, Tally
from tpspec.errors import UserError
from tpspec.measure.trace import (
    Mark,
    Recording,
    Round,
    drafts,
    guesses_of,
    made_up,
    offers,
    read,
    round_between,
    settled,
    unsilenced,
    write,
)
from tpspec.request import Delta


def round_of(drafted: int, accepted: int, tokens: int | None = None) -> Round:
    tokens = accepted + 1 if tokens is None else tokens
    return Round(1 + drafted, drafted, accepted, tokens, seconds=0.02, forward_s=0.015, drafting_s=0.001)


def test_a_round_tells_right_wrong_silent_or_nothing_about_each_token() -> None:
    """Against calling the bonus token a miss, and a short draft a full one: either bends the acceptance."""
    rounds = [round_of(4, 2), round_of(4, 4), round_of(2, 2), round_of(0, 0), round_of(3, 0)]
    #                    0   1..3   4..8    9..11  12  13
    assert guesses_of(rounds, 14, max_tokens=40, asked=4) == "?" + "yyn" + "yyyy?" + "yy-" + "-" + "n"


def test_drafts_that_the_end_of_the_answer_cut_short_are_no_silence() -> None:
    """Two drafts are all that is asked for where three tokens may still come."""
    assert guesses_of([round_of(2, 2)], 4, max_tokens=4, asked=4) == "?yy?"
    assert guesses_of([round_of(2, 2)], 4, max_tokens=5, asked=4) == "?yy-"


def test_an_answer_that_a_draft_ended_has_no_token_of_the_targets_own() -> None:
    """Against writing beyond the last token when the accepted end of text is the last draft."""
    assert guesses_of([round_of(3, 2, tokens=2)], 3, max_tokens=9, asked=3) == "?yy"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20), st.integers(1, 6))
def test_what_rounds_tell_is_as_long_as_the_answer_and_right_as_often(pairs: list[tuple[int, int]], asked: int) -> None:
    rounds = [round_of(min(d, asked), min(a, d, asked)) for d, a in pairs]
    num_tokens = 1 + sum(one.tokens for one in rounds)
    guesses = guesses_of(rounds, num_tokens, max_tokens=10_000, asked=asked)
    assert len(guesses) == num_tokens
    assert guesses.count("y") == sum(one.accepted for one in rounds)
    assert guesses.count("n") == sum(one.accepted < one.drafted for one in rounds)


def test_where_the_drafter_said_less_than_asked_is_remembered() -> None:
    recording = Recording("all", 5, "?yn-yyy?", 40, 3, speculative=(round_of(2, 1), round_of(0, 0), round_of(3, 3)))
    assert drafts(recording) == {1: 2, 3: 0, 4: 3}
    assert offers(recording) == {1: 2, 3: 0}


def test_unknown_guesses_are_drawn_as_often_as_the_category_knows_them() -> None:
    """And the same ones every time. 3 in 4 of 2000 draws lie within 0.05 but for odds below 1e-6."""
    easy = Recording("easy", 1, "yyyn" + "?" * 2000, 3000)
    hard = Recording("hard", 1, "nnnn????", 3000)
    first, second = settled([easy, hard], seed=3)
    assert abs(first[4:].count("y") / 2000 - 0.75) < 0.05
    assert second == "n" * 8
    assert settled([easy, hard], seed=3) == [first, second] != settled([easy, hard], seed=4)


def test_nobody_known_is_silent() -> None:
    assert settled([Recording("all", 1, "???", 3)], seed=0) == ["---"]


def test_who_stopped_where_more_did_not_pay_was_not_silent_for_want_of_words() -> None:
    """Against calling a model that drafts two tokens a wrong one at every third."""
    recording = Recording("all", 5, "?yn-yyy?", 40, 3, speculative=(round_of(2, 1), round_of(0, 0), round_of(3, 3)))
    (found,) = unsilenced([recording])
    assert found.guesses == "?yn?yyy?"
    assert offers(found) == {}


def test_made_up_guesses_are_right_as_often_as_asked() -> None:
    letters = "".join(one.guesses for one in made_up(0.8, seed=1, count=8, num_tokens=1000))
    assert abs(letters.count("y") / len(letters) - 0.8) < 0.02
    assert made_up(0.8, seed=1) == made_up(0.8, seed=1) != made_up(0.8, seed=2)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    recordings: Sequence[Recording] = [
        Recording("code", 7, "?yn", 9, 4, plain=(round_of(0, 0),) * 2, speculative=(round_of(4, 1),)),
        Recording("prose", 3, "?", 9),
    ]
    write(tmp_path / "trace.jsonl", recordings)
    assert read(tmp_path / "trace.jsonl") == recordings


def test_a_round_is_what_was_counted_in_it() -> None:
    """All-reduces alone: the gather of picks belongs to the forward, as in the cost model."""
    before = Stats(forward_s=1.0, drafting_s=0.5, collectives={"attention": Tally(10, 100, 0.25)})
    after = Stats(
        forward_s=1.5,
        drafting_s=0.75,
        collectives={"attention": Tally(12, 200, 0.5), "mlp": Tally(2, 100, 0.125), "pick": Tally(9, 9, 9.0)},
    )
    delta = Delta(0, (1, 2), drafted=(1, 2), accepted=(1, 0))
    assert round_between(Mark(3.0, before), Mark(4.0, after), [delta]) == Round(
        rows=4,
        drafted=2,
        accepted=1,
        tokens=2,
        seconds=1.0,
        forward_s=0.5,
        drafting_s=0.25,
        reduces=4,
        reduce_bytes=200,
        reduce_s=0.375,
    )


GOOD = {"category": "a", "prompt_tokens": 1, "guesses": "?y", "max_tokens": 4}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "truncated"),
        ("[]", "object"),
        (json.dumps(GOOD | {"guesses": "?x"}), "guesses"),
        (json.dumps(GOOD | {"prompt_tokens": 0}), "prompt_tokens"),
        (json.dumps(GOOD | {"max_tokens": 1}), "2 guesses"),
        (json.dumps(GOOD | {"gueses": "?"}), "gueses"),
        (json.dumps(GOOD | {"plain": []} | {"speculative": [json.loads('{"rows": 1}')]}), "drafted"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(UserError, match=said) as error:
        read(path)
    assert f"{path}:3" in str(error.value)


def test_rounds_that_do_not_make_the_answer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, [Recording("a", 1, "?yy", 4, 2, speculative=(round_of(2, 0),))])
    with pytest.raises(UserError, match="speculative rounds"):
        read(path)


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_no_trace_is_one_message(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=str(path)):
        read(path)
