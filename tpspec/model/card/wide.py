"""The steps of model/steps.py for rounds that verify for many texts, on a card: more rows than few, recorded as those
are.

There is a tile for every row, of which most are none: programs of those end at once. So that they are not many, keys
are split less the more rows there are; what a row becomes depends, to the last bit, on how many are recorded. What is
launched, chunks of prompts, is in many.py. Must not know what rows mean. Imported on cards only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from tpspec.model.card.rows import MOST_ROWS
from tpspec.model.card.steps import CardSteps
from tpspec.model.card.tilings import Tiling, splits_of, tilings_of, wanted_programs
from tpspec.topology.working import USUAL_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpspec.cache.states import StateStore
    from tpspec.cache.store import KVStore
    from tpspec.model.batch import Span
    from tpspec.model.card.tables import Table
    from tpspec.model.card.tilings import Folds
    from tpspec.model.rope import Rope
    from tpspec.model.sight import Heads, Shape

MOST_SPLITS = 8  # of a text's keys


class WideSteps(CardSteps):
    """most_rows: of a round. wanted: programs that keep a card busy."""

    def __init__(
        self,
        shape: Shape,
        ropes: Sequence[Rope],
        store: KVStore,
        tilings: Mapping[Heads, Tiling],
        most_rows: int,
        wanted: int,
        states: StateStore | None = None,
    ) -> None:
        self._wanted, self.usual_rows = wanted, most_rows
        super().__init__(shape, ropes, store, tilings, states)

    def fits(self, spans: Sequence[Span], num_rows: int) -> bool:
        """Whether the rows are no more than these, those of each text few, and there is room for what is said of
        them."""
        are_few = all(len(span.tokens) <= MOST_ROWS for span in spans)  # whose trees are, too
        return num_rows <= self._most_rows and are_few and self._has_room(spans)

    def _shares(self, table: Table, folds: Folds, num_rows: int) -> tuple[int, int]:
        num_texts = triton.cdiv(num_rows, USUAL_ROWS)
        return num_rows, splits_of(num_texts * (len(folds.firsts) - 1), self._wanted, MOST_SPLITS)


def wide_steps(
    shape: Shape, ropes: Sequence[Rope], store: KVStore, most_rows: int, states: StateStore | None = None
) -> WideSteps | None:
    """None where heads are too wide."""
    tilings = tilings_of(shape, Tiling.of)
    if tilings is None:
        return None
    return WideSteps(shape, ropes, store, tilings, most_rows, wanted_programs(shape.device), states)
