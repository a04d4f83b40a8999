"""The gate of attention's heads on a card, in Triton: model/gates.py is the reference. Must not know what makes it.

Imported on cards only: needs Triton, whose annotations these are.

Shapes: T rows, H query heads, E head dim, X = H E.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card.overlap import begin


@triton.jit  # type: ignore[untyped-decorator]
def weighed(
    attended_at: tl.tensor,
    made_at: tl.tensor,
    out_at: tl.tensor,
    width: int,
    dim: tl.constexpr,
    by_head: tl.constexpr,
    act: tl.constexpr,
    wide: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """attended [T, X] by act of made, [T, X], or [T, H] where one number is for a head: [T, X]. What gates is rounded
    before, as there. Programs: T x pieces of X."""
    begin(overlaps)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    real = columns < width
    x = tl.load(attended_at + row * width + columns, mask=real, other=0.0).to(tl.float32)
    if by_head:
        z = tl.load(made_at + row * (width // dim) + columns // dim, mask=real, other=0.0).to(tl.float32)
    else:
        z = tl.load(made_at + row * width + columns, mask=real, other=0.0).to(tl.float32)
    if act == "softplus":
        grown = tl.exp(tl.where(z > 20.0, 20.0, z))  # which, where it is small, a sum with 1 would lose
        series = grown * (1 - grown * (1 / 2 - grown / 3))  # of log(1 + grown)
        y = tl.where(grown < 0.02, series, tl.log(1 + grown))
        y = tl.where(z > 20.0, z, y)
    else:
        y = 1 / (1 + tl.exp(-z))
    kept = y.to(out_at.dtype.element_ty).to(tl.float32)
    tl.store(out_at + row * width + columns, (x * kept).to(out_at.dtype.element_ty), mask=real)
