"""Where the groups of a quantized matrix lie, and what it takes: bits of 8 or 4, with a scale for each group of inputs.

Groups lie at the same columns of the whole matrix on every shard, so that a weight is rounded alike however many shards
there are. Integers only: knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Bits = Literal[4, 8]
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
HEAD_BITS: Bits = 8  # of the output head, whatever the layers have: 4 there took SmolLM2's perplexity up by an eighth
GROUPS = (128, 64, 32)  # the first that divides the whole matrix's inputs, else the last
TILE = 32  # outputs that a CPU's product takes at a time; it fills the last tile up
SCALE_BITS = 16


@dataclass(frozen=True, slots=True)
class Grid:
    """The groups that a shard's `inputs` columns touch; `before` columns of the first group are another shard's."""

    group: int
    before: int
    inputs: int

    @property
    def num_groups(self) -> int:
        return -(-(self.before + self.inputs) // self.group)

    @property
    def width(self) -> int:
        return self.num_groups * self.group


def grid_of(columns: range, size: int) -> tuple[Grid, range]:
    """The grid for these columns of a matrix that has `size`, and the columns to read for it: those of whole groups."""
    group = next((group for group in GROUPS if size % group == 0), GROUPS[-1])
    before = columns.start % group
    grid = Grid(group, before, len(columns))
    first = columns.start - before
    return grid, range(first, min(first + grid.width, size))


def quantized_bytes(num_outputs: int, grid: Grid, bits: Bits) -> int:
    """Of codes and scales, and of zeros where there are four bits."""
    rows = -(-num_outputs // TILE) * TILE
    per_group = SCALE_BITS * (2 if bits == 4 else 1)
    return rows * (grid.width * bits + grid.num_groups * per_group) // 8
