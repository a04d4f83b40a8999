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
NARROW_SHARDS = 8
TILE = 32  # outputs that a CPU's product takes at a time; it fills the last tile up
SCALE_BITS = 16
STORED_SCALE_BITS = 32  # of a published checkpoint, whose scales are float16, bfloat16 or float32: all exact
FLOAT_SCALE_BITS = 8  # of floats of 4 bits: powers of two, or floats of 8 bits


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


def groups_of(size: int, *, narrow: bool) -> tuple[int, ...]:
    """The groups that columns may have, the preferred first. narrow: they are few, as an expert's channels are, so that
    what a cut group has of a neighbour's would be much of them: such as eight equal shards do not cut, if any."""
    uncut = tuple(group for group in GROUPS if size % (NARROW_SHARDS * group) == 0)
    return (uncut or GROUPS[-1:]) if narrow else GROUPS


def grid_of(columns: range, size: int, *, narrow: bool = False) -> tuple[Grid, range]:
    """The grid for these columns of a matrix that has `size`, and the columns to read for it: those of whole groups.

    narrow: see groups_of.
    """
    group = next((group for group in groups_of(size, narrow=narrow) if size % group == 0), GROUPS[-1])
    before = columns.start % group
    grid = Grid(group, before, len(columns))
    first = columns.start - before
    return grid, range(first, min(first + grid.width, size))


def stored_grid(columns: range, size: int, group: int | None, *, narrow: bool = False) -> Grid:
    """The grid for codes of a published checkpoint, which has `group` inputs to a scale (None: all of them): groups of
    it are cut into smaller ones that have the same scale, so that no slice holds much of its neighbour's, but for those
    that are smaller already.

    narrow: see groups_of.
    """
    if group is None:
        return grid_of(columns, size, narrow=narrow)[0]
    cut = next((own for own in groups_of(size, narrow=narrow) if group % own == 0), group)
    return Grid(cut, columns.start % cut, len(columns))


def shuffled_grid(columns: range, size: int, group: int | None, *, narrow: bool = False) -> Grid:
    """The widest grid that these columns can need where a table says to which group a column belongs."""
    if group is None or (len(columns) == size and size % group == 0):
        return stored_grid(columns, size, group, narrow=narrow)
    num_groups = len(columns) // GROUPS[-1] + min(-(-size // group), len(columns))
    return Grid(GROUPS[-1], 0, num_groups * GROUPS[-1])


def quantized_bytes(
    num_outputs: int,
    grid: Grid,
    bits: Bits,
    *,
    zeros: bool | None = None,
    scale_bits: int = SCALE_BITS,
    gain_bits: int = 0,
) -> int:
    """Of codes and scales, of zeros: where there are four bits, if not said; and of a gain for each output."""
    rows = -(-num_outputs // TILE) * TILE
    per_group = scale_bits * (2 if (bits == 4 if zeros is None else zeros) else 1)
    return rows * (grid.width * bits + grid.num_groups * per_group + gain_bits) // 8
