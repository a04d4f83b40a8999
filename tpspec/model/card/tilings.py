"""How attention is cut on a card: tiles of what a processor shares, folds of query heads, splits of keys.

Sizes only; must not know what rows mean. Imported on cards only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import triton

from tpspec.model.card.rows import KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tpspec.model.sight import Heads, Shape

CARD_PROCESSORS = 2  # programs of attention for each of a card's processors, where keys are many enough
MOST_HEAD_BYTES = 1280  # of a head that is read in pieces, as 576 numbers of a latent in 16 bits
USUAL_STAGES, USUAL_WARPS = 3, 4  # Triton's own
LEAST_SIDE = 16  # of what tensor cores take
# Of a tile, at most: of more there is no room in registers beside what places heads, and where products of 64 are other
# instructions a row's bits would depend on how many stand beside it.
FEW_ROWS = 32
PLACED_WIDE = 256  # of a head that attention places, at most
MANY_ROWS, MANY_STAGES = 128, 5  # of a tile; so many give keys two places, for they come by way of a table
OLD_CARDS = (8, 0)  # compute capability; below it there is less to share, and products take more registers
# Compute capabilities, from 9.0 on, whose products of 64 rows are other instructions than those of fewer.
OTHER_PRODUCTS = (9, 10, 11)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of attention: what fits into what a processor shares (tests/model/test_card_kernels.py).

    rows: of a tile, each standing there once for each query head of a fold. wide, rest, keys: see `attend`. stages: of
    loads, whose results have to fit as well. warps: of a program, whose threads hold a tile's sums. splits: programs
    that share the keys of a row and kv head; a power of two.
    """

    rows: int
    wide: int
    rest: int
    keys: int
    stages: int = USUAL_STAGES
    warps: int = USUAL_WARPS
    splits: int = 1

    @property
    def places(self) -> bool:
        """Whether attention can place such heads itself: wider ones find no room in registers beside their angles."""
        return self.wide <= PLACED_WIDE and not self.rest

    @classmethod
    def of(cls, head_dim: int, item_bytes: int, capability: tuple[int, int]) -> Tiling | None:
        """Of few rows. None for heads that are too wide.

        With as many rows as a head is wide, or more, threads are laid out otherwise: sums over keys, or of a head's
        squares, would be added in another order than with few rows, and a row's bits would depend on how many stand
        beside it.
        """
        wide = max(LEAST_SIDE, triton.next_power_of_2(head_dim))
        rows = max(LEAST_SIDE, min(FEW_ROWS, wide // 2))
        if capability < OLD_CARDS:
            return cls(rows, wide, 0, KEYS // 2, warps=2 * USUAL_WARPS) if wide * item_bytes <= 256 else None
        if wide * item_bytes <= 256 and item_bytes == 2:
            return cls(rows, wide, 0, KEYS)
        if wide * item_bytes <= 512:
            return cls(rows, wide, 0, KEYS, warps=2 * USUAL_WARPS)
        wide //= 1 if head_dim == wide else 2
        rest = max(LEAST_SIDE, triton.next_power_of_2(head_dim - wide)) if head_dim > wide else 0
        if (wide + rest) * item_bytes > MOST_HEAD_BYTES:
            return None
        return cls(rows, wide, rest, KEYS // 2, stages=1, warps=2 * USUAL_WARPS)

    @classmethod
    def of_many(cls, head_dim: int, item_bytes: int, capability: tuple[int, int]) -> Tiling | None:
        """Of many rows, whose bits may depend on how many they are: each thread has whole rows of a tile, if it can."""
        tiling = cls.of(head_dim, item_bytes, capability)
        if tiling is None or capability < OLD_CARDS or item_bytes > 2 or tiling.rest:
            return tiling
        has_others = capability[0] in OTHER_PRODUCTS
        if tiling.wide <= MANY_ROWS:  # there would be room for more keys, but not in registers
            keys = tiling.keys if has_others or tiling.wide < MANY_ROWS else tiling.keys // 2
            return replace(tiling, rows=MANY_ROWS, keys=keys, stages=MANY_STAGES, warps=2 * USUAL_WARPS)
        if has_others and tiling.wide == 2 * MANY_ROWS:
            return replace(tiling, rows=MANY_ROWS // 2, keys=tiling.keys // 2, stages=MANY_STAGES)
        return tiling


@dataclass(frozen=True, slots=True)
class Folds:
    """The query heads of a layer, as its programs share them: those of a kv head in so many `cuts`, each a fold of
    `most` at most. firsts: the first of each, and where the last ends, on the card."""

    tiling: Tiling
    cuts: int
    most: int
    firsts: Tensor

    @classmethod
    def of(cls, heads: Heads, tiling: Tiling, device: torch.device) -> Folds:
        counts = [heads.kv_of.count(kv) for kv in range(heads.num_kv)]
        cuts = triton.cdiv(max(counts), tiling.rows)
        folds = [cut for count in counts for cut in _even(count, cuts)]
        return cls(tiling, cuts, max(folds), torch.tensor([0, *accumulate(folds)], dtype=torch.int32).to(device))

    def tile_rows(self, num_rows: int) -> int:
        """No tile has more folded rows than it may, and none of few rows has many."""
        return max(1, min(self.tiling.rows // self.most, num_rows))


def tilings_of(
    shape: Shape, cut: Callable[[int, int, tuple[int, int]], Tiling | None]
) -> Mapping[Heads, Tiling] | None:
    """As `Tiling.of` cuts them, or `of_many`; None where some heads are too wide for the card."""
    capability = torch.cuda.get_device_capability(shape.device)
    made = {heads: cut(heads.dim, shape.dtype.itemsize, capability) for heads in shape.heads}
    tilings = {heads: tiling for heads, tiling in made.items() if tiling is not None}
    return tilings if len(tilings) == len(made) else None


def splits_of(num_programs: int, wanted: int, most: int) -> int:
    """Of the keys of so many programs, that there be as many as are wanted; a power of two."""
    splits: int = triton.next_power_of_2(max(1, triton.cdiv(wanted, num_programs)))
    return min(most, splits)


def wanted_programs(device: torch.device) -> int:
    """Of attention, that keep a card's processors busy."""
    return CARD_PROCESSORS * torch.cuda.get_device_properties(device).multi_processor_count


def _even(count: int, parts: int) -> list[int]:
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]
