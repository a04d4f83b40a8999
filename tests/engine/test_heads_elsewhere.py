"""A head in a process of its own: what it goes on from, the target's own layers, travels with the outcomes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.checkpoints import tiny
from tests.draft.heads.assistant import assistant
from tests.draft.kits import draft_section
from tests.engine.wire import DrafterEnd, Faults, Wire
from tests.worlds import Told, serve, topology
from tpspec.comm.messages import Outcome, Outcomes, Reach, Submit, ToLead
from tpspec.engine import remote
from tpspec.engine.engine import Engine
from tpspec.engine.remote import RemoteHost, Way
from tpspec.model.batch import Span
from tpspec.request import Request, Sampling
from tpspec.roles.build_drafter import BRANCHES, build_ahead
from tpspec.roles.drafter import Drafter
from tpspec.topology.config import Topology
from tpspec.verify.rows import RowLogits

HEADS = ["eagle", "mtp", "assistant"]
WAYS = {"serial": Way(), "fan_out": Way(Reach(ahead=True, width=3))}
PROMPTS = [(5, 6, 7, 8), tuple(range(20, 60)), (9,) * 11]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=7), Sampling()]
LENGTH = 20
NONE = Faults()


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    target = tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=4)
    return dict.fromkeys(HEADS, target) | {"assistant": tiny("gemma4", tmp_path_factory.mktemp("gemma4"))}


@pytest.fixture(scope="module")
def topologies(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Topology]:
    made = {name: tmp_path_factory.mktemp(name) for name in HEADS}
    sections = {name: draft_section(name, targets[name], made[name]) for name in HEADS if name != "assistant"}
    sections["assistant"] = {"source": "eagle", "model": str(assistant(targets["assistant"], made["assistant"]))}
    return {
        name: topology(targets[name], 2, draft=section | {"placement": {"gaps": 1}})
        for name, section in sections.items()
    }


@pytest.fixture(scope="module")
def plain(targets: dict[str, Path]) -> dict[str, list[list[int]]]:
    texts = {target: serve(topology(target), requests()).texts() for target in set(targets.values())}
    return {name: texts[target] for name, target in targets.items()}


def requests() -> list[Request]:
    return [Request(i, prompt, LENGTH, SAMPLINGS[i]) for i, prompt in enumerate(PROMPTS)]


def world(
    made: Topology,
    way: Way,
    faults: Faults,
    seed: int,
    forwards: int,
    dies_at: int = -1,
    messages: dict[int, list[ToLead]] | None = None,
) -> tuple[Told, Wire]:
    cpu = torch.device("cpu")
    wire = Wire(lambda wire: Drafter(build_ahead(made, cpu), DrafterEnd(wire)), faults, random.Random(seed))

    def begin(rank: int, engine: Engine) -> None:
        engine.draft_tokens = 3
        if rank:
            return
        engine.host = RemoteHost(wire, wire.clock.now, (way,), BRANCHES)
        verify, number = engine.target.logits, iter(range(10**6))

        def logits(spans: Sequence[Span]) -> RowLogits:
            if next(number) == dies_at:
                wire.restart()
            wire.work(forwards)
            return verify(spans)

        engine.target.logits = logits  # type: ignore[method-assign]

    return serve(made, requests(), messages=messages, begin=begin, link=wire), wire


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", HEADS)
def test_texts_are_those_of_plain_decoding(
    topologies: dict[str, Topology], plain: dict[str, list[list[int]]], head: str, way: str
) -> None:
    told, _ = world(topologies[head], WAYS[way], NONE, seed=0, forwards=3)
    assert told.texts() == plain[head]
    assert told.stats[-1].drafted > 0


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    head=st.sampled_from(HEADS),
    way=st.sampled_from(sorted(WAYS)),
    faults=st.builds(Faults, *[st.sampled_from([0.0, 0.2])] * 4),
    seed=st.integers(0, 10**6),
    forwards=st.integers(0, 5),
)
def test_no_fault_on_the_way_changes_a_text(
    topologies: dict[str, Topology],
    plain: dict[str, list[list[int]]],
    head: str,
    way: str,
    faults: Faults,
    seed: int,
    forwards: int,
) -> None:
    """Rows that are lost leave a hole in what a head goes on from: it has to be silent, not to read another's rows."""
    told, _ = world(topologies[head], WAYS[way], faults, seed, forwards)
    assert told.texts() == plain[head]


