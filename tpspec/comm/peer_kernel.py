"""A collective of small messages by plain stores into the other cards' memory, in Triton. Imported on cards only.

One shot: each rank pushes its message to every rank, says so by a flag, waits for everybody's flags in its own memory,
and adds. PCIe carries no atomics between cards and keeps stores in order, so flags are plain stores of a growing number
(an epoch) behind a fence; nobody ever resets one. Two sets of places are used in turn: a rank that pushes into a set
again has seen all others begin the epoch between, and who began that has read the set. Annotations are Triton's.

The memory of a rank: flags [2, N, P] of int32, then messages [2, N, CAPACITY bytes]; N ranks, P programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

PROGRAMS = 64
CHUNK_BYTES = 2048  # of a program: 16 for each of its threads
CAPACITY = PROGRAMS * CHUNK_BYTES

_PROGRAMS, _CAPACITY = tl.constexpr(PROGRAMS), tl.constexpr(CAPACITY)


@triton.jit  # type: ignore[untyped-decorator]
def exchange(
    x_at: tl.tensor,
    out_at: tl.tensor,
    memories_at: tl.tensor,
    epochs_at: tl.tensor,
    lost_at: tl.tensor,
    count: int,
    most_looks: tl.constexpr,
    rank: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    sums: tl.constexpr,
    on_card: tl.constexpr,
) -> None:
    """out [count] = the sum over ranks of x [count], added in rank order in float32; or out [N, count] = every x.

    memories [N]: addresses. epochs [P]: of each program, how often it ran. lost [1]: becomes 1 when a flag has not come
    within so many looks; what is in out is then worth nothing. A program for each chunk of x; out may be x.
    """
    program = tl.program_id(0)
    places = program * chunk + tl.arange(0, chunk)
    real = places < count
    epoch = tl.load(epochs_at + program) + 1
    set_at = (epoch % 2) * size
    kind = tl.pointer_type(x_at.dtype.element_ty)
    flags = tl.pointer_type(tl.int32)
    messages_at = 2 * size * _PROGRAMS * 4
    x = tl.load(x_at + places, mask=real, other=0)
    for peer in tl.static_range(size):
        to = tl.load(memories_at + peer) + messages_at + (set_at + rank).to(tl.int64) * _CAPACITY
        tl.store(tl.multiple_of(to.to(kind), 16) + places, x, mask=real)
    if on_card:
        _fence()
    for peer in tl.static_range(size):
        flag = tl.load(memories_at + peer).to(flags) + (set_at + rank) * _PROGRAMS + program
        tl.store(flag, epoch)
    mine = tl.load(memories_at + rank)
    for peer in tl.static_range(size):
        flag = mine.to(flags) + (set_at + peer) * _PROGRAMS + program
        looks = 0
        seen = tl.load(flag, volatile=True)
        while (seen != epoch) & (looks < most_looks):
            seen = tl.load(flag, volatile=True)
            looks += 1
        if seen != epoch:
            tl.store(lost_at, 1)
    if on_card:
        _fence()
    total = tl.zeros((chunk,), tl.float32)
    for peer in tl.static_range(size):
        come = tl.multiple_of((mine + messages_at + (set_at + peer).to(tl.int64) * _CAPACITY).to(kind), 16)
        part = tl.load(come + places, mask=real, other=0, volatile=True)  # not from a cache of the epoch before last
        if sums:
            total += part.to(tl.float32)
        else:
            tl.store(out_at + peer * count + places, part, mask=real)
    if sums:
        tl.store(out_at + places, total.to(out_at.dtype.element_ty), mask=real)
    tl.store(epochs_at + program, epoch)


@triton.jit  # type: ignore[untyped-decorator]
def _fence() -> None:
    """What any thread of this program wrote before is seen everywhere before what any writes after."""
    tl.debug_barrier()
    nothing = tl.arange(0, 128)
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [nothing], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
