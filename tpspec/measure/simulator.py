"""Real rounds over a model of time: the engine, scheduler and pages that serve, a target and a drafter that only cost.

The texts are scripts: token p of an answer is the id p + 1, a wrong draft is id 0, so verdicts are reached as ever.
Drafters have clocks of their own. Must not know where costs or guesses come from, nor how a result is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import torch

from tpspec.cache.pages import PagePool
from tpspec.comm.channel import OneRankChannel
from tpspec.comm.communicator import Purpose
from tpspec.comm.emulate import VirtualClock
from tpspec.comm.ledger import Ledger
from tpspec.comm.messages import Draft, Drafts, Outcomes, Stats, Stop, Submit
from tpspec.draft.protocol import Ask, Needs
from tpspec.engine.engine import Engine
from tpspec.engine.hosts import InlineHost
from tpspec.engine.pace import Pace
from tpspec.engine.remote import RemoteHost
from tpspec.engine.scheduler import Scheduler
from tpspec.errors import UserError
from tpspec.measure.timeline import Timeline
from tpspec.measure.trace import NO, SILENT, YES, Mark, Recording, Round, drafts, offers, round_between, settled
from tpspec.request import Request
from tpspec.roles.target import lead_rounds
from tpspec.tokens import TokenTree
from tpspec.verify.match import walk
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import RowLogits

if TYPE_CHECKING:
    from tpspec.comm.messages import Outcome, ToDrafter, ToLead
    from tpspec.draft.protocol import Taps
    from tpspec.engine.hosts import DraftHost
    from tpspec.measure.time_model import TimeModel
    from tpspec.model.batch import Span
    from tpspec.request import Delta
    from tpspec.tokens import Verdict
    from tpspec.topology.config import Topology
    from tpspec.topology.cost import StepCost
    from tpspec.verify.noise import Noise
    from tpspec.verify.rows import Case

TARGET, COLLECTIVES, DRAFTER, GAPS = "target", "collectives", "drafter", "gaps"
WRONG = 0
PICK_BYTES = 8  # (value, id) of a row
# Rounds whose every collective is drawn; later ones are drawn as one block of each kind, or files would be huge.
DETAILED = 3


@dataclass(frozen=True, slots=True)
class Script:
    """What will happen to one request. guesses: see trace.py. offers: what is drafted at most, by output position."""

    id: int
    num_prompt: int
    guesses: str
    max_tokens: int
    offers: Mapping[int, int] = field(default_factory=dict)

    def request(self, num_drafts: int | None) -> Request:
        """The answer's last token ends it, as a model's own end would. num_drafts None: as many as pay."""
        stops = frozenset({len(self.guesses)})
        prompt = (WRONG,) * self.num_prompt
        return Request(self.id, prompt, self.max_tokens, stop_ids=stops, num_drafts=num_drafts)

    def truth(self, position: int) -> int:
        """The token at an output position."""
        return position + 1

    def chain(self, start: int, num_tokens: int) -> TokenTree:
        """What is drafted from output position `start` on; who is wrong once goes on, and stays wrong."""
        num_tokens = min(num_tokens, self.offers.get(start, num_tokens))
        ahead = self.guesses[start : start + num_tokens].ljust(num_tokens, NO)
        num_right = len(ahead) - len(ahead.lstrip(YES))
        if ahead[num_right : num_right + 1] == SILENT:
            num_tokens = num_right
        right = [self.truth(start + i) for i in range(num_right)]
        return TokenTree.chain(right + [WRONG] * (num_tokens - num_right))


def scripts_of(recordings: Sequence[Recording], seed: int) -> list[Script]:
    """For any draft length; what is unknown of a recording is drawn."""
    both = zip(recordings, settled(recordings, seed), strict=True)
    return [
        Script(number, one.prompt_tokens, guesses, one.max_tokens, offers(one))
        for number, (one, guesses) in enumerate(both)
    ]


def replays_of(recordings: Sequence[Recording]) -> list[Script]:
    """For draft lengths as they were: rounds draft and accept what the recorded ones did, if more is asked for."""
    return [
        Script(number, one.prompt_tokens, one.guesses, one.max_tokens, drafts(one))
        for number, one in enumerate(recordings)
    ]


class SimulatedTarget:
    """Forwards that take their time and compute nothing. fixed_rows: what every round is padded to, or 0."""

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
        self._cost, self._scripts, self._fixed_rows = cost, scripts, fixed_rows
        self._clock, self._timeline, self._ledger = clock, timeline, ledger
        self._num_rounds = 0

    def logits(self, spans: Sequence[Span]) -> RowLogits:
        self._num_rounds += 1
        self.read_prompt = any(self._reads_prompt(span) for span in spans)
        rows = max(self._fixed_rows, sum(len(span.tokens) for span in spans))
        self._spend(rows, "read prompt" if self.read_prompt else "verify")
        self._count(rows, sum(span.num_logits for span in spans))
        return RowLogits(torch.empty(0, 0), vocab=0)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        return

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
        """In the real ledger, as the real target would; picks take no time of their own in the cost model."""
        reduces = self._cost.reduces
        each_s = self._cost.waiting_s(rows) / max(1, reduces)
        for number in range(reduces):
            purpose = Purpose.mlp if number % 2 else Purpose.attention
            self._ledger.add(purpose, rows * self._cost.row_bytes, each_s)
        if reduces:
            self._ledger.add(Purpose.pick, num_logits * PICK_BYTES, 0.0)


class ScriptedRule:
    """`match`, with the script's tokens for the target's own draws."""

    name = "match"

    def __init__(self, scripts: Mapping[int, Script]) -> None:
        self._scripts = scripts

    def judge(self, cases: Sequence[Case], rows: RowLogits, noise: Noise) -> list[Verdict]:
        return [self._verdict(case) for case in cases]

    def _verdict(self, case: Case) -> Verdict:
        script, start = self._scripts[case.seq], len(case.context) - case.num_prompt
        return walk(case, iter([script.truth(start + depth) for depth in (0, *case.tree.depths())]))


class ScriptedDrafter:
    """A draft source whose time passes on the clock of whoever runs it."""

    needs = Needs()

    def __init__(
        self, cost: StepCost | None, scripts: Mapping[int, Script], clock: VirtualClock, timeline: Timeline
    ) -> None:
        self.clock = clock
        self._cost, self._scripts, self._timeline = cost, scripts, timeline

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        trees = [self._tree(ask) for ask in asks]
        self._timeline.spend(self.clock, DRAFTER, "draft", self._seconds(trees), tokens=sum(map(len, trees)))
        return trees

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        return

    def forget(self, seq: int) -> None:
        return

    def _tree(self, ask: Ask) -> TokenTree:
        return self._scripts[ask.seq].chain(len(ask.tokens) - ask.num_prompt, ask.num_tokens)

    def _seconds(self, trees: Sequence[TokenTree]) -> float:
        """A step for each depth, over the sequences that go so deep."""
        if self._cost is None:
            return 0.0
        deepest = max(map(len, trees), default=0)
        return sum(self._cost.seconds(sum(len(tree) > depth for tree in trees)) for depth in range(deepest))


class SimulatedLink:
    """The lead's end of a link to a drafter with a clock of its own; a message arrives message_s after it was sent.

    The drafter takes what came in turn, when it is free. Only who waits here lets the lead's time pass.
    """

    def __init__(self, drafter: ScriptedDrafter, clock: VirtualClock, timeline: Timeline, message_s: float) -> None:
        self.num_messages = self.num_bytes = 0
        self._drafter, self._clock, self._timeline, self._message_s = drafter, clock, timeline, message_s
        self._answers: deque[tuple[float, Drafts]] = deque()

    def send(self, message: ToDrafter) -> bool:
        self._count(message)
        if isinstance(message, Outcomes) and message.outcomes:
            self._drafter.clock.wait_until(self._clock.now() + self._message_s)
            answer = self._answer(message.outcomes)
            self._answers.append((self._drafter.clock.now() + self._message_s, answer))
        return True

    def receive(self, timeout_s: float) -> list[Drafts]:
        until = self._clock.now() + timeout_s
        if self._answers:
            until = min(until, self._answers[0][0])
        self._timeline.wait(self._clock, GAPS, "waiting for drafts", until)
        arrived: list[Drafts] = []
        while self._answers and self._answers[0][0] <= self._clock.now():
            arrived.append(self._answers.popleft()[1])
            self._count(arrived[-1])
        return arrived

    def close(self) -> None:
        return

    def _answer(self, outcomes: Sequence[Outcome]) -> Drafts:
        asks = [_ask(outcome) for outcome in outcomes]
        trees = zip(asks, self._drafter.propose(asks), strict=True)
        return Drafts(tuple(Draft(ask.seq, len(ask.tokens), tree, foreseen=False) for ask, tree in trees))

    def _count(self, message: ToDrafter | Drafts) -> None:
        self.num_messages += 1
        self.num_bytes += len(msgspec.msgpack.encode(message))


def _ask(outcome: Outcome) -> Ask:
    """A script looks at how many tokens there are, and never at them."""
    tokens = range(outcome.base + len(outcome.tokens))
    return Ask(outcome.seq, tokens, outcome.num_prompt, outcome.num_tokens, outcome.sampling)


class Simulation:
    """The engine of one lead, ready for rounds, and what its time went to."""

    def __init__(self, topology: Topology, time: TimeModel, scripts: Sequence[Script]) -> None:
        by_id = {script.id: script for script in scripts}
        fixed_rows = topology.engine.fixed_rows if topology.deterministic else None
        self.clock, self.timeline, ledger = VirtualClock(), Timeline(), Ledger()
        pool = PagePool(-(-topology.cache.tokens // topology.cache.page), topology.cache.page)
        self.target = SimulatedTarget(time.target, by_id, self.clock, self.timeline, ledger, fixed_rows or 0)
        self.scheduler = Scheduler(
            pool, max_rows=topology.engine.max_rows, max_running=topology.serve.max_running, fixed_rows=fixed_rows
        )
        self.engine = Engine(
            target=self.target,
            scheduler=self.scheduler,
            pool=pool,
            rule=ScriptedRule(by_id),
            noise=CounterNoise(),
            host=self._host(topology, time, by_id),
            draft_tokens=None,  # a request may say how many
            pace=Pace(gives_odds=False),
            vocab=1 + max(script.max_tokens for script in scripts),
            ledger=ledger,
            clock=self.clock.now,
        )

    def _host(self, topology: Topology, time: TimeModel, scripts: Mapping[int, Script]) -> DraftHost:
        if topology.pipeline.policy != "serial":
            raise UserError(f"pipeline.policy: {topology.pipeline.policy} is not simulated yet; should be serial")
        match topology.draft.placement.kind:
            case "inline":
                return InlineHost(ScriptedDrafter(time.draft, scripts, self.clock, self.timeline))
            case "dedicated":
                drafter = ScriptedDrafter(time.draft, scripts, VirtualClock(), self.timeline)
                link = SimulatedLink(drafter, self.clock, self.timeline, time.message_s)
                return RemoteHost(link, self.clock.now)
            case _:
                raise UserError("draft.placement: gaps is not simulated yet; should be inline or {dedicated: RANK}")


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
    """rounds: that read no prompt. seconds: of everything."""

    rounds: list[Round]
    seconds: float
    timeline: Timeline


def simulate(
    topology: Topology, time: TimeModel, scripts: Sequence[Script], *, num_drafts: int | None, concurrency: int = 1
) -> Simulated:
    """Every script, with drafts of num_drafts tokens, or of as many as pay."""
    simulation = Simulation(topology, time, scripts)
    crowd = Crowd(simulation, [script.request(num_drafts) for script in scripts], concurrency)
    lead_rounds(simulation.engine, OneRankChannel(), crowd)
    return Simulated(crowd.rounds, crowd.at, simulation.timeline)