@pytest.mark.parametrize("head", ["eagle", "assistant"])
def test_a_head_that_is_new_is_told_of_all_rows_again(
    topologies: dict[str, Topology], plain: dict[str, list[list[int]]], head: str
) -> None:
    """Else a drafter that came back would stay silent until the next request."""
    told, _ = world(topologies[head], WAYS["serial"], NONE, seed=0, forwards=3, dies_at=6)
    assert told.texts() == plain[head]
    drafted = [stats.drafted for stats in told.stats]
    assert drafted[-1] > drafted[9]


@pytest.mark.parametrize("head", ["eagle", "assistant"])
def test_a_head_elsewhere_drafts_for_a_text_that_others_have_read(topologies: dict[str, Topology], head: str) -> None:
    """Else it would wait for the rows of the beginning for ever, and be silent."""
    prompt = tuple(range(3, 103))
    turns: dict[int, list[ToLead]] = {at: [Submit(Request(at, prompt, LENGTH))] for at in (1, 60)}
    told, _ = world(topologies[head], WAYS["serial"], NONE, seed=0, forwards=3, messages=turns)
    assert told.stats[-1].prefix_found == 96
    first = max(stats.drafted for stats in told.stats if not stats.prefix_found)
    assert told.stats[-1].drafted == 2 * first > 0


@pytest.mark.parametrize("head", HEADS)
def test_what_a_head_could_not_be_sent_is_sent_later(
    topologies: dict[str, Topology], head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against a head that goes on from memory where nobody has written: rows which found nobody, as while a
    drafter starts, are none that it has."""
    told, holes, send, numbers = dict[int, int](), list[Outcome](), Wire.send, iter(range(10**6))

    def heard(wire: Wire, message: Outcomes) -> bool:
        for one in message.outcomes:
            holes.extend([one] if one.taps is not None and one.taps.first > told.get(one.seq, 0) else [])
        if next(numbers) in (0, 1, 2, 9, 10):
            return False
        rows = {one.seq: one.taps.first + one.taps.count for one in message.outcomes if one.taps is not None}
        told.update(rows)
        return send(wire, message)

    monkeypatch.setattr(Wire, "send", heard)
    world(topologies[head], WAYS["serial"], NONE, seed=0, forwards=3)
    assert (told.keys(), holes) == ({0, 1, 2}, [])


def test_a_long_text_goes_to_a_head_in_pieces(topologies: dict[str, Topology], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against seconds for one message of a prompt, and a drafter that is asked of half a text: what it says then
    is nothing, and no answer that comes late."""
    asked: dict[int, list[ToLead]] = {1: [Submit(Request(0, tuple(range(3, 103)), LENGTH))]}
    whole, _ = world(topologies["eagle"], WAYS["serial"], NONE, seed=0, forwards=3, messages=dict(asked))
    monkeypatch.setattr(remote, "MOST_SENT", 3 * 96 * 4 * 30)  # rows of three layers: 30 a message
    told, _ = world(topologies["eagle"], WAYS["serial"], NONE, seed=0, forwards=3, messages=dict(asked))
    assert told.texts() == whole.texts()
    assert 0 < told.stats[-1].drafted < whole.stats[-1].drafted
    counted = told.stats[-1].elsewhere
    assert counted is not None
    assert counted.late == counted.timeouts == 0
    assert counted.hits + counted.misses <= len([stats for stats in told.stats if stats.drafted])
