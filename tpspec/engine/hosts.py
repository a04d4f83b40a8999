"""Where drafts come from, as the engine sees it: asked for after a verdict, there before the next plan, or not at all.

A host knows a drafter and where it runs (here: beside every target rank; remote.py: elsewhere); the engine knows
neither. Must not know tensors of the target.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tpspec.errors import WorldFailure
from tpspec.tokens import NO_DRAFT

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def prepare(self, asks: Sequence[Ask]) -> None:
        """Texts that will be asked about, once the target has read them too."""

    def ask(self, asks: Sequence[Ask]) -> None:
        """The next trees are wanted; returns without an answer."""

    def take(self) -> dict[int, TokenTree]:
        """Trees that every rank has, by sequence. Absent ones cost speed only."""

    def gather(self, ready: Sequence[int]) -> Gathered:
        """Of the lead alone: what came from elsewhere for sequences that could run, which the others learn as news."""

    def tell(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None: ...
    def forget(self, seq: int) -> None: ...
    def drafting(self) -> Drafting | None:
        """Counters of drafting elsewhere; None where there is none."""


class InlineHost:
    """Every target rank drafts for itself, the same on each: no message, and no collective but a source's own."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._trees: dict[int, TokenTree] = {}
        self._warned = False

    def prepare(self, asks: Sequence[Ask]) -> None:
        """The drafter reads them when it is asked: here nothing runs beside the target."""

    def ask(self, asks: Sequence[Ask]) -> None:
        wanted = [ask for ask in asks if ask.num_tokens > 0]
        trees = self._propose(wanted) if wanted else []
        self._trees = {ask.seq: tree for ask, tree in zip(wanted, trees, strict=True)}

    def take(self) -> dict[int, TokenTree]:
        trees, self._trees = self._trees, {}
        return trees

    def gather(self, ready: Sequence[int]) -> Gathered:
        return NOTHING

    def tell(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        self._drafter.observe(verdicts, taps)

    def drafting(self) -> Drafting | None:
        return None

    def forget(self, seq: int) -> None:
        self._trees.pop(seq, None)
        self._drafter.forget(seq)

    def _propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        try:
            return self._drafter.propose(asks)
        except WorldFailure:  # of a collective of its own: more is lost than a draft
            raise
        except Exception:
            if not self._warned:
                log.warning("the draft source failed; decoding goes on without its drafts", exc_info=True)
            self._warned = True
            for ask in asks:  # what it remembers of them may be half done
                self.forget(ask.seq)
            return [NO_DRAFT] * len(asks)
