"""The table of card_rows.py: a round's integers, put where a copy that nobody waits for takes them to the card.

Knows rows and slots; must not know what rows mean. Imported on cards only.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch

from tpspec.model import card_rows as kernels
from tpspec.staged import Staged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tpspec.model.batch import Runs, Span

MOST_ROWS = kernels.MOST_ROWS
USUAL_BLOCKS = 512  # whose part of the table always goes to the card: 12 KB, of 32,000 keys in few runs
FEW_RUNS = 8  # of slots of a sequence, whose blocks are made run by run in less time than all at once


class Table:
    """A round's integers for layers without a window, or with one: in the card's memory, always at the same place.

    window: the longest of those layers', or None. num_slots: of their cache. most_positions: of a sequence.
    """

    def __init__(self, num_slots: int, window: int | None, most_positions: int, device: torch.device) -> None:
        self._window = window
        # A block has one key at least, and spans may share some.
        self._most_blocks = 2 * num_slots
        self._numbers = Staged(_table_size(self._most_blocks), torch.int64, device)
        self._usual_size = _table_size(min(USUAL_BLOCKS, self._most_blocks))
        begin = np.arange(0, most_positions, kernels.KEYS)  # the blocks of a text whose slots are its positions
        self._whole_blocks = np.stack([begin, np.full_like(begin, kernels.KEYS), begin], 1).ravel()

    @property
    def there(self) -> Tensor:
        return self._numbers.there

    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether their keys are not too scattered."""
        held = (span.held(windowed=self._window is not None)[1] for span in spans)
        return sum(count // kernels.KEYS + 2 for runs in held for _, count in runs) <= self._most_blocks

    def put(self, spans: Sequence[Span], stand_see: Sequence[tuple[list[int], list[int]]], tile_rows: int) -> None:
        """Rows behind the spans' are padding. stand_see: of each span, by row, its position and what it sees. What
        `copy` leaves out goes to the card at once."""
        numbers = self._numbers.room().numpy()
        numbers[: kernels.BLOCKS_AT] = 0
        numbers[kernels.ROW_SLOT * MOST_ROWS :][:MOST_ROWS] = -1
        words = numbers.data.cast("B").cast("q")  # takes few numbers in a tenth of numpy's time
        first, tile_at, num_blocks = 0, kernels.TILES_AT, 0
        for span, (positions, sees) in zip(spans, stand_see, strict=True):
            count, slots = len(span.tokens), span.own_slots(windowed=self._window is not None)
            end = num_blocks + self._put_blocks(span, numbers[kernels.BLOCKS_AT + kernels.BLOCK_SIZE * num_blocks :])
            for column, ints in enumerate((positions, slots, sees, [end - num_blocks] * count)):
                at = column * MOST_ROWS + first
                words[at : at + count] = array("q", ints)
            for before in range(0, count, tile_rows):
                tile = first, before, min(tile_rows, count - before), span.start, num_blocks, end
                words[tile_at : tile_at + kernels.TILE_SIZE] = array("q", tile)
                tile_at += kernels.TILE_SIZE
            first, num_blocks = first + count, end
        if (size := _table_size(num_blocks)) > self._usual_size:
            self._numbers.copy(self._usual_size, size)

    def copy(self) -> None:
        self._numbers.copy(0, self._usual_size)

    def sent(self) -> None:
        self._numbers.sent()

    def _put_blocks(self, span: Span, room: NDArray[np.int64]) -> int:
        """(first slot, keys, position of the first) of pieces of at most KEYS keys whose slots are one run; how many.

        They end where positions are multiples of KEYS, so that rows sum the same keys together in every round.
        """
        begin, runs = span.held(windowed=self._window is not None)
        seen_from = begin if self._window is None else max(begin, span.start - self._window + 1)
        if len(runs) > FEW_RUNS:
            return _put_scattered(begin, runs, seen_from, room)
        num_blocks = 0
        for slot, count in runs:
            shift, begin = slot - begin, begin + count
            if begin > seen_from:
                num_blocks += self._put_run(seen_from, begin, shift, room[kernels.BLOCK_SIZE * num_blocks :])
                seen_from = begin
        return num_blocks

    def _put_run(self, start: int, stop: int, shift: int, room: NDArray[np.int64]) -> int:
        """The same of positions [start, stop), the slot of each so much behind it."""
        first, last = start // kernels.KEYS, (stop - 1) // kernels.KEYS
        size, before = kernels.BLOCK_SIZE * (last + 1 - first), start % kernels.KEYS
        room[:size] = self._whole_blocks[kernels.BLOCK_SIZE * first :][:size]
        room[: size : kernels.BLOCK_SIZE] += shift
        if before:
            room[: kernels.BLOCK_SIZE] += before, -before, before
        room[size - 2] -= (last + 1) * kernels.KEYS - stop
        return last + 1 - first


def _table_size(num_blocks: int) -> int:
    return kernels.BLOCKS_AT + kernels.BLOCK_SIZE * num_blocks


def _put_scattered(begin: int, runs: Runs, seen_from: int, room: NDArray[np.int64]) -> int:
    """`Table._put_blocks` of many runs, whose first slot is that of position `begin`: in the time of a few."""
    slots, counts = np.array(runs, dtype=np.int64).T
    ends = begin + counts.cumsum()
    first = np.arange(seen_from // kernels.KEYS * kernels.KEYS, ends[-1], kernels.KEYS)
    first[0] = seen_from
    first = np.union1d(first, ends[:-1][ends[:-1] > seen_from])
    blocks_NX = room[: kernels.BLOCK_SIZE * len(first)].reshape(-1, kernels.BLOCK_SIZE)
    blocks_NX[:, 0] = first + (slots + counts - ends)[ends.searchsorted(first, side="right")]
    blocks_NX[:, 1] = np.diff(first, append=ends[-1])
    blocks_NX[:, 2] = first
    return len(first)
