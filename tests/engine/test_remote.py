"""Drafts from elsewhere: whatever happens to them on the way, texts are those of plain decoding."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.checkpoints import tiny
from tests.draft.table import ask
from tests.engine.wire import DrafterEnd, Faults, Wire
from tests.worlds import Told, serve, topology
from tpspec.comm.messages import Draft, Drafts, Reach
from tpspec.engine.engine import Engine
from tpspec.engine.remote import Elsewhere, RemoteHost, Way
from tpspec.request import Request, Sampling
from tpspec.roles.build_drafter import branches_of, build_ahead
from tpspec.roles.drafter import Drafter
from tpspec.tokens import TokenTree

SERIAL, OPTIMISTIC, FAN_OUT = Way(), Way(Reach(ahead=True)), Way(Reach(ahead=True, width=3))
ALTERNATE = Way(alternates=True)
POLICIES = {
    "serial": (SERIAL,),
    "optimistic": (OPTIMISTIC,),
    "fan_out": (FAN_OUT,),
    "alternate": (ALTERNATE,),
    "auto": (FAN_OUT, OPTIMISTIC, ALTERNATE),
}
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=7), Sampling(temperature=0.8, top_p=0.9, seed=3), Sampling()]
PROMPTS = [(5, 6, 7, 8), tuple(range(20, 60)), (9,) * 11, tuple(range(100, 103))]
LENGTH = 24
NONE = Faults()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """The target's own weights: a drafter whose drafts are accepted, so that futures come true."""
    return Path(shutil.copytree(target, tmp_path_factory.mktemp("draft") / "model"))


def requests(count: int) -> list[Request]:
    return [Request(i, PROMPTS[i], LENGTH, SAMPLINGS[i]) for i in range(count)]


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return serve(topology(target), requests(4)).texts()


def world(
    target: Path,
    draft: Path,
    ways: Sequence[Way],
    *,
    faults: Faults = NONE,
    count: int = 4,
    num_ranks: int = 1,
    seed: int = 0,
    accept: str = "match",
    tree: str = "chain",
    between: Callable[[Wire, int], None] = lambda wire, number: wire.work(3),
) -> tuple[Told, Wire]:
    """A world with a drafter at a wire. between: what happens while the target verifies, by round."""
    made = topology(target, num_ranks, draft={"source": "model", "model": str(draft), "tree": tree}, accept=accept)
    ahead_of = lambda wire: Drafter(build_ahead(made, torch.device("cpu")), DrafterEnd(wire))  # noqa: E731
    wire = Wire(ahead_of, faults, random.Random(seed))
    bare = made.model_copy(update={"draft": made.draft.model_copy(update={"source": "none", "model": None})})

    def begin(rank: int, engine: Engine) -> None:
        branches = branches_of(made, gives_q=accept == "rejection")
        engine.host = RemoteHost(wire, wire.clock.now, ways, branches) if rank == 0 else Elsewhere()
        engine.draft_tokens = 3
        if rank == 0:
            verify, number = engine.target.logits, iter(range(10**6))

            def logits(spans: object) -> object:
                between(wire, next(number))
                return verify(spans)  # type: ignore[arg-type]

            engine.target.logits = logits  # type: ignore[method-assign, assignment]

    return serve(bare, requests(count), begin=begin), wire


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("count", "num_ranks"), [(1, 1), (4, 1), (4, 2)])
def test_texts_are_those_of_plain_decoding(
    target: Path, draft: Path, plain: list[list[int]], policy: str, count: int, num_ranks: int
) -> None:
    told, _ = world(target, draft, POLICIES[policy], count=count, num_ranks=num_ranks)
    assert told.texts() == plain[:count]
    last = told.stats[-1]
    assert last.elsewhere is not None
    assert last.accepted > 0.8 * last.drafted > 0


@pytest.mark.parametrize("policy", ["serial", "fan_out"])
def test_trees_come_from_elsewhere_as_chains_do(target: Path, draft: Path, plain: list[list[int]], policy: str) -> None:
    """And are found at home as the drafter would answer them."""
    told, _ = world(target, draft, POLICIES[policy], tree="dynamic", num_ranks=2)
    assert told.texts() == plain
    assert any(len(delta.drafted) and max(delta.drafted) > 1 for delta in told.deltas)
    assert told.stats[-1].elsewhere.hits > 0 or policy == "serial"


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    faults=st.builds(Faults, *[st.sampled_from([0.0, 0.1, 0.5])] * 3, st.sampled_from([0.0, 0.3])),
    seed=st.integers(0, 10**6),
    forwards=st.integers(0, 6),
    tree=st.sampled_from(["chain", "dynamic"]),
)
def test_no_fault_on_the_way_changes_a_text(
    target: Path, draft: Path, plain: list[list[int]], policy: str, faults: Faults, seed: int, forwards: int, tree: str
) -> None:
    """Lost outcomes leave a gap in what the drafter knows, doubled ones could grow its text twice, late answers belong
    to texts that have moved on."""
    told, wire = world(
        target,
        draft,
        POLICIES[policy],
        faults=faults,
        seed=seed,
        tree=tree,
        between=lambda wire, _: wire.work(forwards),
    )
    assert told.texts() == plain
    wire.drafter._ahead._pool.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_drafter_that_dies_and_comes_back_is_told_everything(
    target: Path, draft: Path, plain: list[list[int]], policy: str
) -> None:
    def between(wire: Wire, number: int) -> None:
        wire.alive = wire.alive and number != 2
        if number == 7:
            wire.restart()
        wire.work(4)

    told, _ = world(target, draft, POLICIES[policy], between=between)
    assert told.texts() == plain
    accepted = [stats.accepted for stats in told.stats]
    assert accepted[-1] > accepted[8]


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    events=st.dictionaries(st.integers(0, 30), st.sampled_from(["kill", "restart", "stop", "go_on"]), max_size=8),
    forwards=st.integers(0, 6),
)
def test_kills_stops_and_restarts_in_any_order_change_no_text(
    target: Path, draft: Path, plain: list[list[int]], policy: str, events: dict[int, str], forwards: int
) -> None:
    """What queued up while a drafter was stopped comes at once, some of it was never sent, and a new one knows
    nothing of texts that the lead believes it knows."""

    def between(wire: Wire, number: int) -> None:
        if number in events:
            getattr(wire, events[number])()
        wire.work(forwards)

    told, wire = world(target, draft, POLICIES[policy], between=between)
    assert told.texts() == plain
    wire.drafter._ahead._pool.check_integrity()


