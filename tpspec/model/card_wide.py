"""The steps of steps.py for rounds that verify for many texts, on a card: more rows than few, recorded as those are.

There is a tile for every row, of which most are none: programs of those end at once. So that they are not many, keys
are split less the more rows there are; what a row becomes depends, to the last bit, on how many are recorded. What is
launched, chunks of prompts, is in card_many.py. Must not know what rows mean. Imported on cards only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from tpspec.model.card_rows import MOST_ROWS
from tpspec.model.card_steps import CardSteps, Tiling, tilings_of, wanted_programs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpspec.cache.states import StateStore
    from tpspec.cache.store import KVStore
    from tpspec.model.batch import Span
    from tpspec.model.card_steps import Folds
    from tpspec.model.card_tables import Table
    from tpspec.model.rope import Rope
    from tpspec.model.steps import Heads, Shape

USUAL_TEXT = 8  # rows that a text has
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
        """Whether the rows are no more than these, their trees have few, and their keys are not too scattered."""
        if num_rows > self._most_rows or (self._states is not None and not self._states.fits(spans)):
            return False
        are_few = all(len(span.tokens) <= MOST_ROWS for span in spans)  # whose trees are, too
        return are_few and all(table.fits(spans) for table in self._tables.values())

    def _shares(self, table: Table, folds: Folds, num_rows: int) -> tuple[int, int]:
        programs = triton.cdiv(num_rows, USUAL_TEXT) * (len(folds.firsts) - 1)
        return num_rows, min(MOST_SPLITS, triton.next_power_of_2(triton.cdiv(self._wanted, programs)))


def wide_steps(
    shape: Shape, ropes: Sequence[Rope], store: KVStore, most_rows: int, states: StateStore | None = None
) -> WideSteps | None:
    """None where heads are too wide."""
    tilings = tilings_of(shape, Tiling.of)
    if tilings is None:
        return None
    return WideSteps(shape, ropes, store, tilings, most_rows, wanted_programs(shape.device), states)
