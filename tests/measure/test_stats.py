"""The numbers of `savings`, from records written by hand whose sums can be done in the head."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tpspec.comm.messages import Drafting, Stats, Tally
from tpspec.measure.savings import BUILT_IN, Attempt, Task, Turn, built_in_prompts, turns
from tpspec.measure.stats import (
    ELSEWHERE,
    Drafts,
    Pair,
    Record,
    acceptance_by_position,
    elsewhere_between,
    predicted,
    predicted_s,
    predicted_tokens_per_round,
    report,
    speedup,
    speedup_interval,
    summary,
    tally_between,
)
from tpspec.prompts import Prompt, read_prompts
from tpspec.request import Delta
from tpspec.topology.calibration import Calibration

NOTHING: Drafts = ((), ())
# A round of m rows over c tokens: 10 ms, 1 ms a row, 1 us a row and token, 1 ms of host; 2 ms for each drafted token.
BOX = Calibration(0.010, 0.001, None, draft_s=0.002, host_s=0.001, reduces=0, row_bytes=0, look_s=1e-6)


def record(num_tokens: int, seconds: float, num_rounds: int, category: str = "all", per_round: int = 5) -> Record:
    """Decoded tokens after the first, in rounds of five collectives of 10 bytes and 0.01 seconds each."""
    count = per_round * num_rounds
    tallies = {"mlp": Tally(count - num_rounds, 10 * count, 0.01 * count), "pick": Tally(num_rounds, 0, 0.0)}
    return Record(category, tuple(range(num_tokens + 1)), 0.5, seconds, (NOTHING,) * num_rounds, tallies)


def pair(plain_s: float, speculative_s: float, category: str = "all") -> Pair:
    return Pair(record(10, plain_s, 10, category), record(10, speculative_s, 5, category))


def test_acceptance_of_a_position_is_of_the_rounds_that_reached_it() -> None:
    """Stands against dividing by all rounds, which counts a rejection once for every position behind it."""
    rounds = [((1, 1, 1), (1, 1, 0)), ((1, 1, 1), (0, 0, 0)), ((1, 1), (1, 0)), ((1,), (1,)), NOTHING]
    assert acceptance_by_position(rounds) == [3 / 4, 1 / 2, 0.0]


def test_acceptance_of_drafts_that_never_came() -> None:
    assert acceptance_by_position([NOTHING, NOTHING]) == []
    assert predicted_tokens_per_round([NOTHING, NOTHING]) == 1.0
    assert predicted_tokens_per_round([]) is None


def test_a_prediction_knows_that_drafts_have_lengths() -> None:
    """Half of the rounds draft nothing: 1 token; the others two, both always accepted: 3 tokens."""
    assert predicted_tokens_per_round([((1, 1), (1, 1)), NOTHING]) == 2.0


def test_a_prediction_from_independent_positions_is_what_was_measured() -> None:
    noise = random.Random(0)
    rounds: list[Drafts] = []
    for _ in range(5000):
        length, accepted = noise.randrange(5), 0
        while accepted < length and noise.random() < 0.7:
            accepted += 1
        rounds.append(((1,) * length, tuple(int(depth < accepted) for depth in range(length))))
    measured = 1 + sum(sum(accepted) for _, accepted in rounds) / len(rounds)
    assert predicted_tokens_per_round(rounds) == pytest.approx(measured, rel=0.02)


def drafting(category: str, *rounds: Drafts, num_prompt: int = 0, seconds: float = 1.0) -> Record:
    num_tokens = sum(1 + sum(accepted) for _, accepted in rounds)
    return Record(category, tuple(range(num_tokens + 1)), 0.1, seconds, rounds, num_prompt=num_prompt)


def test_a_predicted_round_pays_for_rows_drafts_and_context() -> None:
    """The first round's drafts were made before the first token, with the prompt: nobody waits for them here."""
    record = drafting("all", ((1, 1), (1, 0)), ((1,), (0,)), num_prompt=98)  # 3 tokens: 100 before a row in the mean
    rows_s = 5 * (0.001 + 99.5 * 1e-6)
    assert predicted_s(BOX, record) == pytest.approx(2 * (0.010 + 0.001) + rows_s + 0.002)