def test_drafting_ahead_answers_at_once(target: Path, draft: Path) -> None:
    """A drafter that is right, and has the time, leaves nothing to wait for."""
    told, _ = world(target, draft, POLICIES["optimistic"], count=1, between=lambda wire, _: wire.work(8))
    found = told.stats[-1].elsewhere
    assert found is not None
    assert found.hits >= 0.7 * (found.hits + found.misses) > 0
    serial, _ = world(target, draft, POLICIES["serial"], count=1, between=lambda wire, _: wire.work(8))
    assert serial.stats[-1].elsewhere is not None
    assert serial.stats[-1].elsewhere.hits <= 1  # the one it read while nobody waited for it yet


def test_a_silent_drafter_is_waited_for_once(target: Path, draft: Path, plain: list[list[int]]) -> None:
    """Waiting a second in every round would be worse than having no drafter."""

    def between(wire: Wire, number: int) -> None:
        wire.alive = number < 4

    told, _ = world(target, draft, POLICIES["serial"], count=1, between=between)
    assert told.texts() == plain[:1]
    found = told.stats[-1].elsewhere
    assert found is not None
    assert found.timeouts <= 1


def test_a_drafter_is_away_however_short_the_texts_are() -> None:
    """Stands against a silence that begins anew with every request, so that nobody is ever told."""
    wire = Wire(lambda wire: None)  # type: ignore[arg-type, return-value]
    wire.alive = False
    host = RemoteHost(wire, wire.clock.now)
    for seq in range(3):
        for length in range(2, 6):
            host.ask([ask(seq, list(range(length)))])
            wire.clock.advance(0.25)
            host.gather([seq])
        host.forget(seq)
        wire.clock.advance(100)  # nobody asks for anything
        host.gather([])
        found = host.drafting()
        assert found is not None
        assert found.is_away == (seq == 2)


def test_an_answer_for_another_length_is_late(target: Path, draft: Path) -> None:
    """Verified all the same it would cost rows; taken for the right one under rejection it would cost the law."""
    wire = Wire(lambda wire: None)  # type: ignore[arg-type, return-value]
    wire.alive = False
    host = RemoteHost(wire, wire.clock.now)
    host.ask([ask(1, [1, 2, 3])])
    for base in (2, 4, 3, 3):
        wire.answers.append(Drafts((Draft(1, base, TokenTree.chain([base]), foreseen=True),)))
    assert host.gather([1]).trees == {1: TokenTree.chain([3])}
    found = host.drafting()
    assert found is not None
    assert (found.hits, found.late) == (1, 3)


def test_a_draft_that_came_while_a_text_was_read_anew_is_not_of_the_longer_one() -> None:
    """Stands against drafts of a text that was preempted, verified behind the token that it gained when it was back."""
    wire = Wire(lambda wire: None)  # type: ignore[arg-type, return-value]
    wire.alive = False
    host = RemoteHost(wire, wire.clock.now)
    host.ask([ask(1, [1, 2, 3])])
    wire.answers.append(Drafts((Draft(1, 3, TokenTree.chain([4]), foreseen=False),)))
    assert host.gather([]).trees == {}
    host.ask([ask(1, [1, 2, 3, 4])])
    assert host.gather([1]).trees == {}


def test_what_drafters_counted_is_summed_over_all_that_there_have_been() -> None:
    """Stands against a restart that sets counters back, which Prometheus takes for a restart of the server."""
    wire = Wire(lambda wire: None)  # type: ignore[arg-type, return-value]
    wire.alive = False
    host = RemoteHost(wire, wire.clock.now)
    host.ask([ask(1, [1, 2, 3])])
    for num_read, seconds in ((3, 1.0), (5, 2.0), (1, 0.5)):  # the last is of another
        wire.answers.append(Drafts(num_read=num_read, num_dropped=1, work_s=seconds, inside_s=seconds / 2))
    host.gather([1])
    found = host.drafting()
    assert found is not None
    assert (found.num_read, found.num_dropped) == (6, 2)
    assert (found.work_s, found.inside_s, found.delayed_s) == (2.5, 1.25, 0)
