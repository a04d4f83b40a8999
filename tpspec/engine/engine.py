"""One round, on one rank: drafts in, a plan, one forward, verdicts, lengths move. The same on every target rank.

States the algorithm and nothing else: where drafts come from, how logits are made and who listens are handed in.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import msgspec

from tpspec.comm.messages import News, Stats
from tpspec.draft.protocol import Ask
from tpspec.engine.hosts import Gathered
from tpspec.engine.meter import Meter
from tpspec.engine.next_round import NextRound
from tpspec.engine.scored import joined, scored
from tpspec.engine.taps import TapStore
from tpspec.errors import UserError, WorldFailure
from tpspec.request import Delta
from tpspec.tokens import NO_DRAFT
from tpspec.verify.draw import is_told_once

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from tpspec.cache.pages import PagePool
    from tpspec.comm.ledger import Ledger
    from tpspec.draft.protocol import Taps
    from tpspec.engine.hosts import DraftHost
    from tpspec.engine.pace import Pace
    from tpspec.engine.plan import Commit, Plan
    from tpspec.engine.scheduler import Scheduler
    from tpspec.engine.sequence import Sequence as SequenceState
    from tpspec.model.batch import Moves, Span, StateCopy
    from tpspec.request import Request
    from tpspec.tokens import TokenTree, Verdict
    from tpspec.verify.allowed import Constraint
    from tpspec.verify.noise import Noise
    from tpspec.verify.rows import RowLogits, Rule

_ENCODER = msgspec.msgpack.Encoder()


class Target(Protocol):
    """The model whose distribution is served, as far as a round needs it."""

    def runs_alone(self, num_rows: int, num_logits: int) -> bool:
        """Whether `logits` of so many rows, and logits, mostly returns at once: they are computed while the host goes
        on."""

    def logits(self, spans: Sequence[Span]) -> RowLogits:
        """One forward; the logits of the spans' last num_logits rows, in order. Writes the rows' keys and values."""

    @property
    def launches(self) -> bool:
        """Whether `launch` may be asked. The same on every rank: what is launched in vain makes collectives, too."""

    def launch(self, spans: Sequence[Span]) -> bool:
        """Whether their forward, one row of each, of which all is known but the token, has been launched: the device
        waits for `release`, and until then nothing may be asked of it. What is read of the last forward has been asked
        for."""

    def release(self, tokens: Sequence[int]) -> None:
        """Of the spans that were launched; in vain, unless `logits` is asked for them next."""

    def taps(self) -> Tensor | None:
        """What the host's drafter needs of the last forward, [T, W] for its T rows; None where it needs nothing."""

    def move(self, moves: Moves) -> None:
        """Copy cache slots."""

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy states of texts, where the model keeps some."""


@dataclass(frozen=True, slots=True)
class Supply:
    """What of an engine is its draft source's own: several may take turns on one target.

    target: with the taps that the source needs. host: of the source. prepare: makes what would otherwise make the first
    rounds slow; collective. pace, meter: what has been learned of the source.
    """

    target: Target
    host: DraftHost
    pace: Pace
    prepare: Callable[[], None]
    meter: Meter = field(default_factory=Meter)


class Engine:
    """draft_tokens: the draft length K that is asked for (a request may ask for another); None: as many as pay.

    vocab: ids of the target.

    constrain: what the grammar of a request comes to, None where it has none; UserError where it is bad. clock: seconds
    from some fixed moment; what it says is reported, and never decides what a round computes.
    """

    def __init__(
        self,
        *,
        target: Target,
        scheduler: Scheduler,
        pool: PagePool,
        rule: Rule,
        noise: Noise,
        host: DraftHost,
        draft_tokens: int | None,
        pace: Pace,
        vocab: int,
        ledger: Ledger,
        constrain: Callable[[Request], Constraint | None] = lambda _: None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.target, self.scheduler, self.pool, self.rule, self.noise = target, scheduler, pool, rule, noise
        self.host, self.draft_tokens, self.pace, self.vocab, self.ledger = host, draft_tokens, pace, vocab, ledger
        self.constrain, self.clock, self.meter = constrain, clock, Meter()
        self._tapped = TapStore(pool.num_pages * pool.page_size)
        self._forward_s = self._drafting_s = 0.0
        self._ended_at: float | None = None
        self._num_rounds = self._num_tokens = self._num_drafted = self._num_accepted = 0
        self._trees: dict[int, TokenTree] = {}
        self._held: tuple[int, ...] = ()
        self._ahead: Sequence[Span] = ()  # the next round, where it was known before the last verdicts
        self._begun_at: float | None = None  # when a device was told to go on with it
        self._digest: dict[str, int] = {}
        self._undigested: Callable[[], dict[str, int]] | None = None

    def draw_from(self, supply: Supply) -> None:
        """Between two requests, on every rank before the same round."""
        if not self.is_idle:
            raise ValueError("drafts cannot come from elsewhere while requests run")
        self.target, self.host, self.pace, self.meter = supply.target, supply.host, supply.pace, supply.meter
        self._ahead = ()
        self.pool.unkeep()  # of what is kept nobody has the taps that this source may need
        self._tapped = TapStore(self.pool.num_pages * self.pool.page_size)  # nor is one tap as wide as another

    def hear(self, news: News) -> list[Delta]:
        """Requests and cancellations of this round; deltas for requests that cannot be served at all."""
        self._check(news)
        self.pace.costs = news.costs
        self._trees.update(news.trees)
        self._held = news.held
        for request_id in news.cancels:
            self.scheduler.cancel(request_id)
            self._forget(request_id)
        refusals = (self._submit(request) for request in news.requests)
        return [refusal for refusal in refusals if refusal is not None]

    def gather(self) -> Gathered:
        """The lead's: trees for the next round, which the others learn as news, and who sits it out. May wait."""
        begin, ready = self.clock(), [seq.id for seq in self.scheduler.ready()]
        trees, held = self.host.gather(ready)
        if ready:  # else what drafts have cost would fade while nobody wants any
            self._drafted(sum(map(len, trees.values())), self.clock() - begin)
        return Gathered(self._worth_verifying(trees), held)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Delta]:
        """One round over all running sequences; what each of them gained.

        meanwhile: called once, while the target computes or before it does. It must not raise, for other ranks are in
        the round, too.
        """
        ahead, self._ahead = self._ahead, ()
        plan = self.scheduler.plan(self._trees | self._bound_trees(), self._held, ahead)
        if not plan.spans:
            if self.is_idle:  # what passes from now on is no time of a round
                self._ended_at = None
            meanwhile()
            return []
        admitted = self.scheduler.running(plan.admitted)
        adopted = {seq.id: self.pool.slots(seq.id, 0, seq.num_cached) for seq in admitted}
        self.host.prepare([self._ask(seq) for seq in admitted if self._fixed(seq) != 0])
        self.target.copy(plan.copies)
        is_ahead = self.target.runs_alone(plan.num_rows, plan.num_logits)
        if not is_ahead:
            meanwhile()
        begun_at, self._begun_at = self._begun_at, None
        begin = self.clock() if begun_at is None or plan.spans != tuple(ahead) else begun_at
        rows = self.target.logits(plan.spans)
        if is_ahead:
            meanwhile()
        verdicts = self._judge(plan, rows, self._next_round(plan) if is_ahead else None)
        found = scored(plan, verdicts, rows)
        judged = self.clock()
        commit = self.scheduler.commit(plan, verdicts)
        self.target.move(commit.moves)
        self.target.copy(commit.copies)
        self.pace.learn(plan.cases, verdicts)
        committed = self.clock()
        taps = self._taps(plan, verdicts, adopted)
        num_drafted = self._draft_on(verdicts, taps, commit.finished, {case.seq for case in plan.cases})
        self._drafted(num_drafted, self.clock() - committed)
        self._ran(plan, judged - begin, committed - begin)
        self._gained(sum([len(delta.tokens) for delta in commit.deltas]))
        self._account(plan, verdicts, commit)
        return joined(commit.deltas, found)

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    @property
    def runs_ahead(self) -> bool:
        """Whether the host has time while a round of few rows is computed, and waits for no drafts before one."""
        return self.target.runs_alone(1, 1) and not self.host.waits

    @property
    def digest(self) -> dict[str, int]:
        """Checksums of the last round, by field; equal on every rank unless one has diverged. Made when asked for: who
        is alone need not be."""
        if self._undigested is not None:
            self._digest, self._undigested = self._undigested(), None
        return self._digest

    def stats(self) -> Stats:
        return Stats(
            rounds=self._num_rounds,
            tokens=self._num_tokens,
            drafted=self._num_drafted,
            accepted=self._num_accepted,
            preemptions=self.scheduler.num_preemptions,
            corrupted=self.scheduler.num_corrupted,
            forward_s=self._forward_s,
            drafting_s=self._drafting_s,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            pages_used=self.pool.num_used,
            pages_total=self.pool.num_pages,
            prefix_asked=self.scheduler.reuse.num_asked,
            prefix_found=self.scheduler.reuse.num_found,
            elsewhere=self.host.drafting(),
            collectives={purpose.value: tally for purpose, tally in self.ledger.totals().items()},
        )

    def _submit(self, request: Request) -> Delta | None:
        try:
            return self.scheduler.submit(request, self.constrain(request))
        except UserError as error:
            return Delta(request.id, (), finish="error", error=str(error))

    def _bound_trees(self) -> dict[int, TokenTree]:
        """Of texts with a grammar: what it makes of their trees. On every rank alike, also of trees from elsewhere."""
        if self.pace.is_whole:
            return {}
        return {
            seq.id: seq.constraint.draft(seq.output, self._trees.get(seq.id, NO_DRAFT))
            for seq in self.scheduler.ready()
            if seq.constraint is not None and self._fixed(seq) != 0
        }

    def _judge(self, plan: Plan, rows: RowLogits, next_round: NextRound | None) -> list[Verdict]:
        """Waits for the device, which goes on with the next round if that is known."""
        if not plan.cases:
            return []
        if next_round is None:
            return self.rule.judge(plan.cases, rows, self.noise)
        try:
            return self.rule.judge(plan.cases, rows, self.noise, next_round)
        finally:
            next_round.end()
            self._ahead, self._begun_at = next_round.spans, self.clock() if next_round.is_launched else None

    def _next_round(self, plan: Plan) -> NextRound | None:
        """Where it is known before the verdicts, and nothing of this one (odds, or whole rows) is asked of the device
        once they are."""
        if not (self.target.launches and self.rule.draws_at_once) or plan.owed:
            return None
        if not all(is_told_once(case.sampling) for case in plan.cases):
            return None
        seqs = [case.seq for case in plan.cases]
        if any(self._may_draft(seq) for seq in self.scheduler.running(seqs)):
            return None
        spans = self.scheduler.foresee(plan)
        return NextRound(self.target, seqs, spans) if spans else None

    def _may_draft(self, seq: SequenceState) -> bool:
        """Whether a tree may be there for its next round, of a source or of its grammar. How many tokens pay is not
        asked: a rank that does not draft itself need not know."""
        return self._fixed(seq) != 0 and (seq.constraint is not None or not self.pace.is_silent)

    def _taps(self, plan: Plan, verdicts: Sequence[Verdict], adopted: Mapping[int, Sequence[int]]) -> Taps | None:
        rows_TW = self.target.taps()
        if rows_TW is None:
            return None
        return self._tapped.of_text(plan, verdicts, rows_TW, adopted, keeps=self.scheduler.reuse.is_on)

    def _draft_on(
        self, verdicts: Sequence[Verdict], taps: Taps | None, finished: Sequence[int], moved: Collection[int]
    ) -> int:
        """Asks for trees for the sequences that moved on; how many tokens have been drafted here."""
        self.host.tell(verdicts, taps)
        for seq in finished:
            self._forget(seq)
        asks = [self._ask(seq) for seq in self.scheduler.ready() if seq.id in moved]
        self.host.ask(asks)
        trees = self.host.take()
        self._trees = self._worth_verifying(trees)
        return sum(map(len, trees.values()))

    def _worth_verifying(self, trees: Mapping[int, TokenTree]) -> dict[int, TokenTree]:
        # A source may be wrong, but an id that does not exist would break the forward.
        if not (known := {seq: tree.known(self.vocab) for seq, tree in trees.items() if tree}):
            return {}
        ready = self.scheduler.ready()
        paced = {seq.id: known[seq.id] for seq in ready if seq.id in known and self._fixed(seq) is None}
        return known | self.pace.cut(paced, len(ready)) if paced else known

    def _ask(self, seq: SequenceState) -> Ask:
        fixed = self._fixed(seq)
        wanted = self.pace.wanted(seq.id) if fixed is None else fixed
        num_tokens = max(0, min(wanted, seq.remaining - 1))  # the round itself gives one more
        costs = self.pace.costs if fixed is None else None
        return Ask(seq.id, seq.tokens, seq.num_prompt, num_tokens, seq.sampling, costs)

    def _fixed(self, seq: SequenceState) -> int | None:
        """The draft length that somebody has asked for."""
        return self.draft_tokens if seq.request.num_drafts is None else seq.request.num_drafts

    def _forget(self, seq: int) -> None:
        self.host.forget(seq)
        self.pace.forget(seq)

    def _drafted(self, num_tokens: int, seconds: float) -> None:
        self._drafting_s += seconds
        self.meter.drafting(num_tokens, seconds)

    def _ran(self, plan: Plan, forward_s: float, round_s: float) -> None:
        self._forward_s += forward_s
        if len(plan.cases) == len(plan.spans):  # a chunk of a prompt would pass for a draft
            self.meter.round(plan.num_rows, round_s)

    def _gained(self, num_tokens: int) -> None:
        """Tokens of this round, and the time since the last; not when nothing was running in between."""
        now, before = self.clock(), self._ended_at
        self._ended_at = None if self.is_idle else now
        if before is not None:
            self.meter.gain(num_tokens, now - before)

    def _account(self, plan: Plan, verdicts: Sequence[Verdict], commit: Commit) -> None:
        self._num_rounds += 1
        self.ledger.mark_round()
        for delta in commit.deltas:
            self._num_tokens += len(delta.tokens)
            self._num_drafted += sum(delta.drafted)
            self._num_accepted += sum(delta.accepted)
        kept = {"pages": self.pool.num_used, "kept": self.scheduler.reuse.digest}  # which may change before it is asked
        self._undigested = partial(_digest, plan, verdicts, commit, self._trees, kept)

    def _check(self, news: News) -> None:
        """News carries what the lead did last; a rank that did otherwise says so before it can hang in a collective."""
        for name, checksum in news.digest.items():
            mine = self.digest.get(name)
            if mine != checksum:
                raise WorldFailure(
                    f"this rank diverged from the lead in its {name} (checksum {mine}, the lead's {checksum}) "
                    f"before round {news.round}; the world stops, since its ranks no longer compute the same text"
                )


def _digest(
    plan: Plan, verdicts: Sequence[Verdict], commit: Commit, trees: Mapping[int, TokenTree], numbers: Mapping[str, int]
) -> dict[str, int]:
    spans = [(span.seq, span.start, span.tokens, span.runs, span.recent, span.carried) for span in plan.spans]
    return {
        "rows": _checksum(spans),
        "states": _checksum([*plan.copies, *commit.copies]),
        "verdicts": _checksum([(verdict.seq, verdict.path, verdict.tokens) for verdict in verdicts]),
        "drafts": _checksum([(seq, tree.tokens, tree.parents) for seq, tree in trees.items()]),
        **numbers,
    }


def _checksum(value: object) -> int:
    return zlib.crc32(_ENCODER.encode(value))
