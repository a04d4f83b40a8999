"""Kernels of steps.py, in Triton: a norm that is made behind the sum over ranks.

model/late_norm.py is the reference. Must not know what is normed. Imported on cards only: needs Triton, whose
annotations these are.

Shapes: T rows, D hidden, Y = D + 2 columns for each rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card.overlap import begin
from tpspec.topology.rounds import LATE_COLUMNS

_COLUMNS = tl.constexpr(LATE_COLUMNS)


@triton.jit  # type: ignore[untyped-decorator]
def beside(
    made_at: tl.tensor,
    squares_at: tl.tensor,
    out_at: tl.tensor,
    dim: tl.constexpr,
    rank: tl.constexpr,
    size: tl.constexpr,
    wide: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """made [T, D], and beside it squares [T], in two parts, among the columns of all ranks: out [T, Y]. Programs: T x
    pieces of Y."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    width: tl.constexpr = dim + _COLUMNS * size
    own: tl.constexpr = dim + _COLUMNS * rank
    begin(overlaps)
    x = tl.load(made_at + row * dim + columns, mask=columns < dim, other=0.0)
    squares = tl.load(squares_at + row)
    first = squares.to(x.dtype)
    rest = (squares - first.to(tl.float32)).to(x.dtype)
    x = tl.where(columns == own, first, tl.where(columns == own + 1, rest, x))
    tl.store(out_at + row * width + columns, x, mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator]
def normed_late(
    total_at: tl.tensor,
    out_at: tl.tensor,
    numbers: int,
    eps: float,
    dim: tl.constexpr,
    size: tl.constexpr,
    wide: tl.constexpr,
    wide_told: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Of the sum over ranks, total [T, Y], the norm: out [T, D]. Programs: T x pieces of D."""
    row = tl.program_id(0).to(tl.int64)
    columns, told = tl.program_id(1) * wide + tl.arange(0, wide), tl.arange(0, wide_told)
    width: tl.constexpr = dim + _COLUMNS * size
    begin(overlaps)
    parts = tl.load(total_at + row * width + dim + told, mask=told < _COLUMNS * size, other=0.0)
    scale = tl.rsqrt(tl.sum(parts.to(tl.float32)) / numbers + eps)
    x = tl.load(total_at + row * width + columns, mask=columns < dim, other=0.0).to(tl.float32) * scale
    tl.store(out_at + row * dim + columns, x.to(out_at.dtype.element_ty), mask=columns < dim)
