"""`savings --sources` through its front door: sources that take turns on one target, here and under torchrun."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.checkpoints import tiny
from tests.draft.kits import draft_section
from tests.measure.test_page import CONTEXT, section
from tests.measure.test_savings import LAYERS, PROMPTS, refused
from tests.measure.test_stats import record
from tests.worlds import serve, topology
from tpspec.engine.engine import Engine
from tpspec.measure.__main__ import main
from tpspec.measure.contenders import Contender, LeftOut, contenders, parsed
from tpspec.measure.page import render_sources
from tpspec.measure.side_by_side import turns
from tpspec.measure.stats import source_beside_plain
from tpspec.measure.tables import print_sources
from tpspec.request import Request
from tpspec.topology.sources import SOURCES

ROOT = Path(__file__).parents[2]
ALONE = [name for name, kind in SOURCES.items() if kind.loads == "nothing" and name != "none"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter."""
    folder = tmp_path_factory.mktemp("models")
    target, small = tiny("smollm2", folder / "target"), tiny("smollm2", folder / "small", num_hidden_layers=1)
    shutil.copy(target / "tokenizer.json", small)
    return target, small


@pytest.fixture(scope="module")
def files(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the sources load that need a file, by name."""
    sections = {name: draft_section(name, models[0], tmp_path_factory.mktemp(name)) for name in SOURCES}
    return {name: section["model"] for name, section in sections.items() if "model" in section}


@pytest.fixture
def command(models: tuple[Path, Path], tmp_path: Path) -> Callable[..., list[str]]:
    """savings FILE --prompts ... of a topology that drafts from `draft`."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[1:3]))

    def write(num_ranks: int = 1, **draft: Any) -> list[str]:
        target = {"model": str(models[0]), "ranks": list(range(num_ranks)), "dtype": "float32"}
        drafts = {"source": "ngram", "tokens": 4} | draft
        made = {"name": "a test", "target": target, "draft": drafts, "device": "cpu", "cache": {"tokens": 512}}
        (tmp_path / "topology.yaml").write_text(json.dumps(made))  # JSON is YAML
        files = [str(tmp_path / "topology.yaml"), "--prompts", str(tmp_path / "prompts.jsonl")]
        return ["savings", *files, "--max-tokens", "12"]

    return write


def found_by(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def found_in_a_world(num_ranks: int, arguments: list[str]) -> dict[str, Any]:
    command = [*TORCHRUN, str(num_ranks), "-m", "tpspec.measure", *arguments, "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=150)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    assert all(one["identical"] for one in found["sources"])
    return {one["source"]: one for one in found["sources"]}


@given(num_prompts=st.integers(1, 12), num_ways=st.integers(2, 9))
def test_every_prompt_goes_every_way_and_no_way_goes_first_more_often(num_prompts: int, num_ways: int) -> None:
    """Stands against a drift of the machine that favours a source for its place in the list."""
    order = turns(num_prompts, num_ways)
    assert [turn.way for turn in order[:num_ways]] == list(range(num_ways))
    measured = order[num_ways:]
    assert sorted(measured) == [(prompt, way) for prompt in range(num_prompts) for way in range(num_ways)]
    for place in range(num_ways):
        counts = Counter(turn.way for turn in measured[place::num_ways])
        assert max(counts.values()) - min(counts[way] for way in range(num_ways)) <= 1


def test_all_is_every_source_that_needs_no_file_and_the_topologys_own(models: tuple[Path, Path]) -> None:
    """Its own as the topology has it, once; a file that is named makes another contender."""
    own = topology(models[0], draft={"source": "model", "model": str(models[1]), "tokens": 3, "tree": "static"})
    wanted = list(contenders(parsed(f"all,model,ngram+model={models[1]}"), own))
    assert [one.label for one in wanted] == [*ALONE, "model", "ngram+model (small)"]
    made = {one.label: one for one in wanted if isinstance(one, Contender)}
    assert made["model"].own
    assert made["model"].topology == own
    assert made["ngram"].topology.draft.model is None
    assert made["ngram"].topology.draft.tokens == 3
    assert made["ngram"].topology.draft.tree == "auto", "what looks texts up makes no tree of a fixed shape"
    assert made["early_exit"].topology.draft.tree == "static"
    assert made["ngram+model (small)"].topology.draft.sources == ("ngram", "model")
    plain = topology(models[0])
    assert [one.label for one in contenders(parsed("all,ngram"), plain)] == ALONE
    (missing,) = contenders(parsed("model"), plain)
    assert isinstance(missing, LeftOut)
    assert "draft.model is missing; source 'model' needs" in missing.reason


def test_sources_stand_side_by_side(
    capsys: pytest.CaptureFixture[str], command: Callable[..., list[str]], models: tuple[Path, Path], tmp_path: Path
) -> None:
    """What cannot be made is said and ends nothing."""
    page = tmp_path / "page.html"
    listed = f"all,model={models[1]},model={tmp_path / 'nowhere'}"
    found = found_by(capsys, [*command(), "--sources", listed, "--html", str(page)])
    sources, left_out = by_name(found), {one["source"]: one["reason"] for one in found["left_out"]}
    assert {*sources, *left_out} == {"plain", *ALONE, "model (small)", "model (nowhere)"}
    assert "should be a folder that exists" in left_out["model (nowhere)"]
    plain, model = sources["plain"], sources["model (small)"]
    assert plain["ratio"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert (plain["tokens_per_round"], plain["drafts_per_round"]) == (1.0, 0.0)
    assert model["tokens"] == plain["tokens"]
    assert 2 < model["drafts_per_round"] <= 4
    assert list(plain["by_category"]) == ["edit", "summarization"]
    assert "http" not in page.read_text()
    assert "model (nowhere): not measured" in page.read_text()


def test_what_a_source_does_is_not_changed_by_those_it_takes_turns_with(
    capsys: pytest.CaptureFixture[str], command: Callable[..., list[str]], models: tuple[Path, Path]
) -> None:
    """Stands against records and caches of one source that another goes on with."""
    beside = by_name(found_by(capsys, [*command(), "--sources", f"ngram,model={models[1]}"]))
    for name in ("ngram", f"model={models[1]}"):
        (alone,) = found_by(capsys, [*command(), "--sources", name])["sources"][1:]
        same = beside[alone["source"]]
        assert [same[key] for key in ("rounds", "drafts_per_round", "acceptance")] == [
            alone[key] for key in ("rounds", "drafts_per_round", "acceptance")
        ]


def test_all_sources_take_turns_on_the_ranks_of_a_world(
    command: Callable[..., list[str]], files: dict[str, str]
) -> None:
    """The topology's own drafter is a process of its own, and the rank that guards it only waits.

    Stands against ranks that exchange their drafts at different rounds, against taps of the last source, and against
    collectives that nobody counts: who drafts through the shards pays more than a round's, and nobody else.
    """
    own = {"source": "model", "model": files["model"], "placement": {"dedicated": 2}}
    listed = ",".join(["all", *(f"{name}={file}" for name, file in files.items())])
    found = found_in_a_world(3, [*command(2, **own), "--sources", listed])
    sources = by_name(found)
    labels = [f"{name} ({Path(file).name})" for name, file in files.items()]
    assert {*sources, *(one["source"] for one in found["left_out"])} == {"plain", *ALONE, *labels, "model (dedicated)"}
    assert sources.keys() >= {"plain", "ngram", "early_exit", *labels}
    assert sources["model (dedicated)"]["elsewhere"]["messages"] > 0
    for name, one in sources.items():
        per_token = one["collectives_per_token"]
        rounds = (2 * LAYERS + 1) / one["tokens_per_round"]
        assert per_token["total"] - per_token.get("draft", 0) == pytest.approx(rounds, rel=1e-12)
        assert ("draft" in per_token) == (name in SOURCES and SOURCES[name].thins is not None)
        assert name in ("plain", "ngram", "suffix", "model (dedicated)") or one["drafts_per_round"] > 0.5


def test_drafts_are_not_exchanged_under_a_request_that_runs(models: tuple[Path, Path]) -> None:
    """Stands against a source that is told the end of a text whose beginning it has not seen."""
    refusals: list[str] = []

    def exchange(rank: int, engine: Engine) -> None:
        step = engine.step

        def stepping(*given):  # type: ignore[no-untyped-def]
            with pytest.raises(ValueError, match="while requests run"):
                engine.draw_from(None)  # type: ignore[arg-type]
            refusals.append("refused")
            return step(*given)

        engine.step = stepping  # type: ignore[method-assign]

    serve(topology(models[0]), [Request(0, (3, 4), 3)], begin=exchange)
    assert len(refusals) == 3


def test_the_ratio_is_of_each_prompt_its_quartiles_over_prompts() -> None:
    """Stands against one long answer that decides for all, and against drafts counted by depth instead of by token."""
    plain = [record(10, seconds, 10) for seconds in (1.0, 2.0, 3.0, 40.0, 5.0)]
    drafted = [record(10, seconds, 5) for seconds in (1.0, 1.0, 1.0, 10.0, 1.0)]
    found = source_beside_plain(plain, drafted)
    assert found["ratio"] == pytest.approx({"low": 2.0, "median": 3.0, "high": 4.0})
    assert found["speedup"] == 51 / 14
    assert found["drafts_per_round"] == 0.0
    nothing = source_beside_plain([record(0, 0.0, 0)], [record(0, 0.0, 0)])
    assert nothing["ratio"] == {"low": None, "median": None, "high": None}


def test_table_and_page_of_many_sources(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is cut off on 80 columns, nothing unescaped, and a way without a single token has no numbers."""
    plain, none = [record(10, 100.0, 10)], [record(0, 0.0, 0)]
    cascade = "ngram+eagle (smollm2-135m-eagle3)"
    found = {
        "sources": [
            {"source": name} | source_beside_plain(plain, records)
            for name, records in (
                ("plain", plain),
                (cascade, [record(10, 5.0, 2)]),
                ("eagle", none),
            )
        ],
        "left_out": [{"source": "medusa [1] <b>", "reason": "no file"}],
    }
    print_sources(found)
    out = capsys.readouterr().out
    assert "…" not in out
    assert "20.00-20.00" in out
    assert "medusa [1] <b>: not measured: no file" in out
    page = render_sources(found, CONTEXT)
    assert "<b>" not in page
    assert len(re.findall(r"<svg|<table", page)) == len(re.findall(r'<div class="wide"><(?:svg|table)', page)) == 6
    assert re.findall(r">([0-9.]+|-)</text>", section(page, "Speed beside")) == ["1.00", "20.00", "-"]


# What a user gets wrong


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ("ngrm", "'ngrm'; did you mean ngram?"),
        ("all,", "''; should be one of"),
        ("none", "plain decoding is in every comparison"),
        ("ngram=folder", "ngram loads nothing; should be ngram alone"),
        ("ngram+ngram", "should name each once"),
        ("model=/nowhere", "nothing to compare; model (nowhere): no model '/nowhere'"),
        ("model", "nothing to compare; model: draft.model is missing"),
    ],
)
def test_a_list_that_cannot_be_compared_is_one_message(
    capsys: pytest.CaptureFixture[str], command: Callable[..., list[str]], sources: str, said: str
) -> None:
    assert said in refused(capsys, [*command(), "--sources", sources])


def test_a_trace_is_of_one_source(
    capsys: pytest.CaptureFixture[str], command: Callable[..., list[str]], tmp_path: Path
) -> None:
    message = refused(capsys, [*command(), "--sources", "all", "--trace", str(tmp_path / "trace.jsonl")])
    assert "records one source" in message
