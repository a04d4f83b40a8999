"""How spans go on from states (cache/states.py): which rows a state takes in, which are only looked at, what the
convolution of each row sees, and what is left in the end. Integers only; the same for every way to compute it.

A span's chain follows its state in a line, and is taken in: rows that its text has kept of its last forward, then those
of the span that are certain, but for the last of these. That is the root of the tree that the other rows are.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.cache.states import StateStore
    from tpspec.model.batch import Span

NOTHING = -(1 << 40)  # ~ of it is beyond all that is left; its place in bytes is a number of 64 bits


class Course(NamedTuple):
    """Of one span. slot: of its state. is_fresh: the state is empty, whatever the slot has. num_kept: rows of the chain
    that the text has kept; rows: the span's in the round, of which the first num_chained are the chain's others.

    parents: of the tree's rows, among them, -1 of the root.
    sights: of each kept row, then of each row of the span, what its convolution sees, itself last. before: what is left
    before the root. Both name rows of the round as they are, what is left in slots as ~ its number among all that is,
    and NOTHING, zeros, of what would stand before a text.
    """

    slot: int
    is_fresh: bool
    num_kept: int
    rows: range
    num_chained: int
    parents: Sequence[int]
    sights: Sequence[Sequence[int]]
    before: Sequence[int]

    @property
    def tree(self) -> range:
        return self.rows[self.num_chained :]


def courses(spans: Sequence[Span], store: StateStore) -> list[Course]:
    """Of the spans of a round, in order."""
    firsts = accumulate((len(span.tokens) for span in spans), initial=0)
    return [_course(span, first, store) for span, first in zip(spans, firsts, strict=False)]


def _course(span: Span, first: int, store: StateStore) -> Course:
    carried, num_before, num_rows = span.carried, store.sizes.num_before, len(span.tokens)
    if carried is None and span.start:
        raise ValueError(f"sequence {span.seq} has {span.start} tokens cached, and nothing carried of them")
    slot, kept, num_certain = (
        (store.num_states, (), num_rows) if carried is None else (carried.slot, carried.rows, carried.num_certain)
    )
    at, root = slot * store.length, num_certain - 1
    line = [~(at + i) if span.start else NOTHING for i in range(num_before)]
    line += [~(at + num_before + row) for row in kept]
    line += range(first, first + root)
    above = span.parents or range(-1, num_rows - 1)
    parents = [-1, *(above[row] - root for row in range(num_certain, num_rows))]
    before = line[len(line) - num_before :]
    sights = [line[i : i + num_before + 1] for i in range(root + len(kept))]
    tree: list[list[int]] = []
    for row, parent in enumerate(parents, first + root):
        seen = before if parent < 0 else tree[parent]
        tree.append([*seen[len(seen) - num_before :], row])
    rows = range(first, first + num_rows)
    return Course(slot, not span.start, len(kept), rows, root, parents, [*sights, *tree], before)