def test_a_prediction_does_not_look_at_what_it_predicts() -> None:
    """Stands against a speed-up from the measured seconds of the same rounds, which is right by construction."""
    rounds = [((1, 1), (1, 1)), ((1, 1), (0, 0))]
    quick, slow = (
        Pair(drafting("all", *[NOTHING] * 4, seconds=s), drafting("all", *rounds, seconds=s)) for s in (1, 9)
    )
    assert predicted([quick], BOX) == predicted([slow], BOX)
    found = predicted([quick], BOX)
    assert found["plain_tokens_per_second"] == pytest.approx(4 / (4 * (0.012 + 2e-6)))
    assert found["tokens_per_round"] == 2.0
    assert found["tokens_per_second"] == pytest.approx(4 / (2 * 0.014 + 6 * 2e-6 + 2 * 0.002))


def test_categories_are_predicted_from_their_own_acceptance() -> None:
    """Stands against one acceptance for all: edits alone get to depth 2, and half their rounds are not everyone's."""
    edit = drafting("edit", *[((1, 1), (1, 1))] * 4)
    prose = drafting("prose", *[((1, 1), (0, 0))] * 3, ((1, 1), (1, 0)))
    found = predicted([Pair(drafting(made.category, NOTHING), made) for made in (edit, prose)], BOX)
    assert found["tokens_per_round"] == pytest.approx((3.0 + 1.25) / 2)


def test_sums_per_token() -> None:
    side = summary([record(10, 2.0, 5), record(30, 3.0, 15)])
    assert (side["tokens"], side["rounds"], side["tokens_per_round"]) == (40, 20, 2.0)
    assert side["tokens_per_second"] == 8.0
    assert side["itl"] == 1 / 8
    assert side["ttft"] == 0.5
    assert side["collectives_per_token"] == {"mlp": 2.0, "pick": 0.5, "total": 2.5}
    assert side["bytes_per_token"]["total"] == 25.0
    assert side["seconds_per_token"]["total"] == pytest.approx(0.025)
    assert side["wait_share"] == pytest.approx(1.0 / 5.0)


def test_the_parts_of_a_token_are_its_whole() -> None:
    made = Record("all", tuple(range(11)), 0.1, 4.0, (NOTHING,) * 5, {"mlp": Tally(1, 1, 1.0)}, 3.0, 0.5)
    parts = summary([made])["time_per_token"]
    assert parts == pytest.approx({"compute": 0.2, "collectives": 0.1, "drafting": 0.05, "rest": 0.05})
    assert sum(parts.values()) == pytest.approx(summary([made])["itl"])


def test_an_answer_of_one_token_has_no_speed() -> None:
    """Stands against a division by zero where a model ends at once."""
    short = Record("all", (7,), 0.1, 0.0, ())
    assert report([Pair(short, short)], BOX)["speedup"] is None
    assert summary([short])["itl"] is None


def test_the_speedup_weighs_prompts_by_their_time() -> None:
    """The ratio of sums: a mean of ratios would let a short prompt rule."""
    assert speedup([pair(1.0, 1.0), pair(9.0, 4.0)]) == pytest.approx(2.0)


def test_the_interval_brackets_the_speedup_and_repeats() -> None:
    noise = random.Random(1)
    pairs = [pair(1.0, noise.uniform(0.4, 0.6)) for _ in range(30)]
    (low, high), middle = speedup_interval(pairs), speedup(pairs)
    assert low is not None
    assert high is not None
    assert middle is not None
    assert 1.8 < low < middle < high < 2.2
    assert speedup_interval(pairs) == (low, high)


