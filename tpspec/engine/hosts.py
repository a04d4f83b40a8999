"""Where drafts come from, as the engine sees it: asked for after a verdict, there before the next plan, or not at all.

A host knows a drafter and where it runs (here: between rounds, on target ranks; remote.py: elsewhere); the engine knows
neither. Must not know tensors of the target.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tpspec.tokens import NO_DRAFT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpspec.comm.messages import Drafting
    from tpspec.draft.protocol import Ask, Drafter, Taps
    from tpspec.tokens import TokenTree, Verdict

log = logging.getLogger(__name__)


class Gathered(NamedTuple):
    """Trees by sequence, and sequences that sit the next round out."""

    trees: dict[int, TokenTree]
    held: tuple[int, ...] = ()


NOTHING = Gathered({})


class DraftHost(Protocol):
    """The engine's side of drafting, wherever it happens."""

    @property
    def waits(self) -> bool:
        """Whether `gather` may take its time."""

    def prepare(self, asks: Sequence[Ask]) -> None:
        """Texts that will be asked about, once the target has read them too."""

    def ask(self, asks: Sequence[Ask]) -> None:
        """The next trees are wanted; returns without an answer."""

    def take(self) -> dict[int, TokenTree]:
        """Trees that every rank has, by sequence. Absent ones cost speed only."""

    def gather(self, ready: Sequence[int]) -> Gathered:
        """Of the lead alone: trees for sequences that could run, which the others learn as news."""

    def tell(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None: ...
    def forget(self, seq: int) -> None: ...
    def drafting(self) -> Drafting | None:
        """Counters of drafting elsewhere; None where there is none."""


class _Here:
    """What hosts share whose drafter runs between two rounds, on a rank of the target."""

    waits = False

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def prepare(self, asks: Sequence[Ask]) -> None:
        """The drafter reads them when it is asked: here nothing runs beside the target."""

    def tell(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        self._drafter.observe(verdicts, taps)

    def drafting(self) -> Drafting | None:
        return None


class InlineHost(_Here):
    """Every target rank drafts for itself, the same on each: no message, and no collective but a source's own.

    For sources that look things up, and for those that draft with the target's shards; others: see LeadHost.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._trees: dict[int, TokenTree] = {}

    def ask(self, asks: Sequence[Ask]) -> None:
        wanted = [ask for ask in asks if ask.num_tokens > 0]
        trees = self._drafter.propose(wanted) if wanted else []
        self._trees = {ask.seq: tree for ask, tree in zip(wanted, trees, strict=True)}

    def take(self) -> dict[int, TokenTree]:
        trees, self._trees = self._trees, {}
        return trees

    def gather(self, ready: Sequence[int]) -> Gathered:
        return NOTHING

    def forget(self, seq: int) -> None:
        self._trees.pop(seq, None)
        self._drafter.forget(seq)


class LeadHost(_Here):
    """The lead's, of a source that computes: it alone drafts, and the others learn the trees as news.

    Two machines that are not alike round differently, and would not always make the same drafts. News goes out before
    every round anyway.
    """

    waits = True

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._asks: dict[int, Ask] = {}

    def ask(self, asks: Sequence[Ask]) -> None:
        self._asks = {ask.seq: ask for ask in asks if ask.num_tokens > 0}

    def take(self) -> dict[int, TokenTree]:
        return {}

    def gather(self, ready: Sequence[int]) -> Gathered:
        """Drafts now, when what the last round gave has been reported."""
        asks, self._asks = self._asks, {}
        wanted = [seq for seq in ready if seq in asks]
        trees = self._drafter.propose([asks[seq] for seq in wanted]) if wanted else []
        return Gathered(dict(zip(wanted, trees, strict=True)))

    def forget(self, seq: int) -> None:
        self._asks.pop(seq, None)
        self._drafter.forget(seq)


class Failsafe:
    """A drafter whose failures cost speed only. Not for one with collectives of its own: where it fails on one rank,
    more is lost than a draft."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.needs = drafter, drafter.needs
        self._warned = False
        self._lost = set[int]()  # texts of which it would have to be told again what it is told once

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        trees = {ask.seq: NO_DRAFT for ask in asks}
        known = [ask for ask in asks if ask.seq not in self._lost]
        if known:
            with self._survived({ask.seq for ask in known}):
                trees |= zip((ask.seq for ask in known), self._drafter.propose(known), strict=True)
        return [trees[ask.seq] for ask in asks]

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        if self._lost:
            verdicts, taps = self._of_known(verdicts, taps)
        tapped = set() if taps is None else {*taps.rows, *taps.before}
        with self._survived({verdict.seq for verdict in verdicts} | tapped):
            self._drafter.observe(verdicts, taps)

    def forget(self, seq: int) -> None:
        self._lost.discard(seq)
        self._drafter.forget(seq)

    def _of_known(self, verdicts: Sequence[Verdict], taps: Taps | None) -> tuple[Sequence[Verdict], Taps | None]:
        """Without lost texts, but those that are told anew, from their beginning on."""
        if taps is not None:
            self._lost -= {*taps.before, *(seq for seq, (first, _) in taps.rows.items() if first == 0)}
            rows = {seq: told for seq, told in taps.rows.items() if seq not in self._lost}
            taps = replace(taps, rows=rows)
        return [verdict for verdict in verdicts if verdict.seq not in self._lost], taps

    @contextmanager
    def _survived(self, seqs: set[int]) -> Iterator[None]:
        """A failure inside, in work on these texts: what the drafter remembers of them may be half done."""
        try:
            yield
        except Exception:
            if not self._warned:
                log.warning("the draft source failed; decoding goes on without its drafts", exc_info=True)
            self._warned = True
            for seq in seqs:
                self._drafter.forget(seq)
            if self.needs.taps:
                self._lost |= seqs
