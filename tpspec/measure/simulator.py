"""Real rounds over a model of time: the engine, scheduler and pages that serve, a target that only costs.

The texts are scripts, so verdicts are reached as ever. Must not know where costs or guesses come from, how drafts are
made, nor how a result is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.cache.pages import PagePool
from tpspec.comm.channel import OneRankChannel
from tpspec.comm.communicator import Purpose
from tpspec.comm.emulate import VirtualClock
from tpspec.comm.ledger import Ledger
from tpspec.comm.messages import Stats, Stop, Submit
from tpspec.engine.engine import Engine
from tpspec.engine.hosts import InlineHost
from tpspec.engine.pace import Pace
from tpspec.engine.remote import RemoteHost
from tpspec.engine.scheduler import Scheduler
from tpspec.errors import UserError
from tpspec.measure.simulated_draft import Guesses, ScriptedDrafter, SimulatedLink, SimulatedProcess
from tpspec.measure.timeline import Timeline
from tpspec.measure.trace import Mark, Round, round_between
from tpspec.roles.build_drafter import ways_of
from tpspec.roles.target import lead_rounds
from tpspec.topology.caches import target_slots
from tpspec.topology.rounds import NORM_BYTES
from tpspec.verify.match import children, walk
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import RowLogits

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.comm.messages import ToLead
    from tpspec.engine.hosts import DraftHost
    from tpspec.measure.script import Script
    from tpspec.measure.time_model import TimeModel
    from tpspec.model.batch import Moves, Span, StateCopy
    from tpspec.request import Delta, Request
    from tpspec.tokens import Verdict
    from tpspec.topology.config import Topology
    from tpspec.topology.cost import StepCost
    from tpspec.verify.noise import Noise
    from tpspec.verify.rows import Case, Listener

TARGET, COLLECTIVES = "target", "collectives"
PICK_BYTES = 8  # (value, id) of a row
# Rounds whose every collective is drawn; later ones are drawn as one block of each kind, or files would be huge.
DETAILED = 3
FAN_OUT_ODDS = 0.6  # see Script.ranks


class SimulatedTarget:
    """Forwards that take their time and compute nothing. fixed_rows: what every round is padded to, or 0."""

    launches = False

    def __init__(
        self,
        cost: StepCost,
        scripts: Mapping[int, Script],
        clock: VirtualClock,
        timeline: Timeline,
        ledger: Ledger,
        fixed_rows: int,
    ) -> None:
        self.read_prompt = False  # whether the last forward did
        self.gaps: SimulatedProcess | None = None  # who has the card while it waits
        self._cost, self._scripts, self._fixed_rows = cost, scripts, fixed_rows
        self._clock, self._timeline, self._ledger = clock, timeline, ledger
        self._num_rounds = 0

    def runs_alone(self, num_rows: int, num_logits: int) -> bool:
        return False

    def logits(self, spans: Sequence[Span]) -> RowLogits:
        self._num_rounds += 1
        self.read_prompt = any(self._reads_prompt(span) for span in spans)
        rows = max(self._fixed_rows, sum(len(span.tokens) for span in spans))
        self._spend(rows, "read prompt" if self.read_prompt else "verify")
        if self.gaps is not None:
            self.gaps.live(self._clock.now(), self._cost.waiting_s(rows) / self._cost.seconds(rows))
        self._count(rows, sum(span.num_logits for span in spans))
        return RowLogits(torch.empty(0, 0), vocab=0)

    def launch(self, spans: Sequence[Span]) -> bool:
        raise AssertionError("it does not launch")

    def release(self, tokens: Sequence[int]) -> None:
        raise AssertionError("it does not launch")

    def taps(self) -> Tensor | None:
        return None

    def move(self, moves: Moves) -> None: ...

    def copy(self, copies: Sequence[StateCopy]) -> None: ...

    def _reads_prompt(self, span: Span) -> bool:
        """Or reads a text again that had to leave the cache."""
        return span.start < self._scripts[span.seq].num_prompt or span.num_logits < len(span.tokens)

    def _spend(self, rows: int, name: str) -> None:
        parts = max(1, self._cost.reduces) if self._num_rounds <= DETAILED else 1
        compute_s, waiting_s = self._cost.compute_s(rows) / parts, self._cost.waiting_s(rows) / parts
        notes = {"round": self._num_rounds, "rows": rows}
        for _ in range(parts):
            self._timeline.spend(self._clock, TARGET, name, compute_s, **notes)
            self._timeline.spend(self._clock, COLLECTIVES, f"all-reduce ({name})", waiting_s, **notes)

    def _count(self, rows: int, num_logits: int) -> None:
        """In the real ledger, attention's and the MLP's in turn, as in most models; picks take no time of their own in
        the cost model."""
        each_s = self._cost.waiting_s(rows) / max(1, self._cost.all_reduces)
        for number in range(self._cost.reduces):
            purpose = Purpose.mlp if number % 2 else Purpose.attention
            self._ledger.add(purpose, rows * self._cost.row_bytes, each_s)
        for _ in range(self._cost.norms):
            self._ledger.add(Purpose.norm, rows * NORM_BYTES, each_s)
        if self._cost.reduces:
            self._ledger.add(Purpose.pick, num_logits * PICK_BYTES, 0.0)


class ScriptedRule:
    """`match`, with the script's tokens for the target's own draws."""

    name = "match"
    draws_at_once = False

    def __init__(self, scripts: Mapping[int, Script]) -> None:
        self._scripts = scripts

    def judge(
        self, cases: Sequence[Case], rows: RowLogits, noise: Noise, listener: Listener | None = None
    ) -> list[Verdict]:
        return [self._verdict(case) for case in cases]

    def _verdict(self, case: Case) -> Verdict:
        script, start = self._scripts[case.seq], len(case.context) - case.num_prompt
        picks = iter([script.truth(start + depth) for depth in (0, *case.tree.depths())])
        return walk(case, picks, children(case.tree))


class Simulation:
    """The engine of one lead, ready for rounds, and what its time went to."""

    def __init__(self, topology: Topology, time: TimeModel, scripts: Sequence[Script], guesses: Guesses) -> None:
        by_id = {script.id: script for script in scripts}
        fixed_rows = topology.engine.fixed_rows if topology.deterministic else None
        self.clock, self.timeline, ledger = VirtualClock(), Timeline(), Ledger()
        pool = PagePool(target_slots(topology) // topology.cache.page, topology.cache.page)
        self.target = SimulatedTarget(time.target, by_id, self.clock, self.timeline, ledger, fixed_rows or 0)
        self.scheduler = Scheduler(
            pool, max_rows=topology.engine.max_rows, max_running=topology.serve.max_running, fixed_rows=fixed_rows
        )
        placement = topology.draft.placement.kind
        self.engine = Engine(
            target=self.target,
            scheduler=self.scheduler,
            pool=pool,
            rule=ScriptedRule(by_id),
            noise=CounterNoise(),
            host=self._inline(time, by_id)
            if placement == "inline"
            else self._elsewhere(topology, time, by_id, guesses),
            draft_tokens=None,  # a request may say how many
            pace=Pace(gives_odds=placement != "inline"),
            vocab=1 + max(script.max_tokens for script in scripts),
            ledger=ledger,
            clock=self.clock.now,
        )

    def _inline(self, time: TimeModel, scripts: Mapping[int, Script]) -> DraftHost:
        return InlineHost(ScriptedDrafter(time.draft, scripts, self.clock, self.timeline))

    def _elsewhere(
        self, topology: Topology, time: TimeModel, scripts: Mapping[int, Script], guesses: Guesses
    ) -> DraftHost:
        """In gaps the drafter has the card while its shard waits, and all of it while no round runs."""
        process = SimulatedProcess(topology, time.draft, guesses, self.timeline)
        if topology.draft.placement.kind == "gaps":
            self.target.gaps = process
        link = SimulatedLink(process, scripts, self.clock, self.timeline, time.message_s)
        return RemoteHost(link, self.clock.now, ways_of(topology))


class Crowd:
    """The lead's inbox: as many requests at a time as `concurrency` says, each answer's end followed by the next.

    rounds: those that read no prompt, as savings counts them. at: when the last round ended.
    """

    def __init__(self, simulation: Simulation, requests: Sequence[Request], concurrency: int) -> None:
        self.rounds: list[Round] = []
        self.outputs: dict[int, list[int]] = {request.id: [] for request in requests}
        self._simulation, self._waiting, self._free = simulation, deque(requests), concurrency
        self._before = Mark(0.0, Stats())

    @property
    def at(self) -> float:
        return self._before.at

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        if wait and not self._waiting:
            return [Stop()]
        num_sent = min(self._free, len(self._waiting))
        self._free -= num_sent
        return [Submit(self._waiting.popleft()) for _ in range(num_sent)]

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        mark = Mark(self._simulation.clock.now(), stats)
        for delta in deltas:
            if delta.error is not None:
                raise UserError(delta.error)
            self.outputs[delta.id] += delta.tokens
            self._free += delta.finish is not None
        if not self._simulation.target.read_prompt:
            self.rounds.append(round_between(self._before, mark, deltas))
        self._before = mark


@dataclass(frozen=True, slots=True)
class Simulated:
    """rounds: that read no prompt. seconds, stats: of everything."""

    rounds: list[Round]
    seconds: float
    timeline: Timeline
    stats: Stats


def simulate(
    topology: Topology,
    time: TimeModel,
    scripts: Sequence[Script],
    *,
    num_drafts: int | None,
    concurrency: int = 1,
    fan_out_odds: float = FAN_OUT_ODDS,
) -> Simulated:
    """Every script, with drafts of num_drafts tokens, or of as many as pay. fan_out_odds: see Script.ranks."""
    simulation = Simulation(topology, time, scripts, Guesses(scripts, fan_out_odds))
    crowd = Crowd(simulation, [script.request(num_drafts) for script in scripts], concurrency)
    lead_rounds(simulation.engine, OneRankChannel(), crowd)
    return Simulated(crowd.rounds, crowd.at, simulation.timeline, simulation.engine.stats())
