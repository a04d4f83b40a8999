"""The table of rows.py: a round's integers, put where a copy that nobody waits for takes them to the card.

Knows rows and slots; must not know what rows mean. Imported on cards only.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tpspec.model.batch import paths
from tpspec.model.card import rows as kernels
from tpspec.staged import Staged
from tpspec.topology.working import most_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tpspec.model.batch import Runs, Span
    from tpspec.model.sight import Sight

MOST_ROWS = kernels.MOST_ROWS
USUAL_BLOCKS = 512  # whose part of the table always goes to the card: 12 KB, of 32,000 keys in few runs
FEW_RUNS = 8  # of slots of a sequence, whose blocks are made run by run in less time than all at once
MOST_SHIFTS = 64  # of slots behind positions, whose blocks are remembered


class Seen(NamedTuple):
    """By the rows of a span: see rows.py. num_chained: rows in front of the tree."""

    positions: list[int]
    num_chained: int
    bits: list[int]

    @classmethod
    def by(cls, span: Span) -> Seen:
        if span.parents is None:
            count = len(span.tokens)
            return cls(span.positions(), count, [0] * count)
        # Few rows are told by their bits, whatever they are: to look for a chain takes longer.
        chained = span.num_chained() if len(span.tokens) > MOST_ROWS else 0
        above = [parent - chained for parent in span.parents[chained:]] if chained else span.parents
        return cls(span.positions(), chained, [0] * chained + paths(above))


class Table:
    """A round's integers for layers without a window, or with one: in the card's memory, always at the same place.

    sight: that of those layers which sees the most. num_slots: of their cache. most_positions: of a sequence.
    most_rows: of a round. num_tiles: of the last.
    """

    def __init__(
        self, num_slots: int, sight: Sight, most_positions: int, device: torch.device, most_rows: int = MOST_ROWS
    ) -> None:
        self._sight, self.most_rows, self.num_tiles = sight, most_rows, 0
        self._tiles_at = kernels.ROW_SIZE * most_rows
        self._blocks_at = self._tiles_at + kernels.TILE_SIZE * most_rows
        self._most_blocks = most_blocks(num_slots)
        self._numbers = Staged(self._size(self._most_blocks), torch.int64, device)
        self._usual_size = self._size(min(USUAL_BLOCKS, self._most_blocks))
        self._begins = [*range(0, self._tiles_at, most_rows), self._tiles_at]
        self._room = words_of(self._numbers.room())
        self._words = words_of(np.zeros(len(self._room), np.int64))  # of the round that was written last
        self._end = 0  # of them
        slots_at, slots_end = kernels.ROW_SLOT * most_rows, (kernels.ROW_SLOT + 1) * most_rows
        self._padding = array("q", [-(slots_at <= at < slots_end) for at in range(self._blocks_at)])
        begin = np.arange(0, most_positions, kernels.KEYS)  # the blocks of a text whose slots are its positions
        self._whole_blocks = np.stack([begin, np.full_like(begin, kernels.KEYS), begin], 1).ravel()
        self._shifted, self._num_written = dict[int, tuple[memoryview, int]](), 0
        self._last: list[tuple[Span, int]] = []  # that were written, where their last blocks' keys are counted

    @property
    def there(self) -> Tensor:
        return self._numbers.there

    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether their keys are not too scattered."""
        return self._num_blocks(spans) <= self._most_blocks

    def is_copied_whole(self, spans: Sequence[Span]) -> bool:
        """Whether `copy` leaves nothing out."""
        return self._num_blocks(spans) <= min(USUAL_BLOCKS, self._most_blocks)

    def goes_on(self, spans: Sequence[Span]) -> bool:
        """Whether each has as many rows as the one that was written last, in the same tree, further on in the same
        block of the same run: then all is written. Most rounds without drafts are such, and many with as many drafts as
        the one before: two numbers of a row change, and two of a text."""
        if not self._last or len(spans) != len(self._last):
            return False
        for span, (last, _) in zip(spans, self._last, strict=True):
            *before, (slot, count) = last.runs
            num_rows, on = len(span.tokens), span.start - last.start
            if num_rows != len(last.tokens) or span.parents != last.parents or on < 1 or count < num_rows:
                return False
            end = span.start + num_rows - 1
            if end // kernels.KEYS != (end - on) // kernels.KEYS or span.runs != (*before, (slot, count + on)):
                return False
        words, tile_at, row = self._words, self._tiles_at + kernels.TILE_PLACE, 0
        to_slot = (kernels.ROW_SLOT - kernels.ROW_POSITION) * self.most_rows
        for span, (last, keys_at) in zip(spans, self._last, strict=True):
            on, first = span.start - last.start, kernels.ROW_POSITION * self.most_rows + row
            for at in range(first, first + len(span.tokens)):
                words[at] += on
                words[at + to_slot] += on
            words[tile_at] += on
            words[keys_at] += on
            tile_at, row = tile_at + kernels.TILE_SIZE, row + len(span.tokens)
        self._last = [(span, keys_at) for span, (_, keys_at) in zip(spans, self._last, strict=True)]
        return True

    def write(self, spans: Sequence[Span], seen: Sequence[Seen], tile_rows: int) -> None:
        """Rows behind the spans' are padding. seen: by each span."""
        self._num_written += 1
        self._last = []
        words, windowed = self._words, self._sight.is_windowed
        parts: tuple[list[int], ...] = [], [], [], [], []
        (rows, slots, bits, lengths, tiles), num_blocks = parts, 0
        ends: list[int] = []
        for span, (positions, chained, own_bits) in zip(spans, seen, strict=True):
            count, first, begin = len(span.tokens), len(rows), num_blocks
            num_blocks += self._put_blocks(span, words[self._size(num_blocks) :])
            for tile in range(0, count, tile_rows):
                num_rows, needed = min(tile_rows, count - tile), (begin, num_blocks)
                if count > tile_rows:
                    least = min(positions[tile : tile + num_rows])
                    needed = self._needed(needed, least, span.start + tile + num_rows)
                tiles += first + chained, tile - chained, num_rows, span.start + chained, chained, *needed
                lengths += [needed[1] - needed[0]] * num_rows
            rows += positions
            slots += span.own_slots(windowed=windowed)
            bits += own_bits
            ends.append(num_blocks)
        words[: self._blocks_at] = self._padding
        for at, ints in zip(self._begins, parts, strict=True):
            words[at : at + len(ints)] = array("q", ints)
        self.num_tiles = len(tiles) // kernels.TILE_SIZE
        self._end = self._size(num_blocks)
        if not windowed and self._end <= self._usual_size and self.num_tiles == len(spans):
            self._last = [(span, self._size(end - 1) + 1) for span, end in zip(spans, ends, strict=True)]

    def put(self) -> None:
        """What `copy` leaves out goes to the card at once."""
        self._numbers.room()  # waits until it may be written
        self._room[: self._end] = self._words[: self._end]
        if self._end > self._usual_size:
            self._numbers.copy(self._usual_size, self._end)

    def copy(self) -> None:
        self._numbers.copy(0, self._usual_size)

    def sent(self) -> None:
        self._numbers.sent()

    def left(self) -> None:
        self._numbers.left()

    def _num_blocks(self, spans: Sequence[Span]) -> int:
        """That their keys take, at most."""
        num_blocks, windowed = 0, self._sight.is_windowed
        for span in spans:
            for _, count in span.held(windowed=windowed)[1]:
                num_blocks += count // kernels.KEYS + 2
        return num_blocks

    def _size(self, num_blocks: int) -> int:
        return self._blocks_at + kernels.BLOCK_SIZE * num_blocks

    def _needed(self, blocks: tuple[int, int], least: int, end: int) -> tuple[int, int]:
        """Of a span's blocks those with keys that a tile sees, whose first position and end of places these are."""
        places = np.asarray(self._words)[self._blocks_at + 2 :: kernels.BLOCK_SIZE][slice(*blocks)]
        begin = max(0, int(places.searchsorted(self._sight.first_seen(least), side="right")) - 1)
        return blocks[0] + begin, blocks[0] + int(places.searchsorted(end))

    def _put_blocks(self, span: Span, room: memoryview) -> int:
        """(first slot, keys, position of the first) of pieces of at most KEYS keys whose slots are one run; how many.

        They end where positions are multiples of KEYS, so that rows sum the same keys together in every round.
        """
        begin, runs = span.held(windowed=self._sight.is_windowed)
        seen_from = max(begin, self._sight.first_seen(span.start))
        if len(runs) > FEW_RUNS:
            return _put_scattered(begin, runs, seen_from, room)
        num_blocks = 0
        for slot, count in runs:
            shift, begin = slot - begin, begin + count
            if begin > seen_from:
                num_blocks += self._put_run(seen_from, begin, shift, room[kernels.BLOCK_SIZE * num_blocks :])
                seen_from = begin
        return num_blocks

    def _put_run(self, start: int, stop: int, shift: int, room: memoryview) -> int:
        """The same of positions [start, stop), the slot of each so much behind it."""
        first, last = start // kernels.KEYS, (stop - 1) // kernels.KEYS
        size, before = kernels.BLOCK_SIZE * (last + 1 - first), start % kernels.KEYS
        part = slice(kernels.BLOCK_SIZE * first, kernels.BLOCK_SIZE * (last + 1))
        if (remembered := self._remembered(shift)) is not None:
            room[:size] = remembered[part]
        else:
            blocks = np.asarray(room)[:size]
            blocks[:] = self._whole_blocks[part]
            blocks[:: kernels.BLOCK_SIZE] += shift
        room[0], room[1], room[2] = room[0] + before, room[1] - before, room[2] + before
        room[size - 2] -= (last + 1) * kernels.KEYS - stop
        return last + 1 - first

    def _remembered(self, shift: int) -> memoryview | None:
        """Blocks of a text as long as any, the slot of each position so much behind it. Runs of a text ask for the same
        in every round; None where as many others do as are remembered."""
        found, _ = self._shifted.pop(shift, (None, 0))
        if found is None:
            if len(self._shifted) == MOST_SHIFTS:
                longest_ago, (_, asked) = next(iter(self._shifted.items()))
                if asked >= self._num_written - 1:
                    return None
                del self._shifted[longest_ago]
            blocks = self._whole_blocks.copy()
            blocks[:: kernels.BLOCK_SIZE] += shift
            found = words_of(blocks)
        self._shifted[shift] = found, self._num_written
        return found


def words_of(numbers: NDArray[np.int64]) -> memoryview:
    """The same memory, which takes few numbers in a tenth of numpy's time."""
    return numbers.data.cast("B").cast("q")


def _put_scattered(begin: int, runs: Runs, seen_from: int, room: memoryview) -> int:
    """`Table._put_blocks` of many runs, whose first slot is that of position `begin`: in the time of a few."""
    slots, counts = np.array(runs, dtype=np.int64).T
    ends = begin + counts.cumsum()
    first = np.arange(seen_from // kernels.KEYS * kernels.KEYS, ends[-1], kernels.KEYS)
    first[0] = seen_from
    first = np.union1d(first, ends[:-1][ends[:-1] > seen_from])
    blocks_NX = np.asarray(room[: kernels.BLOCK_SIZE * len(first)]).reshape(-1, kernels.BLOCK_SIZE)
    blocks_NX[:, 0] = first + (slots + counts - ends)[ends.searchsorted(first, side="right")]
    blocks_NX[:, 1] = np.diff(first, append=ends[-1])
    blocks_NX[:, 2] = first
    return len(first)
