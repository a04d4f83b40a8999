"""The search for skip sets: that it finds what can be spared, and that what it writes is what the source reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import tiny
from tpspec.errors import UserError
from tpspec.measure.__main__ import main
from tpspec.measure.skips import Price, search
from tpspec.published.shape import ModelShape, shape_of
from tpspec.text import Text
from tpspec.topology.sublayers import NOTHING, Sublayers, skipped

LAYERS = 6
SPARE = Sublayers(frozenset({1, 3, 4}), frozenset({2, 3}))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def shape(target: Path) -> ModelShape:
    return shape_of(str(target))


def test_what_nobody_misses_is_left_out(target: Path) -> None:
    """Against a search that stops at the first loss, and one that counts a sublayer twice."""

    def agreement(left_out: Sublayers) -> float:
        spared = len(left_out.attention & SPARE.attention) + len(left_out.mlp & SPARE.mlp)
        return 0.99**spared * 0.5 ** (len(left_out) - spared)

    found = list(search(Price(shape(target), 0.5), agreement, 4))
    assert max(found, key=lambda one: one.speed).left_out == SPARE
    assert [len(one.left_out) for one in found] == list(range(1, len(found) + 1))


def test_a_draft_costs_what_is_left_of_the_model_and_of_its_collectives(target: Path) -> None:
    """Against a head that is forgotten, and a price of nothing for a model that is all collectives."""
    everything = Sublayers(frozenset(range(LAYERS)), frozenset(range(LAYERS)))
    for waiting in (0.0, 0.5, 1.0):
        price = Price(shape(target), waiting)
        assert price.share(NOTHING) == pytest.approx(1.0)
        assert price.speed(NOTHING, 1.0) == pytest.approx(1.0)
        assert 0 < price.share(everything) < 0.5
    assert Price(shape(target), 1.0).share(everything) == pytest.approx(1 / (2 * LAYERS + 1))


def test_an_mlp_of_a_mixture_costs_its_chosen_experts() -> None:
    """Against a price of all experts for a drafted token, which makes every MLP seem worth leaving out."""
    mixture = shape_of("mistralai/Mixtral-8x7B-Instruct-v0.1")
    dense = replace(mixture, experts=None, intermediate=2 * mixture.intermediate)
    for left_out in (NOTHING, SPARE, Sublayers(frozenset(), frozenset(range(32)))):
        assert Price(mixture, 0.3).share(left_out) == pytest.approx(Price(dense, 0.3).share(left_out), abs=1e-3)


def test_judging_more_rows_of_a_mixture_costs_more() -> None:
    """Against drafts that seem worth their while because what is judged reads no more than a token does."""
    mixture = shape_of("Qwen/Qwen3-30B-A3B")
    dense = replace(mixture, experts=None, intermediate=8 * mixture.intermediate)
    judged = [Price(mixture, 0.0).judged(rows) for rows in (1, 2, 6, 10**6)]
    assert judged[0] == 1
    assert judged == sorted(judged)
    assert judged[2] == pytest.approx(10.54 / 3.042, rel=0.005)
    assert judged[3] == pytest.approx(30.22 / 3.042, rel=0.005)
    assert Price(dense, 0.0).judged(10**6) == Price(mixture, 1.0).judged(6) == 1
    assert Price(mixture, 0.3).speed(SPARE, 0.9) < 0.9 * Price(dense, 0.3).speed(SPARE, 0.9)


def test_the_command_writes_what_the_source_reads(target: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """Against a file of other keys; and the table must say what was left out."""
    out = tmp_path / "skip.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n{"prompt": "again: a theme"}\n')
    given = ["skips", str(target), "--prompts", str(prompts), "--tokens", "6", "--tries", "2", "--out", str(out)]
    assert main(given) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    left_out = skipped(str(out), target, LAYERS)
    assert 0 < len(left_out) < 2 * LAYERS
    assert 0 < json.loads(out.read_text())["agreement"] <= 1


def test_what_was_found_is_shown_though_the_disk_has_no_room_for_it(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against minutes of search that end in one line about a file."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n')
    given = ["skips", str(target), "--prompts", str(prompts), "--tokens", "4", "--tries", "1", "--out", "/dev/full"]
    assert main(given) == 2
    printed = capsys.readouterr()
    assert "plain 1)" in printed.out
    assert "No space left on device" in printed.err


def test_a_file_in_no_folder_is_refused_before_the_search(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "nowhere" / "skip.json"
    assert main(["skips", str(target), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"tpspec: error: --out {out}: cannot be written: should be a file in a folder that exists\n"


@pytest.mark.parametrize("text", ["[]", '{"attention": [1]}', '{"attention": [6], "mlp": []}', "nonsense"])
def test_a_wrong_file_is_answered_with_a_right_one(text: str, target: Path, tmp_path: Path) -> None:
    (tmp_path / "skip.json").write_text(text)
    with pytest.raises(UserError, match=r"should hold \{\"attention\""):
        skipped(str(tmp_path / "skip.json"), target, LAYERS)


def test_a_missing_file_is_answered_with_the_command_that_makes_it(target: Path) -> None:
    with pytest.raises(UserError, match="measure skips"):
        skipped("", target, LAYERS)


def test_prompts_that_end_their_text_are_refused(target: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """Stands against a division by the tokens of no answer."""
    text = Text.load(target)
    (end,) = {text.spell(one).decode() for one in text.eos_ids}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": f"the cat{end}"}) + "\n")
    assert main(["skips", str(target), "--prompts", str(prompts), "--out", str(tmp_path / "skip.json")]) == 2
    assert "every prompt ends with an end of text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["skips", "m", "--waiting", "much"], "--waiting: much is not between 0 and 1"),
        (["savings", "--max-tokens", "few"], "--max-tokens: few is not 2 or more"),
    ],
)
def test_an_option_that_is_no_number_is_answered_in_words(command: list[str], why: str, capsys) -> None:  # type: ignore[no-untyped-def]
    """Stands against `invalid _part value`: the name of a function of ours."""
    assert main(command) == 2
    assert why in capsys.readouterr().err
