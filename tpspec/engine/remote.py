"""Drafts made by another process: the lead asks after every verdict, and waits a little for what it can expect.

Late, lost, doubled or wrong answers cost speed only: an answer counts for a text of one length, that length is its
epoch, and a drafter that stays silent is not waited for until it has been heard of again. Knows a link and a clock;
must not know sockets, models or what the drafter does.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tpspec.comm.messages import Costs, Drafting, Outcome, Outcomes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpspec.comm.draft_link import DraftLink
    from tpspec.comm.messages import Draft
    from tpspec.draft.protocol import Ask, Taps
    from tpspec.tokens import TokenTree, Verdict

log = logging.getLogger(__name__)

PATIENCE = 4.0  # of the time that answers usually take
LEAST_S, MOST_S = 0.02, 1.0  # what patience is at least and at most
KEPT = 0.9  # of what answers were known to take, after each
MOMENT_S = 0.001  # waiting for less is not counted as waiting
QUIET_S = 2.0  # of silence while an answer is due: the drafter is away


class Elsewhere:
    """The host of a rank that neither drafts nor asks: trees come as news."""

    def ask(self, asks: Sequence[Ask]) -> None: ...
    def take(self) -> dict[int, TokenTree]:
        return {}

    def gather(self) -> dict[int, TokenTree]:
        return {}

    def tell(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None: ...
    def forget(self, seq: int) -> None: ...
    def drafting(self) -> Drafting | None:
        return None


class RemoteHost:
    """The lead's host.

    A sequence is waited for once the drafter has answered for it: before, it reads the prompt. waits: whether rounds
    wait at all; where rounds of other sequences fill the time, they do not.
    """

    def __init__(self, link: DraftLink, clock: Callable[[], float]) -> None:
        self._link, self._clock = link, clock
        self._asks: dict[int, Ask] = {}  # the last of each sequence
        self._told: dict[int, int] = {}  # tokens of it that the drafter knows of
        self._due: set[int] = set()
        self._live: set[int] = set()
        self._gone: list[int] = []
        self._trees: dict[int, TokenTree] = {}
        self._asked_at = self._heard_at = clock()
        self._usual_s = LEAST_S
        self._hits = self._misses = self._late = self._timeouts = self._waited_rounds = 0
        self._num_read = self._num_dropped = 0
        self._waited_s = 0.0
        self._away = False

    def ask(self, asks: Sequence[Ask]) -> None:
        wanted = [ask for ask in asks if ask.num_tokens > 0]
        if not wanted and not self._gone:
            return
        self._asks.update((ask.seq, ask) for ask in wanted)
        self._asked_at = self._clock()
        if not self._due:
            self._heard_at = max(self._heard_at, self._asked_at)
        self._send(wanted)
        self._due = {ask.seq for ask in wanted}

    def take(self) -> dict[int, TokenTree]:
        return {}

    def gather(self) -> dict[int, TokenTree]:
        """Trees for the next round; waits for those that can be expected."""
        begin = self._clock()
        self._listen(0.0)
        while self._due & self._live:
            left = self._asked_at + self._patience() - self._clock()
            if left <= 0:
                self._give_up()
                break
            self._listen(left)
        self._watch()
        waited = self._clock() - begin
        self._waited_s += waited
        self._waited_rounds += waited > MOMENT_S
        trees, self._trees = self._trees, {}
        return trees

    def tell(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        """The next ask holds the committed tokens."""

    def forget(self, seq: int) -> None:
        if self._told.pop(seq, None) is not None:
            self._gone.append(seq)
        self._asks.pop(seq, None)
        self._trees.pop(seq, None)
        self._due.discard(seq)
        self._live.discard(seq)

    def drafting(self) -> Drafting | None:
        return Drafting(
            hits=self._hits,
            misses=self._misses,
            late=self._late,
            timeouts=self._timeouts,
            messages=self._link.num_messages,
            bytes=self._link.num_bytes,
            num_read=self._num_read,
            num_dropped=self._num_dropped,
            waited_s=self._waited_s,
            waited_rounds=self._waited_rounds,
            is_away=self._away,
        )

    def _send(self, asks: Sequence[Ask]) -> None:
        outcomes = tuple(self._outcome(ask) for ask in asks)
        if self._link.send(Outcomes(outcomes, tuple(self._gone))):
            self._told.update((ask.seq, len(ask.tokens)) for ask in asks)
            self._gone.clear()

    def _outcome(self, ask: Ask) -> Outcome:
        base = self._told.get(ask.seq, 0)
        costs = ask.costs if isinstance(ask.costs, Costs) else None
        new = tuple(ask.tokens[base:])
        return Outcome(ask.seq, base, new, ask.num_prompt, ask.num_tokens, ask.sampling, costs)

    def _listen(self, timeout_s: float) -> None:
        for message in self._link.receive(timeout_s):
            self._hear_from()
            self._num_read, self._num_dropped = message.num_read, message.num_dropped
            for draft in message.drafts:
                self._accept(draft)
            self._tell_again([seq for seq in message.lost if seq in self._asks])

    def _accept(self, draft: Draft) -> None:
        ask = self._asks.get(draft.seq)
        if ask is None:
            self._late += 1
            return
        self._live.add(draft.seq)
        if draft.seq not in self._due or draft.base != len(ask.tokens):
            self._late += 1
            return
        self._due.remove(draft.seq)
        self._trees[draft.seq] = draft.tree
        self._hits += draft.foreseen
        self._misses += not draft.foreseen
        self._usual_s = KEPT * self._usual_s + (1 - KEPT) * (self._clock() - self._asked_at)

    def _tell_again(self, seqs: Sequence[int]) -> None:
        """The drafter is new, or has missed something."""
        for seq in seqs:
            self._told[seq] = 0
            self._live.discard(seq)
        if seqs:
            self._send([self._asks[seq] for seq in seqs])

    def _patience(self) -> float:
        return min(MOST_S, max(LEAST_S, PATIENCE * self._usual_s))

    def _give_up(self) -> None:
        """The round goes on without; who is silent is not waited for again until it speaks."""
        self._timeouts += 1
        self._usual_s = min(MOST_S, self._usual_s * 1.5)
        self._live -= self._due

    def _hear_from(self) -> None:
        self._heard_at = self._clock()
        if self._away:
            self._away = False
            log.warning("the drafter is back")

    def _watch(self) -> None:
        """Says once that the drafter does not answer."""
        if self._due and not self._away and self._clock() - self._heard_at > QUIET_S:
            self._away = True
            log.warning("the drafter has not answered for %.0f s; decoding goes on without drafts", QUIET_S)