def test_equal_prompts_leave_no_doubt_and_one_prompt_no_interval() -> None:
    assert speedup_interval([pair(2.0, 1.0)] * 5) == pytest.approx((2.0, 2.0))
    assert speedup_interval([pair(2.0, 1.0)]) == (None, None)


def test_categories_add_up_and_one_differing_text_is_seen() -> None:
    odd = Pair(record(10, 1.0, 10, "b"), Record("b", (9,) * 11, 0.1, 1.0, (NOTHING,) * 10))
    found = report([pair(1.0, 0.5, "a"), odd, pair(1.0, 0.5, "a")], BOX)
    assert list(found["by_category"]) == ["a", "b"]
    assert found["identical"] is False
    assert found["by_category"]["a"]["identical"] is True
    for way in ("plain", "speculative"):
        assert found[way]["tokens"] == sum(side[way]["tokens"] for side in found["by_category"].values()) == 30


def test_tallies_between_two_moments() -> None:
    before, after = {"mlp": Tally(2, 20, 1.0)}, {"mlp": Tally(5, 50, 1.5), "pick": Tally(1, 8, 0.25)}
    assert tally_between(before, after) == {"mlp": Tally(3, 30, 0.5), "pick": Tally(1, 8, 0.25)}
    assert tally_between(after, after) == {}


def test_drafts_from_elsewhere_are_counted_from_the_first_token_on() -> None:
    """Stands against totals since start, which hold the prompts before, the warm-up and the plain turns."""
    attempt = Attempt(0.0)
    attempt.add(Delta(0, (5,)), Stats(elsewhere=Drafting(hits=7, waited_s=1.0, bytes=100)))
    end = Stats(elsewhere=Drafting(hits=9, misses=1, waited_s=1.5, bytes=160))
    attempt.add(Delta(0, (6, 7)), end)
    made = attempt.record(Task("a", (1,), 8), end)
    assert made.elsewhere is not None
    assert made.elsewhere == dict.fromkeys(ELSEWHERE, 0) | {"hits": 2, "misses": 1, "waited_s": 0.5, "bytes": 60}
    found = report([Pair(record(2, 1.0, 2, "a"), made)] * 2, BOX)
    assert found["speculative"]["elsewhere"]["hits"] == 4
    assert found["by_category"]["a"]["speculative"]["elsewhere"]["bytes"] == 120


def test_a_rank_that_drafts_for_itself_has_nothing_elsewhere() -> None:
    assert elsewhere_between(None, None) is None
    assert report([pair(2.0, 1.0)], BOX)["speculative"]["elsewhere"] is None


def test_turns_alternate_and_begin_with_a_warm_up() -> None:
    order = turns(2)
    assert order[:2] == [Turn(None, False), Turn(None, True)]
    assert order[2:] == [Turn(0, False), Turn(0, True), Turn(1, True), Turn(1, False)]


def test_built_in_prompts_have_two_of_each_category() -> None:
    """One prompt alone gives no interval."""
    assert all(len(texts) == 2 for texts in BUILT_IN.values())
    assert {prompt.category for prompt in built_in_prompts(chat=True)} == set(BUILT_IN)


def test_prompts_keep_their_category_and_a_bad_one_is_named(tmp_path: Path) -> None:
    """Also stands against numbering by Unicode's line separators, which JSON may hold as they are."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b", "kind": "chat", "category": "edit"}\r\n\n{"prompt": "c"}\n')
    assert read_prompts(path) == [Prompt("a\u2028b", True, "edit"), Prompt("c")]
    path.write_text('{"prompt": "a", "category": 5}\n')
    with pytest.raises(Exception, match=r"prompts.jsonl:1: category is 5"):
        read_prompts(path)


def test_the_mark_that_some_editors_begin_a_file_with_is_no_prompt(tmp_path: Path) -> None:
    """Against a file of prompts, saved as UTF-8 on Windows, that was refused as no JSON."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    assert [prompt.text for prompt in read_prompts(path)] == ["a"]
