"""Kernels of steps.py, in Triton: the heads of a round's rows, normed and turned, and where a cache keeps them.

torch_steps.py is the reference; the table is rows.py's. Must not know drafts, spans or ranks. Imported on cards
only: needs Triton. Annotations are Triton's, which reads them: no name of Python's may stand there.

Shapes: T rows, H query heads, G kv heads, E head dim, P positions; R of some rows, one head of each, W the next power
of two of E.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card.overlap import begin, fetch_row
from tpspec.model.card.rows import ROW_POSITION, ROW_SLOT

_POSITIONS, _SLOTS = tl.constexpr(ROW_POSITION), tl.constexpr(ROW_SLOT)
_HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it rounds a small float32 to a whole number


@triton.jit  # type: ignore[untyped-decorator]
def _normed(
    heads_at: tl.tensor,
    real: tl.tensor,
    columns: tl.tensor,
    weight_at: tl.tensor,
    eps: float,
    dim: tl.constexpr,
    wide: tl.constexpr,
    normed: tl.constexpr,
) -> tl.tensor:
    """Those columns, [1, W], of the heads that begin at `heads_at`, [R, 1], after their norm if they have one "before"
    rope; [R, W], float32."""
    x = tl.load(heads_at + columns, mask=real & (columns < dim), other=0.0)
    if normed == "before":
        all_columns = tl.arange(0, wide)[None, :]
        whole = tl.load(heads_at + all_columns, mask=real & (all_columns < dim), other=0.0).to(tl.float32)
        weight = tl.load(weight_at + columns, mask=columns < dim, other=0.0)
        x = (x.to(tl.float32) * tl.rsqrt(tl.sum(whole * whole, 1) / dim + eps)[:, None] * weight).to(x.dtype)
    return x.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def angles(
    cos_at: tl.tensor,
    sin_at: tl.tensor,
    positions: tl.tensor,
    real: tl.tensor,
    dim: tl.constexpr,
    wide: tl.constexpr,
    turned: tl.constexpr,
) -> tl.tensor:
    """By which rope turns heads at those positions, [R]: two of [R, W]; none where it turns none."""
    cos, sin = 0.0, 0.0
    if turned:
        columns = tl.arange(0, wide)[None, :]
        at, real = positions.to(tl.int64)[:, None] * dim + columns, real[:, None] & (columns < dim)
        cos, sin = tl.load(cos_at + at, mask=real, other=0.0), tl.load(sin_at + at, mask=real, other=0.0)
    return cos, sin


@triton.jit  # type: ignore[untyped-decorator]
def turned_heads(
    heads_at: tl.tensor,
    real: tl.tensor,
    weight_at: tl.tensor,
    eps: float,
    cos: tl.tensor,
    sin: tl.tensor,
    dim: tl.constexpr,
    wide: tl.constexpr,
    normed: tl.constexpr,
    turned: tl.constexpr,
) -> tl.tensor:
    """The heads that begin there, [R], normed and turned by those angles: [R, W], float32. normed: "before" rope or
    "behind" it; "" for not at all."""
    columns = tl.arange(0, wide)[None, :]
    heads_at, real = heads_at[:, None], real[:, None]
    x = _normed(heads_at, real, columns, weight_at, eps, dim, wide, normed)
    if turned:
        across = tl.where(columns < dim // 2, columns + dim // 2, columns - dim // 2)
        across = tl.where(columns < dim, across, columns)
        if dim % 16 == 0:  # eight numbers stand together across, too
            across = tl.max_contiguous(tl.multiple_of(across, [1, 8]), [1, 8])
        other = _normed(heads_at, real, across, weight_at, eps, dim, wide, normed)
        x = x * cos.to(tl.float32) + other * sin.to(tl.float32)
    if normed == "behind":
        x = x.to(heads_at.dtype.element_ty).to(tl.float32)
        weight = tl.load(weight_at + columns, mask=columns < dim, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None] * weight
    return x


@triton.jit  # type: ignore[untyped-decorator]
def keep(
    x: tl.tensor,
    cells_at: tl.tensor,
    scales_at: tl.tensor,
    at: tl.tensor,
    real: tl.tensor,
    dim: tl.constexpr,
    wide: tl.constexpr,
    small: tl.constexpr,
) -> None:
    """Writes heads, [R, W], into these cells, [R]; small: as codes and scales."""
    columns = tl.arange(0, wide)[None, :]
    if small:
        x = x.to(tl.float32)
        scales = tl.max(tl.abs(x), 1) / 127 + tl.sum(x * 0.0, 1)  # a maximum passes over NaN, which has to stay
        scales = tl.where(scales == 0, 1.0, scales)
        tl.store(scales_at + at, scales, mask=real)
        x = x / scales[:, None] + _HALF_EVEN - _HALF_EVEN
    to = cells_at + at[:, None] * dim + columns
    tl.store(to, x.to(cells_at.dtype.element_ty), mask=real[:, None] & (columns < dim))


@triton.jit  # type: ignore[untyped-decorator]
def place(
    qkv_at: tl.tensor,
    table_at: tl.tensor,
    q_at: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    key_scales_at: tl.tensor,
    value_scales_at: tl.tensor,
    q_weight_at: tl.tensor,
    k_weight_at: tl.tensor,
    v_weight_at: tl.tensor,
    eps: float,
    cos_at: tl.tensor,
    sin_at: tl.tensor,
    gains_at: tl.tensor,
    num_slots: int,
    most_rows: int,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    num_lines: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,
    normed: tl.constexpr,
    values_normed: tl.constexpr,
    turned: tl.constexpr,
    grown: tl.constexpr,
    small: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Norms and turns the heads of qkv [T, N E]; queries go to q [T, H, E], keys and values to their slot.

    Programs: T x (H + 2G), or H + G where keys are their own values, or H where none are kept. N: of these, or H + G
    where keys and values are made of the same. normed, values_normed: see turned_heads. grown: queries that are turned
    are multiplied by their position's gain, of gains [P]. small: the cache has codes and scales.
    """
    head, row = tl.program_id(1), tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns, whole = tl.arange(0, wide)[None, :], tl.full((1,), 1, tl.int1)
    heads_at = qkv_at + (row * num_lines + tl.where(head < num_lines, head, head - num_kv_heads)) * dim
    slot, position = tl.load(table_at + _SLOTS * most_rows + row), tl.load(table_at + _POSITIONS * most_rows + row)
    cos, sin = angles(cos_at, sin_at, position, whole, dim, wide, turned)
    if turned and grown:
        gain = tl.load(gains_at + position)
    if normed != "":
        fetch_row(tl.where(head < num_heads, q_weight_at, k_weight_at), dim, wide, overlaps)
    begin(overlaps)
    if head < num_heads + num_kv_heads:
        weight_at = tl.where(head < num_heads, q_weight_at, k_weight_at)
        x = turned_heads(heads_at, whole, weight_at, eps, cos, sin, dim, wide, normed, turned)
        if head < num_heads:
            if turned and grown:
                x *= gain[:, None]
            to = q_at + (row * num_heads + head)[:, None] * dim + columns
            tl.store(to, x.to(q_at.dtype.element_ty), mask=columns < dim)
        else:
            at = (head - num_heads).to(tl.int64) * num_slots + slot
            keep(x.to(q_at.dtype.element_ty), keys_at, key_scales_at, at, slot >= 0, dim, wide, small)
    else:
        x = turned_heads(heads_at, whole, v_weight_at, eps, cos, sin, dim, wide, values_normed, False)
        at = (head - num_heads - num_kv_heads).to(tl.int64) * num_slots + slot
        keep(x.to(q_at.dtype.element_ty), values_at, value_scales_at, at, slot >= 0, dim, wide, small)
