"""Drafts made by another process: the lead asks after every verdict, and waits a little for what it can expect.

Late, lost, doubled or wrong answers cost speed only: an answer counts for a text of one length, that length is its
epoch, and a drafter that stays silent is not waited for until it has been heard of again. Knows a link and a clock;
must not know sockets, models or what the drafter does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpspec.comm.messages import Costs, Drafting, Drafts, Outcome, Outcomes, Reach
from tpspec.engine.foreseen import Foreseen
from tpspec.engine.hosts import NOTHING, Gathered
from tpspec.engine.tapped import MOST_SENT, Tapped
from tpspec.engine.turns import Trials, Turns
from tpspec.staged import Fetched

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

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
OF_DRAFTER = ("num_read", "num_dropped", "work_s", "inside_s", "delayed_s")  # what it counts itself


SERIAL = Reach()


@dataclass(frozen=True, slots=True)
class Way:
    """A way of drafting. alternates: two halves of the sequences, one verified while the other is drafted for."""

    reach: Reach = SERIAL
    alternates: bool = False


class Elsewhere:
    """The host of a rank that neither drafts nor asks: trees come as news."""

    waits = False

    def prepare(self, asks: Sequence[Ask]) -> None: ...
    def ask(self, asks: Sequence[Ask]) -> None: ...
    def take(self) -> dict[int, TokenTree]:
        return {}

    def gather(self, ready: Sequence[int]) -> Gathered:
        return NOTHING

    def tell(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None: ...
    def forget(self, seq: int) -> None: ...
    def drafting(self) -> Drafting | None:
        return None


class RemoteHost:
    """The lead's host.

    A sequence is waited for once the drafter has answered for it: before, it reads the prompt. ways: of drafting; of
    several, the one that gives most tokens a second is found by trial. branches: as of the drafter's policy.
    """

    waits = True

    def __init__(
        self, link: DraftLink, clock: Callable[[], float], ways: Sequence[Way] = (Way(),), branches: int = 1
    ) -> None:
        self._link, self._clock, self._turns, self._told_at = link, clock, Turns(), -1.0
        self._foreseen = Foreseen(branches)
        self._ways, self._trials = ways, Trials(len(ways))
        self._drafts_ahead = any(way.reach.ahead for way in ways)
        self._asks: dict[int, Ask] = {}  # the last of each sequence
        self._told: dict[int, int] = {}  # tokens of it that the drafter knows of
        self._due: dict[int, float] = {}  # since when
        self._live: set[int] = set()
        self._gone: list[int] = []
        self._trees: dict[int, TokenTree] = {}
        self._tapped: dict[int, Tapped] = {}
        self._watched_at, self._silent_s = clock(), 0.0
        self._usual_s = LEAST_S
        self._hits = self._misses = self._late = self._timeouts = self._waited_rounds = 0
        self._drafter: dict[str, Any] = dict.fromkeys(OF_DRAFTER, 0)  # over all that there have been
        self._said = Drafts()  # last
        self._waited_s = 0.0
        self._away = False

    def prepare(self, asks: Sequence[Ask]) -> None:
        """The drafter reads a prompt while the target does, and is asked for nothing yet."""
        new = [ask for ask in asks if ask.seq not in self._told]
        if new:
            self._keep(new)
            self._send(new, {ask.seq for ask in new})

    def ask(self, asks: Sequence[Ask]) -> None:
        wanted = [ask for ask in asks if ask.num_tokens > 0]
        now, was_quiet = self._clock(), not self._due
        for ask in asks:
            self._due.pop(ask.seq, None)
            self._trees.pop(ask.seq, None)  # of a text that has moved on without it
        if not wanted and not self._gone:
            return
        self._listen(0.0)
        self._asks.update((ask.seq, ask) for ask in wanted)
        if was_quiet:
            self._watched_at = now
        self._keep(wanted)
        foreseen = {ask.seq: tree for ask in wanted if (tree := self._look_up(ask))}
        self._trees.update(foreseen)
        self._hits += len(foreseen)
        self._send(wanted, foreseen.keys())
        self._due.update((ask.seq, now) for ask in wanted if ask.seq not in foreseen and self._can_answer(ask.seq))

    def take(self) -> dict[int, TokenTree]:
        return {}

    def gather(self, ready: Sequence[int]) -> Gathered:
        """Trees for the next round; waits for those that can be expected."""
        begin = self._clock()
        turn = self._turns.next(ready) if self._way.alternates else list(ready)
        self._listen(0.0)
        while expected := [seq for seq in turn if seq in self._due and seq in self._live]:
            left = min(self._due[seq] for seq in expected) + self._patience() - self._clock()
            if left <= 0:
                self._give_up(expected)
                break
            self._listen(left)
        self._watch()
        waited = self._clock() - begin
        self._waited_s += waited
        self._waited_rounds += waited > MOMENT_S
        if not ready:
            self._told_at = -1.0
        trees = {seq: self._trees.pop(seq) for seq in turn if seq in self._trees}
        return Gathered(trees, tuple(sorted(set(ready) - set(turn))))

    def tell(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        """The next ask holds the committed tokens; here they say how well the present way does."""
        rows, others = (taps.rows, taps.before) if taps is not None else ({}, {})
        for seq, known in others.items():
            self._tapped.setdefault(seq, Tapped()).add(0, known)
        coming = {seq: (start, Fetched(own)) for seq, (start, own) in rows.items()}  # all at once
        for seq, (start, fetched) in coming.items():
            self._tapped.setdefault(seq, Tapped()).add(start, fetched.here())
        now, before = self._clock(), self._told_at
        self._told_at = now
        if before >= 0 and verdicts:
            self._trials.add(sum(len(verdict.tokens) for verdict in verdicts), now - before)

    def forget(self, seq: int) -> None:
        if self._told.pop(seq, None) is not None:
            self._gone.append(seq)
        self._asks.pop(seq, None)
        self._trees.pop(seq, None)
        self._due.pop(seq, None)
        self._live.discard(seq)
        self._tapped.pop(seq, None)
        self._foreseen.forget(seq)

    def drafting(self) -> Drafting | None:
        return Drafting(
            hits=self._hits,
            misses=self._misses,
            late=self._late,
            timeouts=self._timeouts,
            messages=self._link.num_messages,
            bytes=self._link.num_bytes,
            waited_s=self._waited_s,
            waited_rounds=self._waited_rounds,
            is_away=self._away,
            **self._drafter,
        )

    def _look_up(self, ask: Ask) -> TokenTree | None:
        """The draft, where the drafter has told of it before."""
        if not self._drafts_ahead:  # nothing is kept
            return None
        return self._foreseen.tree(ask.seq, ask.num_tokens) or None

    def _keep(self, asks: Sequence[Ask]) -> None:
        """What texts have become, for what will be said of them."""
        for ask in asks if self._drafts_ahead else ():
            self._foreseen.tell(ask)

    def _send(self, asks: Sequence[Ask], answered: Collection[int] = ()) -> None:
        most = MOST_SENT // max(1, len(asks))
        outcomes = tuple(self._outcome(ask, ask.seq in answered, most) for ask in asks)
        if not self._link.send(Outcomes(outcomes, tuple(self._gone), self._way.reach)):
            self._live.clear()  # nobody is there to be waited for
            for outcome in outcomes:
                if outcome.taps is not None:  # or who comes would go on behind rows that it has never had
                    self._tapped[outcome.seq].num_sent = outcome.taps.first
            return
        self._told.update((ask.seq, len(ask.tokens)) for ask in asks)
        self._gone.clear()

    def _can_answer(self, seq: int) -> bool:
        """Whether the drafter has all that it needs of a text: a long one goes to it in pieces."""
        return seq not in self._tapped or self._tapped[seq].is_sent

    def _outcome(self, ask: Ask, answered: bool, most: int) -> Outcome:
        base = self._told.get(ask.seq, 0)
        costs = ask.costs if isinstance(ask.costs, Costs) else None
        new = tuple(ask.tokens[base:])
        taps = self._tapped[ask.seq].unsent(most) if ask.seq in self._tapped else None
        return Outcome(ask.seq, base, new, ask.num_prompt, ask.num_tokens, ask.sampling, costs, answered, taps)

    def _listen(self, timeout_s: float) -> None:
        for message in self._link.receive(timeout_s):
            self._hear_from()
            self._count(message)
            for branch in message.ahead:
                if branch.is_sound:
                    self._foreseen.learn(branch)
            for draft in message.drafts:
                if draft.tree.is_sound:  # a draft is never worth a world
                    self._accept(draft)
            self._tell_again([seq for seq in message.lost if seq in self._asks])

    def _count(self, message: Drafts) -> None:
        """A drafter counts since its own start; one that has counted less than before is another."""
        before = self._said if message.num_read >= self._said.num_read else Drafts()
        for name in OF_DRAFTER:
            self._drafter[name] += getattr(message, name) - getattr(before, name)
        self._said = message

    def _accept(self, draft: Draft) -> None:
        ask = self._asks.get(draft.seq)
        if ask is None:
            self._late += 1
            return
        self._live.add(draft.seq)
        if draft.seq not in self._due or draft.base != len(ask.tokens):
            self._late += self._can_answer(draft.seq)
            return
        asked_at = self._due.pop(draft.seq)
        self._trees[draft.seq] = draft.tree
        self._foreseen.adopt(draft.seq, draft.base, draft.tree)
        self._hits += draft.foreseen
        self._misses += not draft.foreseen
        self._usual_s = KEPT * self._usual_s + (1 - KEPT) * (self._clock() - asked_at)

    def _tell_again(self, seqs: Sequence[int]) -> None:
        """The drafter is new, or has missed something."""
        for seq in seqs:
            self._told[seq] = 0
            self._live.discard(seq)
            if seq in self._tapped:
                self._tapped[seq].num_sent = 0
        if seqs:
            self._send([self._asks[seq] for seq in seqs])

    @property
    def _way(self) -> Way:
        return self._ways[self._trials.way]

    def _patience(self) -> float:
        return min(MOST_S, max(LEAST_S, PATIENCE * self._usual_s))

    def _give_up(self, expected: Sequence[int]) -> None:
        """The round goes on without; who is silent is not waited for again until it speaks."""
        self._timeouts += 1
        self._usual_s = min(MOST_S, self._usual_s * 1.5)
        self._live.difference_update(expected)

    def _hear_from(self) -> None:
        self._silent_s = 0.0
        if self._away:
            self._away = False
            log.warning("the drafter is back")

    def _watch(self) -> None:
        """Says once that the drafter does not answer. Its silences add up, however short the texts are."""
        now = self._clock()
        if self._due:
            self._silent_s += now - self._watched_at
        self._watched_at = now
        if self._silent_s > QUIET_S and not self._away:
            self._away = True
            log.warning("the drafter has not answered for %.0f s; decoding goes on without drafts", QUIET_S)
