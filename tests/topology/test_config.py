"""Reading a topology: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpspec.errors import UserError
from tpspec.topology.config import (
    DraftConfig,
    Placement,
    TargetConfig,
    Topology,
    TopologyError,
    automatic,
    dump,
    from_json,
    load,
    to_json,
)
from tpspec.topology.sources import SOURCES

ROOT = Path(__file__).parents[2]
SMALL = "name: small\ntarget: {model: smollm2-135m, ranks: [0, 1]}\n"


@pytest.fixture
def write(tmp_path: Path):
    def written(text: str) -> Path:
        path = tmp_path / "box.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def faults(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(TopologyError) as caught:
        load(path, overrides)
    return tuple(fault.replace(str(path), "box.yaml") for fault in caught.value.faults)


def test_two_lines_are_enough_and_the_rest_has_the_documented_defaults(write) -> None:
    """Against defaults that drift away from topologies/README.md."""
    topology = load(write(SMALL))
    assert topology.target == TargetConfig(model="smollm2-135m", ranks=(0, 1))
    assert (topology.target.dtype, topology.target.fixed_weights) == ("bfloat16", (1.0, 1.0))
    assert (topology.draft.source, topology.draft.placement, topology.draft.tokens) == ("none", Placement(), "auto")
    assert (topology.cache.tokens, topology.cache.num_tokens) == ("auto", 8192)
    assert (topology.cache.page, topology.engine.max_rows) == (16, 256)
    assert (topology.accept, topology.deterministic, topology.engine.timeout_s) == ("match", False, 60)


def test_all_faults_come_at_once_each_with_its_line_and_what_would_be_right(write) -> None:
    """Against the first fault hiding the others, and against lines that are off by one."""
    path = write(
        "name: bad\n"
        "target:\n"
        "  model: smollm2-135m\n"
        "  ranks: [0, 0]\n"
        "  dtype: bfloat61\n"
        "draft:\n"
        "  source: model\n"
        "  tokenz: 3\n"
        "accept: maybe\n"
        "cache: {tokens: 4}\n"
    )
    assert faults(path) == (
        "box.yaml:4: target.ranks: is [0, 0]; should be a list of distinct rank numbers from 0, the lead first",
        "box.yaml:5: target.dtype: is 'bfloat61'; should be float32, bfloat16 or float16",
        "box.yaml:6: draft.model: is missing; source 'model' needs the folder or hub id of the drafter's model",
        "box.yaml:8: draft.tokenz: unknown key; did you mean tokens?",
        "box.yaml:9: accept: is 'maybe'; should be match or rejection",
        "box.yaml:10: cache.tokens: is 4; should be at least cache.page (16)",
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "box.yaml: is empty"),
        ("# only a comment\n", "box.yaml: is empty"),
        ("- a\n- b\n", "box.yaml: is not a mapping"),
        ("just text", "box.yaml: is not a mapping"),
        ("name: x\ntarget: {model: a\n", "box.yaml:3: is not YAML"),
        ("name: x\n\ttarget: 3\n", "box.yaml:2: is not YAML"),
        ("name: \x00\n", "box.yaml: is not YAML"),
        (SMALL + "---\n" + SMALL, "box.yaml:3: is not YAML"),
        (SMALL + "name: again\n", "box.yaml:3: name: is given twice, first at box.yaml:1"),
        (SMALL + "draft: &a [*a]\n", "box.yaml:3: draft: repeats another part by a YAML alias"),
        (SMALL + "accept: 2026-99-99\n", "box.yaml:3: accept: '2026-99-99' cannot be read"),
        (SMALL + "accept: !!python/name:os.system x\n", "box.yaml:3: accept: 'x' cannot be read"),
        (SMALL + "draft:\n", "box.yaml:3: draft: is None; should be a section with keys among source"),
        (SMALL + "1: x\n", "box.yaml:3: 1: unknown key; should be one of name"),
        (SMALL + "deterministic: 1\n", "box.yaml:3: deterministic: is 1; should be true or false"),
        (SMALL + "serve: {port: true}\n", "box.yaml:3: serve.port: is True; should be a port number"),
        ("name: x\n", "box.yaml:1: target: is missing; should be a section with at least model and ranks"),
    ],
)
def test_a_malformed_file_is_one_readable_fault(write, text: str, fault: str) -> None:
    """Against tracebacks out of the YAML library, endless recursion, and values coerced in silence."""
    first, *_ = faults(write(text))
    assert first.startswith(fault)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    """Against FileNotFoundError and UnicodeDecodeError tracebacks."""
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    for name, why in (("none.yaml", "no such file"), ("latin.yaml", "cannot be read as UTF-8"), ("", "cannot be read")):
        with pytest.raises(UserError, match=why):
            load(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("draft: {source: model, model: m, placement: {dedicated: 1}}", "rank 1 already holds a shard"),
        ("draft: {source: model, model: m, placement: {gaps: 2}}", "rank 2 holds no shard"),
        ("draft: {source: model, model: m, placement: {dedicated: 3}}", "leaves rank 2 idle"),
        (
            "draft: {source: ngram, placement: {gaps: 1}}",
            "runs no model of its own; should be inline, or source eagle or model or mtp",
        ),
        ("pipeline: {policy: fan_out}", "should be serial, or draft elsewhere"),
        ("draft: {placement: {dedicated: true}}", "should be inline, {dedicated: RANK} or {gaps: RANK}"),
        ("draft: {placement: {dedicated: 2, gaps: 1}}", "should be inline, {dedicated: RANK} or {gaps: RANK}"),
        (
            "accept: rejection\ndraft: {source: [ngram, lookahead]}",
            "does not tell lookahead what the target says",
        ),
        ("draft: {tokens: 65}", "should be auto, or a whole number from 1 to 64"),
        ("draft: {source: ngrams}", "is 'ngrams'; should be one of none, ngram, model"),
        ("deterministic: true\ndraft: {tokens: 16}", "16 draft tokens and the root are 17 rows"),
        ("draft: {tokens: 4}\nengine: {max_rows: 4}", "should fit engine.max_rows (4)"),
        ("engine: {max_rows: 65537}", "should be a whole number of rows, 1 to 65536"),
        ("cache: {page: 12}", "should be a power of two"),
        ("cache: {page: 0}", "should be a power of two"),
        ("link: {table: a, latency_us: 3}", "should be a table or numbers"),
        ("link: {emulate: true}", "has nothing to emulate"),
        ("link: {gbytes_per_s: .inf}", "gigabytes per second, above 0"),
        ("engine: {timeout_s: 0}", "should be a number of seconds above 0"),
        ("engine: {timeout_s: 1.0e+30}", "should be a number of seconds above 0, up to 86400"),
        ("engine: {hang_s: 86401}", "should be a number of seconds above 0, up to 86400"),
        ("cache: {page: 16384}", "should be a power of two, 1 to 8192"),
        ("serve: {max_running: 65537}", "should be a whole number of requests, 1 to 65536"),
        ("serve: {max_queued: 1048577}", "should be a whole number of requests, 1 to 1048576"),
    ],
)
def test_a_topology_that_cannot_work_is_refused(write, line: str, fault: str) -> None:
    """Against a world that starts and hangs on a description that contradicts itself."""
    (only,) = faults(write(SMALL + line + "\n"))
    assert fault in only


@pytest.mark.parametrize("weights", ["[1, 2, 3]", "[1, 0]", "[1, -1]", "[1, .nan]", "[]", "even", "2"])
def test_weights_are_one_positive_number_for_each_rank(write, weights: str) -> None:
    """Against slices of no size, and against a missing weight taken as one."""
    (only,) = faults(write(SMALL), f"target.weights={weights}")
    assert "target.weights" in only


def test_an_override_is_checked_like_the_file_and_blamed_by_itself(write) -> None:
    """Against misspelt overrides dropped in silence, and faults of an override blamed on a line of the file."""
    path = write(SMALL + "draft: {source: ngram, tokens: 3}\n")
    assert load(path, ["draft.tokens=6", "draft.tokens=7", "serve={port: 0}"]).draft.tokens == 7
    assert load(path, ["draft={source: model, model: m, placement: {dedicated: 2}}"]).draft.placement == Placement(
        "dedicated", 2
    )
    assert faults(path, "draft.tokenz=4", "drafts.tokens=4", "draft.tokens=x", "draft", "name=[") == (
        "--set draft.tokenz=4: draft.tokenz: unknown key; did you mean tokens?",
        "--set drafts.tokens=4: drafts: unknown key; did you mean draft?",
        "--set draft.tokens=x: draft.tokens: is 'x'; should be auto, or a whole number from 1 to 64",
        "--set draft: should be key.path=value, for example draft.tokens=4",
        "--set name=[: '[' is not a YAML value; quotes may be missing",
    )


def test_an_override_of_a_section_is_blamed_for_what_it_leaves_out(write) -> None:
    """Against pointing at a line whose text an override has replaced."""
    assert faults(write(SMALL), "target={model: x}") == (
        "--set target={model: x}: target.ranks: is missing; "
        "should be a list of distinct rank numbers from 0, the lead first",
    )


def test_a_topology_survives_yaml_and_json(write) -> None:
    """Against a subprocess that runs something else than what was checked."""
    topology = load(
        write(SMALL + "draft: {source: model, model: m, placement: {dedicated: 2}, tokens: auto}\n"),
        ["target.weights=[1, 2.5]", "link.latency_us=3"],
    )
    assert from_json(to_json(topology)) == topology
    assert load(write(dump(topology))) == topology


def test_roles_follow_the_placement(write) -> None:
    """Against a dedicated rank counted as a shard, or a world one rank too small."""
    topology = load(write(SMALL), ["draft={source: model, model: m, placement: {dedicated: 2}}"])
    assert topology.num_ranks == 3
    assert [topology.role_of(rank) for rank in range(3)] == ["target", "target", "drafter"]
    assert [topology.drafts_on(rank) for rank in range(3)] == [False, False, True]
    with pytest.raises(ValueError, match="rank 3 is outside"):
        topology.role_of(3)
    gaps = load(write(SMALL), ["draft={source: model, model: m, placement: {gaps: 1}}"])
    assert (gaps.num_ranks, gaps.drafts_on(0), gaps.drafts_on(1)) == (2, False, True)


def test_automatic_gives_every_rank_a_shard_and_says_so() -> None:
    """Against a default world in which some ranks wait for ever."""
    topology = automatic(3, cuda=False)
    assert topology.target.ranks == (0, 1, 2)
    assert topology.draft.source == "ngram"
    assert "automatic" in topology.name


def test_rules_hold_for_topologies_made_in_code_too() -> None:
    """Against tests and callers that build what `load` would refuse."""
    with pytest.raises(ValueError, match="already holds a shard"):
        Topology(
            name="x",
            target=TargetConfig(model="smollm2-135m", ranks=(0, 1)),
            draft=DraftConfig(placement=Placement("dedicated", 0)),
        )


def test_the_readme_lists_every_key() -> None:
    """Against options nobody can find."""
    text = (ROOT / "topologies" / "README.md").read_text(encoding="utf-8")
    for name, info in Topology.model_fields.items():
        keys = getattr(info.annotation, "model_fields", None)
        for path in [f"{name}.{key}" for key in keys] if keys else [name]:
            assert f"| `{path}` |" in text, path
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    for name, kind in SOURCES.items():
        for option, about in kind.options.items():
            found = [row for row in rows if f"`{name}`" in row[0] and row[1] == f"`{option}`"]
            assert [row[3] for row in found] == [f"`{json.dumps(about.usual)}`"], (name, option)


@pytest.mark.parametrize(
    ("source", "on"),
    [("model", [0]), ("eagle", [0]), (["ngram", "eagle"], [0]), ("ngram", [0, 1]), ("early_exit", [0, 1])],
)
def test_what_computes_drafts_at_the_lead_and_what_looks_up_or_needs_the_shards_on_every_rank(
    source: str | list[str], on: list[int]
) -> None:
    """Stands against a draft model on every card, of which unlike ones would not say the same."""
    target, draft = {"model": "m", "ranks": [0, 1]}, {"source": source, "model": "d"}
    if source in ("ngram", "early_exit"):
        del draft["model"]
    made = Topology.model_validate({"name": "a test", "target": target, "draft": draft})
    assert [rank for rank in range(2) if made.drafts_on(rank)] == on
