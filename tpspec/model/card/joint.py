"""Kernels of steps.py, in Triton: a norm over the queries of all heads of all ranks, and one over the keys.

model/joint_norm.py is the reference. Must not know ranks: between the two, others may add up what the first has summed.
Imported on cards only: needs Triton, whose annotations these are.

Shapes: T rows, X numbers that a product gives, N of a layer's qkv that are normed: queries, then keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card.overlap import begin


@triton.jit  # type: ignore[untyped-decorator]
def squares(
    made_at: tl.tensor,
    sums_at: tl.tensor,
    width: tl.constexpr,
    num_queries: tl.constexpr,
    first_key: tl.constexpr,
    num_keys: tl.constexpr,
    adds: tl.constexpr,
    wide: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Sums of squares, [T, 2] in float32: of the queries of a row that a product gives, [T, X], and of so many of its
    keys. A program a sum. adds: to those that are there."""
    row, of_keys = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.where(of_keys == 1, first_key, 0)
    count = tl.where(of_keys == 1, num_keys, num_queries)
    columns = tl.arange(0, wide)
    begin(overlaps)
    x = tl.load(made_at + row * width + first + columns, mask=columns < count, other=0.0).to(tl.float32)
    sum = tl.sum(x * x)
    if adds:
        sum += tl.load(sums_at + row * 2 + of_keys)
    tl.store(sums_at + row * 2 + of_keys, sum)


@triton.jit  # type: ignore[untyped-decorator]
def jointly_normed(
    qkv_at: tl.tensor,
    sums_at: tl.tensor,
    weight_at: tl.tensor,
    eps: float,
    all_queries: int,
    all_keys: int,
    width: tl.constexpr,
    num_queries: tl.constexpr,
    num_normed: tl.constexpr,
    wide: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """The first N numbers of a row of qkv [T, X], by the sums of squares [T, 2] of all ranks' queries and keys."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    real, is_query = columns < num_normed, columns < num_queries
    weight = tl.load(weight_at + columns, mask=real, other=0.0)
    begin(overlaps)
    of_queries = tl.rsqrt(tl.load(sums_at + row * 2) / all_queries + eps)
    of_keys = tl.rsqrt(tl.load(sums_at + row * 2 + 1) / all_keys + eps)
    x = tl.load(qkv_at + row * width + columns, mask=real, other=0.0).to(tl.float32)
    normed = x * tl.where(is_query, of_queries, of_keys) * weight
    tl.store(qkv_at + row * width + columns, normed.to(qkv_at.dtype.element_ty), mask=real)
