"""A sum over cards and the norm behind it in one kernel, to the bit what `exchange` and `add_norm` do in two.

With few rows most of a kernel's time is its start, and a round has two sums a layer. Knows peer memory and rows; must
not know layers. Imported on cards only: needs Triton, whose annotations these are.

Shapes: T rows, D hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpspec.comm.peer_kernel import ROW_BYTES, meet, message, total_of
from tpspec.model.card.norms import centred, rms_normed, sum_of
from tpspec.model.card.overlap import fetch_row

_ROW_BYTES = tl.constexpr(ROW_BYTES)


@triton.jit  # type: ignore[untyped-decorator]
def sum_add_norm(
    partial_at: tl.tensor,
    x_at: tl.tensor,
    delta_weight_at: tl.tensor,
    delta_eps: float,
    weight_at: tl.tensor,
    eps: float,
    bias_at: tl.tensor,
    scale: float,
    out_at: tl.tensor,
    memories_at: tl.tensor,
    epochs_at: tl.tensor,
    lost_at: tl.tensor,
    most_looks: int,
    rank: tl.constexpr,
    size: tl.constexpr,
    leg: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,
    norms_delta: tl.constexpr,
    scales: tl.constexpr,
    norms: tl.constexpr,
    on_card: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """x [T, D] += the sum over ranks of partial [T, D], or its RMSNorm, then *= scale; out the norm of what x was
    rounded to, as `add_norm` has it.

    A program a row, each with a place of its own in every memory, whatever D is; see `exchange` for the rest. The next
    kernel begins when all ranks have come: it would fill the card, which another rank may compute on, while this waits.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, wide)
    real = columns < dim
    at = row * dim + columns
    if norms != "":
        weight = tl.load(weight_at + columns, mask=real, other=0.0)
    if norms == "biased":
        bias = tl.load(bias_at + columns, mask=real, other=0.0)
    if norms_delta:
        delta_weight = tl.load(delta_weight_at + columns, mask=real, other=0.0)
    fetch_row(x_at + row * dim, dim, wide, overlaps)
    if overlaps:
        gdc_wait()
    places = row * (_ROW_BYTES // (partial_at.dtype.element_ty.primitive_bitwidth // 8)) + columns
    epoch = tl.load(epochs_at + row) + 1
    partial = tl.load(partial_at + at, mask=real, other=0.0)
    for peer in tl.static_range(size):
        tl.store(message(partial_at, memories_at, peer, rank, epoch, leg, size) + places, partial, mask=real)
    meet(memories_at, row, epoch, lost_at, leg, most_looks, rank, size, on_card)
    if overlaps:
        gdc_launch_dependents()
    delta = total_of(partial_at, memories_at, places, real, epoch, leg, rank, size, wide).to(partial.dtype)
    tl.store(epochs_at + row, epoch)
    if norms_delta:
        delta = rms_normed(delta, delta_weight, delta_eps, dim).to(delta.dtype)
    x = tl.load(x_at + at, mask=real, other=0.0)
    x = sum_of(x, delta, scale, scales)
    tl.store(x_at + at, x, mask=real)
    if norms != "":
        normed = rms_normed(centred(x, real, dim, norms), weight, eps, dim)
        if norms == "biased":
            normed += bias
        tl.store(out_at + at, normed.to(out_at.dtype.element_ty), mask=real)
