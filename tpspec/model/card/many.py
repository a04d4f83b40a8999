"""The steps of model/steps.py for rows that are not recorded, on a card: chunks of prompts, and rounds of very many
rows.

Kernels are those of few rows (attention.py, heads.py): no keys are gathered, no mask is made, and texts
however many are one launch. Tiles are as large as there is room for, so that a row's bits depend on the rows beside it,
as those of torch's products of many rows do. What a round needs is known when it is launched: there are no more tiles
than it fills, and their keys are split only where those are too few to keep a card busy. Must not know what rows mean.
Imported on cards only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from tpspec.model.card.flash import Flash, flash, has_kernels
from tpspec.model.card.rows import MOST_ROWS
from tpspec.model.card.steps import CardSteps
from tpspec.model.card.tilings import Tiling, splits_of, tilings_of, wanted_programs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.cache.store import KVStore
    from tpspec.model.batch import Span
    from tpspec.model.card.tables import Table
    from tpspec.model.card.tilings import Folds
    from tpspec.model.rope import Rope
    from tpspec.model.sight import Heads, Shape, Sight

MOST_SPLITS = 8  # of a tile's keys, where tiles are few
MOST_NUMBERS = (1 << 31) - 1  # of a layer's keys for FlashInfer: its trial has too few to tell how it counts more


class ManySteps(CardSteps):
    """wanted: programs that keep a card busy."""

    is_recorded = False
    usual_rows = 256  # room for more is made when such rounds come
    rehearsed = (2, 4, MOST_SPLITS, MOST_ROWS + 1)  # rows of padding alone that take every kernel between them

    def __init__(
        self,
        shape: Shape,
        ropes: Sequence[Rope],
        store: KVStore,
        tilings: Mapping[Heads, Tiling],
        wanted: int,
        states: StateStore | None = None,
    ) -> None:
        super().__init__(shape, ropes, store, tilings, states)
        self._tilings, self._wanted = tilings, wanted
        self._flash: Flash | None = None
        self._has_agreed = False

    def agree_on_flash(self, everywhere: Callable[[bool], bool]) -> None:
        """Whether FlashInfer serves (flash.py), on all ranks or none: before the first round, once. everywhere: as
        of Runner."""
        if self._has_agreed:
            return
        self._has_agreed = True
        has_cells = all(
            cells.scales_GS is None and cells.numbers_GSE.numel() <= MOST_NUMBERS for cells in self._store.cells
        )
        if everywhere(has_kernels(self._shape) and has_cells):
            made = flash(self._shape, lambda store: ManySteps(self._shape, (), store, self._tilings, self._wanted))
            self._flash = made if everywhere(made is not None) else None

    def fits(self, spans: Sequence[Span], num_rows: int) -> bool:
        """Whether their trees have few rows, and there is room for what is said of them."""
        trees = (len(span.tokens) - span.num_chained() for span in spans)
        return all(rows <= MOST_ROWS for rows in trees) and self._has_room(spans)

    def begin(self, spans: Sequence[Span], num_rows: int) -> None:
        if num_rows > self._most_rows:
            self._make_room(triton.next_power_of_2(num_rows))
        super().begin(spans, num_rows)
        if self._flash is not None:
            self._flash.begin(spans)

    def attended(self, sight: Sight, kept_by: int, sinks: Tensor | None, q_TX: Tensor) -> Tensor:
        if self._flash is not None and self._flash.serves and sinks is None:
            return self._flash.attended(sight, self._store.keys[kept_by], self._store.values[kept_by], q_TX)
        attended_TX = super().attended(sight, kept_by, sinks, q_TX)
        has_tiles = self._tables[sight.heads, sight.is_windowed].num_tiles > 0
        return attended_TX if has_tiles else attended_TX.zero_()  # of padding nobody wrote it

    def _tile_rows(self, folds: Folds, num_rows: int) -> int:
        return folds.tile_rows(self._most_rows)

    def _shares(self, table: Table, folds: Folds, num_rows: int) -> tuple[int, int]:
        if not table.num_tiles:  # all is padding
            return num_rows, num_rows if num_rows <= MOST_SPLITS else 1
        return table.num_tiles, splits_of(table.num_tiles * (len(folds.firsts) - 1), self._wanted, MOST_SPLITS)

    def _num_spans(self, num_rows: int) -> int:
        assert self._states is not None, "who asks has some"
        return max(1, self._states.num_spans)


def many_steps(
    shape: Shape, ropes: Sequence[Rope], store: KVStore, states: StateStore | None = None
) -> ManySteps | None:
    """None where heads are too wide."""
    tilings = tilings_of(shape, Tiling.of_many)
    return None if tilings is None else ManySteps(shape, ropes, store, tilings, wanted_programs(shape.device), states)
