"""One round, on one rank: drafts in, a plan, one forward, verdicts, lengths move. The same on every target rank.

States the algorithm and nothing else: where drafts come from, how logits are made and who listens are handed in.
"""

from __future__ import annotations

import zlib
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import msgspec

from tpspec.comm.messages import News, Stats
from tpspec.draft.protocol import Ask
from tpspec.errors import WorldFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpspec.cache.pages import PagePool
    from tpspec.comm.ledger import Ledger
    from tpspec.engine.hosts import DraftHost
    from tpspec.engine.scheduler import Plan, Scheduler
    from tpspec.model.batch import Span
    from tpspec.request import Delta
    from tpspec.tokens import TokenTree, Verdict
    from tpspec.verify.noise import Noise
    from tpspec.verify.rows import RowLogits, Rule


class Target(Protocol):
    """The model whose distribution is served, as far as a round needs it."""

    def logits(self, spans: Sequence[Span]) -> RowLogits:
        """One forward; the logits of the spans' last num_logits rows, in order. Writes the rows' keys and values."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy cache slots."""


class Engine:
    """draft_tokens: the draft length K that is asked for (a request may ask for another). vocab: ids of the target.

    clock: seconds from some fixed moment; what it says is reported, and never decides what a round computes.
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
        draft_tokens: int,
        vocab: int,
        ledger: Ledger,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.target, self.scheduler, self.pool, self.rule, self.noise = target, scheduler, pool, rule, noise
        self.host, self.draft_tokens, self.vocab, self.ledger = host, draft_tokens, vocab, ledger
        self.clock = clock
        self._forward_s = self._drafting_s = 0.0
        self._num_rounds = self._num_tokens = self._num_drafted = self._num_accepted = 0
        self._trees: dict[int, TokenTree] = {}
        self._digest: dict[str, int] = {}

    def hear(self, news: News) -> list[Delta]:
        """Requests and cancellations of this round; deltas for requests that cannot be served at all."""
        self._check(news)
        for request_id in news.cancels:
            self.scheduler.cancel(request_id)
            self.host.forget(request_id)
        refusals = (self.scheduler.submit(request) for request in news.requests)
        return [refusal for refusal in refusals if refusal is not None]

    def step(self) -> list[Delta]:
        """One round over all running sequences; what each of them gained."""
        plan = self.scheduler.plan(self._trees)
        if not plan.spans:
            return []
        begin = self.clock()
        rows = self.target.logits(plan.spans)
        verdicts = self.rule.judge(plan.cases, rows, self.noise) if plan.cases else []  # waits for the device
        judged = self.clock()
        commit = self.scheduler.commit(plan, verdicts)
        self.target.move(commit.moves.src, commit.moves.dst)
        committed = self.clock()
        self._draft_on(verdicts, commit.finished)
        self._forward_s += judged - begin
        self._drafting_s += self.clock() - committed
        self._account(plan, verdicts, commit.deltas)
        return commit.deltas

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    @property
    def digest(self) -> dict[str, int]:
        """Checksums of the last round, by field; equal on every rank unless one has diverged."""
        return self._digest

    def stats(self) -> Stats:
        return Stats(
            rounds=self._num_rounds,
            tokens=self._num_tokens,
            drafted=self._num_drafted,
            accepted=self._num_accepted,
            preemptions=self.scheduler.num_preemptions,
            forward_s=self._forward_s,
            drafting_s=self._drafting_s,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            pages_used=self.pool.num_used,
            pages_total=self.pool.num_pages,
            collectives={purpose.value: tally for purpose, tally in self.ledger.totals().items()},
        )

    def _draft_on(self, verdicts: Sequence[Verdict], finished: Sequence[int]) -> None:
        self.host.tell(verdicts, None)
        for seq in finished:
            self.host.forget(seq)
        self.host.ask(self._asks())
        # A source may be wrong, but an id that does not exist would break the forward.
        self._trees = {seq: tree.known(self.vocab) for seq, tree in self.host.take().items()}

    def _asks(self) -> list[Ask]:
        asks = []
        for seq in self.scheduler.ready():
            wanted = self.draft_tokens if seq.request.num_drafts is None else seq.request.num_drafts
            num_tokens = min(wanted, seq.remaining - 1)  # the round itself gives one more
            asks.append(Ask(seq.id, seq.tokens, seq.num_prompt, num_tokens, seq.sampling))
        return asks

    def _account(self, plan: Plan, verdicts: Sequence[Verdict], deltas: Sequence[Delta]) -> None:
        self._num_rounds += 1
        self.ledger.mark_round()
        self._num_tokens += sum(len(delta.tokens) for delta in deltas)
        self._num_drafted += sum(sum(delta.drafted) for delta in deltas)
        self._num_accepted += sum(sum(delta.accepted) for delta in deltas)
        self._digest = {
            "rows": _checksum([(span.seq, span.start, span.tokens, span.runs) for span in plan.spans]),
            "verdicts": _checksum([(verdict.seq, verdict.path, verdict.tokens) for verdict in verdicts]),
            "pages": self.pool.num_used,
            "drafts": _checksum([(seq, tree.tokens, tree.parents) for seq, tree in self._trees.items()]),
        }

    def _check(self, news: News) -> None:
        """News carries what the lead did last; a rank that did otherwise says so before it can hang in a collective."""
        for name, checksum in news.digest.items():
            mine = self._digest.get(name)
            if mine != checksum:
                raise WorldFailure(
                    f"this rank diverged from the lead in its {name} (checksum {mine}, the lead's {checksum}) "
                    f"before round {news.round}; the world stops, since its ranks no longer compute the same text"
                )


def _checksum(value: object) -> int:
    return zlib.crc32(msgspec.msgpack.encode(value))
