"""Kernels that begin before the one in front has ended (programmatic dependent launch, from compute capability 9.0 on).

What a kernel can do without what is computed before it, it does meanwhile: it starts, fetches weights, and reads those
of small kernels and the round's table, which were last read so long ago that they come from memory. All that take part
wait before they write, and before they read what a kernel writes: as one that waits ends after all in front of it, so
does what waits for it. CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization". In Triton,
imported on cards only.

A processor divides its memory between a cache and what programs share, and does so anew only when nothing runs on it:
where small kernels, which share little, left it otherwise than products want it, these did not begin before those had
ended, and then crowded on the processors that were free. So all our kernels ask for the same.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any, TypedDict

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpspec.switches import OFF, switch

OVERLAP_FROM = (9, 0)  # compute capability
SWITCH = "TPSPEC_OVERLAP"  # variable: "off" where kernels should begin when the last has ended
LINE_BYTES = 128  # that a card fetches at once
# Of the CUDA driver: an attribute of a kernel, and its value, in percent (cuFuncSetAttribute).
SHARED_MEMORY_CARVEOUT, ALL_SHARED = 9, 100

log = logging.getLogger(__name__)

_LINE_BYTES = tl.constexpr(LINE_BYTES)


class Overlap(TypedDict):
    """Options of a launch: a constant of our kernels, and Triton's own."""

    overlaps: bool
    launch_pdl: bool


IN_TURN: Overlap = {"overlaps": False, "launch_pdl": False}


def overlap(device: torch.device) -> Overlap:
    """Of launches there; not where the environment says that none should. From now on what Triton loads divides a
    processor's memory for that, or as the driver likes."""
    if device.type != "cuda":
        return IN_TURN
    if switch(SWITCH) == OFF or torch.cuda.get_device_capability(device) < OVERLAP_FROM:
        knobs.runtime.kernel_load_end_hook.remove(_shares_all)  # where there is such
        return IN_TURN
    knobs.runtime.kernel_load_end_hook.add(_shares_all)  # once
    return {"overlaps": True, "launch_pdl": True}


def _shares_all(module: Any, kernel: int, name: str, *_: object) -> None:
    """Of what Triton has loaded: on its processors all memory that can be is shared, as products ask for."""
    if told := _driver().cuFuncSetAttribute(ctypes.c_void_p(kernel), SHARED_MEMORY_CARVEOUT, ALL_SHARED):
        log.warning("%s divides a processor's memory in its own way, which takes time: CUDA error %d", name, told)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@triton.jit  # type: ignore[untyped-decorator]
def begin(overlaps: tl.constexpr) -> None:
    """Goes on when all kernels before this one have ended; then the next may begin. Were that let in any earlier, it
    would take the room of what runs, and its programs stand crowded where some was left: products took twice their
    time."""
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def fetch(rows_at: tl.tensor, stride: int, lines: tl.constexpr, overlaps: tl.constexpr) -> None:
    """Before that: the first numbers of these rows, which are as many numbers apart and nobody writes, come into the
    card's cache meanwhile. lines: of a row; a power of two."""
    if overlaps:
        line = tl.arange(0, lines) * (_LINE_BYTES // (rows_at.dtype.element_ty.primitive_bitwidth // 8))
        prefetch(rows_at[:, None] + tl.minimum(line, stride - 1)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def prefetch(lines_at: tl.tensor) -> None:
    """Those lines come into the card's cache; nobody waits."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines_at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def fetch_rows(rows_at: tl.tensor, size: tl.constexpr, wide: tl.constexpr, overlaps: tl.constexpr) -> None:
    """The same of all numbers of rows; `wide`: the next power of two. Who writes some meanwhile does so in that cache,
    too."""
    each: tl.constexpr = _LINE_BYTES // (rows_at.dtype.element_ty.primitive_bitwidth // 8)
    fetch(rows_at, size, (wide + each - 1) // each, overlaps)


@triton.jit  # type: ignore[untyped-decorator]
def fetch_row(row_at: tl.tensor, size: tl.constexpr, wide: tl.constexpr, overlaps: tl.constexpr) -> None:
    """Of one row."""
    fetch_rows(row_at + tl.zeros((1,), tl.int32), size, wide, overlaps)
