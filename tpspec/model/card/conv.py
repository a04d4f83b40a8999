"""The kernel of short convolutions on a card, in Triton: a round's rows between their products, in one launch a layer.

model/short_conv.py is the reference; states.py launches this. All that changes from round to round is read from the
table of delta.py. Must not know drafts, spans or ranks. Imported on cards only: needs Triton. Annotations are
Triton's, which reads them: no name of Python's may stand there.

Shapes: T rows of the round, M channels; a row that is made has B, C and x of each channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card.delta import PADDING, ROW_SIZE, ROWS_AT, SPAN_SIZE
from tpspec.model.card.overlap import begin

_ROWS_AT, _ROW_SIZE, _SPAN_SIZE = tl.constexpr(ROWS_AT), tl.constexpr(ROW_SIZE), tl.constexpr(SPAN_SIZE)
_PADDING = tl.constexpr(PADDING)


@triton.jit  # type: ignore[untyped-decorator]
def _seen(
    names: tl.tensor,
    columns: tl.tensor,
    real: tl.tensor,
    made_at: tl.tensor,
    left_at: tl.tensor,
    num_left: int,
    num_channels: tl.constexpr,
) -> tl.tensor:
    """Some channels of inputs that the table names, as elements: B x of rows of the round, or what is left."""
    is_own, left = real & (names >= 0), -1 - names
    own_at = made_at + names * 3 * num_channels + columns
    before = tl.load(own_at, mask=is_own, other=0.0).to(tl.float32)
    x = tl.load(own_at + 2 * num_channels, mask=is_own, other=0.0).to(tl.float32)
    is_left = real & (left >= 0) & (left < num_left)
    kept = tl.load(left_at + left * num_channels + columns, mask=is_left, other=0.0)
    return tl.where(is_own, (before * x).to(kept.dtype), kept)


@triton.jit  # type: ignore[untyped-decorator]
def convolved(
    made_at: tl.tensor,
    left_at: tl.tensor,
    table_at: tl.tensor,
    kernel_at: tl.tensor,
    biases_at: tl.tensor,
    out_at: tl.tensor,
    num_rows: int,
    num_left: int,
    most_rows: int,
    length: int,
    num_channels: tl.constexpr,
    sight: tl.constexpr,
    tile: tl.constexpr,
    wide: tl.constexpr,
    biased: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """out [T, M], 0 for padding, of made [T, 3 M] and left [num_left, M], which goes on: in `length` rows a slot what
    stands before the root, and the tree's rows.

    Programs: spans (as many as rows, at most) x pieces of `wide` channels; each takes `tile` rows at a time, and its
    share of padding.
    """
    begin(overlaps)
    channels = tl.program_id(1) * wide + tl.arange(0, wide)
    exists = channels < num_channels
    for start in range(tl.program_id(0) * tile, num_rows, tl.num_programs(0) * tile):
        rows = start + tl.arange(0, tile)
        tags = tl.load(table_at + _ROWS_AT + rows * _ROW_SIZE, mask=rows < num_rows, other=0)
        to = out_at + rows[:, None].to(tl.int64) * num_channels + channels[None, :]
        none = tl.zeros((tile, wide), out_at.dtype.element_ty)
        tl.store(to, none, mask=(tags == _PADDING)[:, None] & exists[None, :])

    before: tl.constexpr = sight - 1
    span_at = table_at + _ROWS_AT + _ROW_SIZE * most_rows + tl.program_id(0) * (_SPAN_SIZE + before)
    slot, first, num_chained = tl.load(span_at), tl.load(span_at + 4), tl.load(span_at + 5)
    num_own = tl.load(span_at + 6)
    if num_own == 0:
        return  # there are fewer spans
    sights_at = table_at + _ROWS_AT + (_ROW_SIZE + _SPAN_SIZE + before) * most_rows + (most_rows + first) * sight
    bias = tl.zeros((wide,), tl.float32)
    if biased:
        bias += tl.load(biases_at + channels, mask=exists, other=0.0)
    for start in range(0, num_own, tile):
        rows = start + tl.arange(0, tile)
        real = (rows < num_own)[:, None] & exists[None, :]
        sums = tl.zeros((tile, wide), tl.float32) + bias[None, :]
        for back in tl.static_range(sight):
            names = tl.load(sights_at + rows * sight + back, mask=rows < num_own, other=0)
            x = _seen(names[:, None], channels[None, :], real, made_at, left_at, num_left, num_channels)
            weights = tl.load(kernel_at + back * num_channels + channels, mask=exists, other=0.0)
            sums += x.to(tl.float32) * weights[None, :]
        row_at = (first + rows)[:, None] * num_channels + channels[None, :]
        behind_at = made_at + (first + rows)[:, None] * 3 * num_channels + num_channels + channels[None, :]
        behind = tl.load(behind_at, mask=real, other=0.0).to(tl.float32)
        gated = behind * sums.to(out_at.dtype.element_ty).to(tl.float32)
        tl.store(out_at + row_at, gated.to(out_at.dtype.element_ty), mask=real)

    tl.debug_barrier()  # what is left here has been seen by all threads
    to = left_at + slot * length * num_channels + channels
    for i in tl.static_range(before):  # what comes from the same slot stands behind where it goes, or there
        name = tl.load(span_at + _SPAN_SIZE + i)
        x = _seen(name, channels, exists, made_at, left_at, num_left, num_channels)
        tl.store(to + i * num_channels, x, mask=exists)
    for i in range(num_own - num_chained):
        x = _seen(first + num_chained + i, channels, exists, made_at, left_at, num_left, num_channels)
        tl.store(to + (before + i) * num_channels, x, mask=exists)
