"""How a draft model reads futures: each by a row of its own, behind what its cache has, or text by text from a state.

A state (cache/states.py) takes no draft in. So with every draft the model reads all drafts above that one again, and
the root: for what waits for weights to come from memory, a few rows more cost little. Integers only.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from tpspec.draft.growth import Growth, Node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.cache.pages import Pages
    from tpspec.cache.seats import Seats
    from tpspec.model.batch import Span

Future = tuple[Growth, Node]


class ByRow:
    """From keys and values alone."""

    def can_hold(self, growth: Growth, node: Node) -> bool:
        """Whether it could be read if it were the only one."""
        return True

    def together(self, futures: Sequence[Future]) -> list[Future]:
        """Those that can be read in one forward."""
        return list(futures)

    def admit(self, seq: int) -> bool:
        """Whether there is room for a text."""
        return True

    def spans(self, futures: Sequence[Future], pool: Pages) -> list[Span]:
        """Of such futures; the rows that have logits are theirs, in order."""
        return [growth.span(node, pool) for growth, node in futures]

    def chunk(self, growth: Growth, stop: int, pool: Pages) -> Span:
        """Of its text, up to there."""
        return growth.chunk(stop, pool, 0)

    def release(self, seq: int) -> None:
        """Unknown sequences are ignored."""


class ByText(ByRow):
    """seats: of states."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats

    def can_hold(self, growth: Growth, node: Node) -> bool:
        return node.depth < self._seats.num_left

    def together(self, futures: Sequence[Future]) -> list[Future]:
        """Of each text as many as, with what leads to them, can be left beside its state."""
        rows: dict[int, set[int]] = {}
        fitting: list[Future] = []
        for growth, node in sorted(futures, key=lambda future: future[0].seq):
            with_it = rows.get(growth.seq, set()) | {id(one) for one in node.line()}
            if len(with_it) < self._seats.num_left:
                rows[growth.seq] = with_it
                fitting.append((growth, node))
        return fitting

    def admit(self, seq: int) -> bool:
        if seq not in self._seats and not self._seats.is_full:
            self._seats.take(seq)
        return seq in self._seats

    def spans(self, futures: Sequence[Future], pool: Pages) -> list[Span]:
        return [
            growth.branching([node for _, node in of_text], self._seats.of(growth.seq), pool)
            for growth, of_text in groupby(futures, key=itemgetter(0))
        ]

    def chunk(self, growth: Growth, stop: int, pool: Pages) -> Span:
        return growth.chunk(stop, pool, 0, self._seats.of(growth.seq))

    def release(self, seq: int) -> None:
        self._seats.release(seq)
