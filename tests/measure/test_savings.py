"""`savings` through its front door: real engines over a tiny checkpoint, in this process and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny
from tpspec.measure.__main__ import main
from tpspec.measure.stats import COMPARED

ROOT = Path(__file__).parents[2]
KEYS = {"plain", "speculative", "speedup", "speedup_low", "speedup_high", "identical", "predicted"}
SIDE_KEYS = {
    "tokens",
    "rounds",
    "tokens_per_round",
    "tokens_per_second",
    "collectives_per_token",
    "bytes_per_token",
    "seconds_per_token",
    "wait_share",
    "ttft",
    "itl",
    "acceptance",
}
PREDICTED_KEYS = {"tokens_per_round", "plain_tokens_per_second", "tokens_per_second", "speedup"}
LAYERS = 3  # of the tiny checkpoints
PROMPTS = [
    {"prompt": "the cat and the hat, the cat and the hat, the cat", "category": "edit"},
    {"prompt": "ababababababab", "category": "edit"},
    {"prompt": "there, then", "category": "summarization", "kind": "chat"},
    {"prompt": "one two three one two three one two", "category": "summarization"},
]


@pytest.fixture
def topology_file(tmp_path: Path) -> Callable[..., str]:
    model = tiny("smollm2", tmp_path / "model")

    def write(num_ranks: int = 1, **keys: Any) -> str:
        target = {"model": str(model), "ranks": list(range(num_ranks)), "dtype": "float32"}
        draft = {"source": "ngram", "tokens": 4}
        made = {"name": "a test", "target": target, "draft": draft, "device": "cpu", "cache": {"tokens": 512}} | keys
        path = tmp_path / "topology.yaml"
        path.write_text(json.dumps(made))  # JSON is YAML
        return str(path)

    return write


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return str(path)


def adds_up(found: dict[str, Any]) -> None:
    assert found.keys() == KEYS | {"by_category"}
    sides = list(found["by_category"].values())
    assert list(found["by_category"]) == ["edit", "summarization"]
    for side in [found, *sides]:
        assert side.keys() >= KEYS
        assert side["identical"] is True
        assert side["speedup_low"] <= side["speedup"] <= side["speedup_high"]
        assert side["predicted"].keys() == PREDICTED_KEYS
        assert all(value > 0 for value in side["predicted"].values())
        assert side["plain"]["tokens"] == side["plain"]["rounds"] == side["speculative"]["tokens"]
    for way in ("plain", "speculative"):
        assert found[way].keys() >= SIDE_KEYS
        assert found[way]["tokens"] == sum(side[way]["tokens"] for side in sides)
        assert found[way]["rounds"] == sum(side[way]["rounds"] for side in sides)
        assert found[way]["tokens_per_round"] == found[way]["tokens"] / found[way]["rounds"]
    assert found["plain"]["acceptance"] == []


def test_one_rank_compares_both_ways(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], prompts: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    arguments = ["savings", topology_file(), "--prompts", prompts, "--max-tokens", "24", "--json", "--html", str(page)]
    capsys.readouterr()
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    adds_up(found)
    assert found["speculative"]["rounds"] < found["plain"]["rounds"]
    assert found["plain"]["collectives_per_token"] == {"total": 0.0}
    assert "http" not in page.read_text()


@pytest.mark.parametrize("sources", [[], ["--sources", "ngram"]], ids=["one source", "side by side"])
def test_texts_drawn_at_a_temperature_are_the_same_every_way(
    capsys: pytest.CaptureFixture[str],
    topology_file: Callable[..., str],
    prompts: str,
    tmp_path: Path,
    sources: list[str],
) -> None:
    """Stands against a speed-up that is measured on greedy texts, which repeat themselves, and told of all."""
    page = tmp_path / "page.html"
    arguments = ["savings", topology_file(), "--prompts", prompts, "--max-tokens", "24", "--json", *sources]
    capsys.readouterr()
    ways = []
    for drawn in ([], ["--temperature", "1.5", "--html", str(page)]):
        assert main([*arguments, *drawn]) == 0
        found = json.loads(capsys.readouterr().out)
        ways.append(found["sources"][1] if sources else found | {"rounds": found["speculative"]["rounds"]})
    greedy, warm = ways
    assert warm["identical"] is True
    assert warm["rounds"] > greedy["rounds"]
    assert "at temperature 1.5" in page.read_text()


def test_tables_for_people(capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], prompts: str) -> None:
    """Nothing is cut off on a terminal of 80 columns."""
    assert main(["savings", topology_file(), "--prompts", prompts, "--max-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "texts identical" in out
    assert all(what in out for what in ("predicted", *COMPARED))
    assert "…" not in out


def test_built_in_prompts_serve_where_no_file_is_given(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str]
) -> None:
    capsys.readouterr()
    assert main(["savings", topology_file(), "--max-tokens", "3", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["by_category"]) == {"prose", "code", "edit", "list", "qa"}


def test_two_ranks_pay_exactly_a_round_for_its_tokens(
    topology_file: Callable[..., str], prompts: str, tmp_path: Path
) -> None:
    """Collectives per token fall by the tokens per round, by count: prompts are not in either."""
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tpspec.measure", "savings", topology_file(2), "--prompts", prompts, "--max-tokens", "32"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, "--json", "--html", str(page)], capture_output=True, text=True, env=env, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    adds_up(found)
    for way in ("plain", "speculative"):
        per_token = found[way]["collectives_per_token"]
        assert per_token["total"] == pytest.approx((2 * LAYERS + 1) / found[way]["tokens_per_round"], rel=1e-12)
        assert per_token["total"] == pytest.approx(sum(value for name, value in per_token.items() if name != "total"))
        assert 0 < found[way]["wait_share"] < 1
    assert "http" not in page.read_text()


# What a user gets wrong


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tpspec: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["savngs"], "savngs"),
        ([], "COMMAND"),
        (["savings", "--max-tokens", "1"], "2 or more"),
        (["savings", "--max-tokens", "many"], "many"),
        (["savings", "--draft", "ngram"], "--draft"),
        (["savings", "--temperature", "hot"], "hot is no number"),
        (["savings", "--temperature", "-1"], "temperature is -1.0; it must be 0, or from"),
    ],
)
def test_a_wrong_command_is_one_message(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in refused(capsys, arguments)


@pytest.mark.parametrize(
    ("content", "said"), [("", "has no prompts"), ("\n \n", "has no prompts"), ('{"prompt": "a"}\n{', ":2: not JSON")]
)
def test_a_file_without_prompts_or_with_a_bad_line(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(content)
    message = refused(capsys, ["savings", topology_file(), "--prompts", str(path)])
    assert str(path) in message
    assert said in message


def test_a_topology_without_drafts_has_nothing_to_compare(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str]
) -> None:
    assert "nothing to compare" in refused(capsys, ["savings", topology_file(draft={"source": "none"})])


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "nowhere" / "page.html"
    assert str(path) in refused(capsys, ["savings", topology_file(), "--html", str(path)])


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_what_was_measured_is_shown_though_the_disk_has_no_room_for_a_file_of_it(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], prompts: str, option: str
) -> None:
    """Against an hour of measuring that ends in one line about a file."""
    capsys.readouterr()
    assert (
        main(["savings", topology_file(), "--prompts", prompts, "--max-tokens", "4", "--json", option, "/dev/full"])
        == 2
    )
    printed = capsys.readouterr()
    assert json.loads(printed.out).keys() >= KEYS
    assert printed.err == f"tpspec: error: {option} /dev/full: cannot be written: No space left on device\n"


def test_a_prompt_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], topology_file: Callable[..., str], prompts: str
) -> None:
    message = refused(capsys, ["savings", topology_file(cache={"tokens": 16}), "--prompts", prompts])
    assert "can be served, prompt and output together" in message
