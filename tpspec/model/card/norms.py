"""Kernels of steps.py, in Triton: norms of a round's rows on a card, and what is added before them.

torch_steps.py is the reference. Must not know ranks: a sum over those with a norm behind it is sums.py's. Imported
on cards only: needs Triton. Annotations are Triton's, which reads them: no name of Python's may stand there.

Shapes: T rows, D hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card.overlap import begin, fetch_row


def norm_warps(wide: int) -> int:
    """Of the one program that a row's norm has: eight numbers a thread, as far as there are threads."""
    return max(4, min(16, wide // 256))


@triton.jit  # type: ignore[untyped-decorator]
def add_norm(
    x_at: tl.tensor,
    delta_at: tl.tensor,
    delta_weight_at: tl.tensor,
    delta_eps: float,
    weight_at: tl.tensor,
    eps: float,
    bias_at: tl.tensor,
    scale: float,
    out_at: tl.tensor,
    dim: tl.constexpr,
    wide: tl.constexpr,
    adds: tl.constexpr,
    norms_delta: tl.constexpr,
    scales: tl.constexpr,
    norms: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """x [T, D] += delta, or its RMSNorm, then *= scale, and out the norm of what x was rounded to. A program a row.

    norms: "rms", or "centred" as LayerNorm is, or "biased", which is centred, too; "" for none, then nothing is written
    there.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, wide)
    real = columns < dim
    if norms != "":
        weight = tl.load(weight_at + columns, mask=real, other=0.0)
    if norms == "biased":
        bias = tl.load(bias_at + columns, mask=real, other=0.0)
    if norms_delta:
        delta_weight = tl.load(delta_weight_at + columns, mask=real, other=0.0)
    fetch_row(x_at + row * dim, dim, wide, overlaps)
    begin(overlaps)
    x = tl.load(x_at + row * dim + columns, mask=real, other=0.0)
    if adds:
        delta = tl.load(delta_at + row * dim + columns, mask=real, other=0.0)
        if norms_delta:
            delta = rms_normed(delta, delta_weight, delta_eps, dim).to(delta.dtype)
        x = sum_of(x, delta, scale, scales)
        tl.store(x_at + row * dim + columns, x, mask=real)
    if norms != "":
        normed = rms_normed(centred(x, real, dim, norms), weight, eps, dim)
        if norms == "biased":
            normed += bias
        tl.store(out_at + row * dim + columns, normed.to(out_at.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def sum_of(x: tl.tensor, delta: tl.tensor, scale: float, scales: tl.constexpr) -> tl.tensor:
    """Rounded, and once more where it is scaled."""
    x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
    if scales:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def centred(x: tl.tensor, real: tl.tensor, dim: tl.constexpr, norms: tl.constexpr) -> tl.tensor:
    """What a row differs from its mean, where it is normed so, in float32; else the row."""
    if norms != "rms":
        x = x.to(tl.float32)
        x = tl.where(real, x - tl.sum(x) / dim, 0.0)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def rms_normed(x: tl.tensor, weight: tl.tensor, eps: float, dim: tl.constexpr) -> tl.tensor:
    """Of a whole row, which is 0 beyond its numbers; float32."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x) / dim + eps) * weight
