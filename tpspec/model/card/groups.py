"""Products with codes of 8 and 4 bits on a CUDA card, in Triton, one group after the other: of many rows, and of codes
that are no words. Must not know what a matrix is of. Imported on cards only.

Shapes: O outputs, W columns of the groups the shard touches; T rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card.codes import codes_of, floats_of, minifloats_of, numbers_of, of_table, scale_in
from tpspec.model.card.overlap import begin

MANY_ROWS, MANY_OUTPUTS = 64, 128  # of a program where rows are many: codes are read and converted once for so many


@triton.jit  # type: ignore[untyped-decorator]
def group_product(
    from_x: tl.tensor,
    from_codes: tl.tensor,
    real_rows: tl.tensor,
    real_outputs: tl.tensor,
    group: tl.constexpr,
    bits: tl.constexpr,
    table: tl.constexpr,
    inline_ptx: tl.constexpr,
) -> tl.tensor:
    """Of rows [R, 1] and outputs [1, O], by where their group begins: products [R, O] without scales, and what the rows
    sum up to, [R]."""
    if from_codes.dtype.element_ty == tl.int16:
        parts: tl.constexpr = 16 // bits
        columns = tl.arange(0, group // parts)
        words = tl.load(from_codes + columns[:, None], mask=real_outputs[None, :], other=0)
        part = tl.zeros((real_rows.shape[0], real_outputs.shape[0]), tl.float32)
        total = tl.zeros((real_rows.shape[0],), tl.float32)
        for index in tl.static_range(parts):
            x = tl.load(from_x + (index * (group // parts) + columns)[None, :], mask=real_rows[:, None], other=0.0)
            if table != "":
                numbers = floats_of(words, x, index, bits, table, inline_ptx and x.dtype != tl.float32)
            else:
                numbers = codes_of(words, index, bits).to(x.dtype)
            part = tl.dot(x, numbers, part, input_precision="ieee")
            total += tl.sum(x.to(tl.float32), 1)
    else:  # of 4 bits alone: of 8 there always are words
        half = tl.arange(0, group // 2)
        first = tl.load(from_x + half[None, :], mask=real_rows[:, None], other=0.0)
        last = tl.load(from_x + (group // 2 + half)[None, :], mask=real_rows[:, None], other=0.0)
        both = tl.load(from_codes + half[:, None], mask=real_outputs[None, :], other=0)
        if table != "":
            low, high = of_table(both & 15, table).to(first.dtype), of_table(both >> 4, table).to(first.dtype)
        else:
            low, high = ((both & 15).to(tl.int8) - 8).to(first.dtype), ((both >> 4).to(tl.int8) - 8).to(first.dtype)
        part = tl.dot(first, low, input_precision="ieee") + tl.dot(last, high, input_precision="ieee")
        total = tl.sum(first.to(tl.float32), 1) + tl.sum(last.to(tl.float32), 1)
    return part, total


@triton.jit  # type: ignore[untyped-decorator]
def floats_product(
    from_x: tl.tensor,
    at_x: tl.tensor,
    width: int,
    from_codes: tl.tensor,
    scales: tl.tensor,
    real_rows: tl.tensor,
    real_outputs: tl.tensor,
    group: tl.constexpr,
    has_gains: tl.constexpr,
    inline_ptx: tl.constexpr,
) -> tl.tensor:
    """The same of codes whose scales [O] are bytes of words, by these: of columns from `at_x` on, below `width`."""
    column = tl.arange(0, group // 4)
    words = tl.load(from_codes + column[:, None], mask=real_outputs[None, :], other=0)
    made = tl.zeros((real_rows.shape[0], real_outputs.shape[0]), tl.float32)
    for quarter in tl.static_range(4):
        at = at_x + quarter * (group // 4) + column
        x = tl.load(from_x + at[None, :], mask=real_rows[:, None] & (at < width)[None, :], other=0.0)
        numbers = minifloats_of(words, x, quarter, inline_ptx and x.dtype != tl.float32)
        made += tl.dot(x, numbers, input_precision="ieee") * scale_in(scales, quarter, has_gains)[None, :]
    return made


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def coded(
    x_at: tl.tensor,
    codes_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    y_at: tl.tensor,
    num_rows: int,
    num_outputs: int,
    num_groups: int,
    gains_at: tl.tensor,
    width: int,
    group: tl.constexpr,
    bits: tl.constexpr,
    table: tl.constexpr,
    has_gains: tl.constexpr,
    kept_zeros: tl.constexpr,
    inline_ptx: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    together: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """A tile of y [T, O] from x [T, W]. Outputs lie `together` by so many, and may have gains [O]."""
    begin(overlaps)
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    outputs = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    real_outputs, real_rows = outputs < num_outputs, rows < num_rows
    size: tl.constexpr = group * bits // codes_at.dtype.element_ty.primitive_bitwidth
    first = (outputs // together).to(tl.int64) * (num_groups * together) + outputs % together  # of scales
    from_x = x_at + rows[:, None].to(tl.int64) * width
    sums = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for index in range(num_groups):
        at = first + index * together
        from_codes = codes_at + at[None, :] * size
        if table == "e2m1":
            scales = tl.load(scales_at + at, mask=real_outputs, other=0)
            sums += floats_product(
                from_x, index * group, width, from_codes, scales, real_rows, real_outputs, group, has_gains, inline_ptx
            )
        else:
            scales, zeros = numbers_of(scales_at, zeros_at, at, real_outputs, kept_zeros)
            part, total = group_product(
                from_x + index * group, from_codes, real_rows, real_outputs, group, bits, table, inline_ptx
            )
            sums += part * scales[None, :]
            if kept_zeros != "":
                sums += total[:, None] * zeros[None, :]
    if has_gains:
        sums *= tl.load(gains_at + outputs, mask=real_outputs, other=0.0)[None, :]
    to = y_at + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(to, sums.to(y_at.dtype.element_ty), mask=real_rows[:, None] & real_outputs[None, :])
