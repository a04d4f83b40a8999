"""Collectives of small messages by plain stores into the other cards' memory, in Triton. Imported on cards only.

In one leg each rank pushes its message to every rank, says so by a flag, waits for everybody's flags in its own memory,
and adds. In two, it pushes to each rank that one's share, adds its own share of all, and pushes the sum to every rank:
one wait more, and 2 / N of the bytes. PCIe carries no atomics between cards and keeps stores in order, so flags are
plain stores of a growing number (an epoch) behind a fence; nobody ever resets one. Two sets of places are used in turn:
a rank that pushes into a set again has seen all others begin the epoch between, and who began that has read the set.
Annotations are Triton's.

The memory of a rank, once for each leg: flags [2, N, P] of int32, then messages [2, N, CAPACITY bytes]; N ranks, P
programs. A program has the same piece of every message, whoever wrote it, so that programs need not know each other.
A third leg, with epochs of its own, is for kernels that sum a row a program and go on with it (model/card/sums.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.card_words import PATIENCE, fence, trap

PROGRAMS = 64
CHUNK_BYTES = 2048  # of a program: 16 for each of its threads
CAPACITY = PROGRAMS * CHUNK_BYTES
ROWS = 8  # of the third leg
ROW_BYTES = CAPACITY // ROWS

_PROGRAMS, _CAPACITY, _PATIENCE = tl.constexpr(PROGRAMS), tl.constexpr(CAPACITY), tl.constexpr(PATIENCE)


def leg_bytes(size: int) -> int:
    """Of the memory of each of `size` ranks, for one leg."""
    return 2 * size * (PROGRAMS * 4 + CAPACITY)


@triton.jit  # type: ignore[untyped-decorator]
def exchange(
    x_at: tl.tensor,
    out_at: tl.tensor,
    memories_at: tl.tensor,
    epochs_at: tl.tensor,
    lost_at: tl.tensor,
    count: int,
    most_looks: int,
    rank: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    sums: tl.constexpr,
    on_card: tl.constexpr,
) -> None:
    """out [count] = the sum over ranks of x [count], added in rank order in float32; or out [N, count] = every x.

    memories [N]: addresses. epochs [P]: of each program, how often it ran. lost [1]: becomes 1 when a flag has not come
    within so many looks; what is in out is then worth nothing, and after PATIENCE looks nobody gets it: the card's
    work ends with an error (a trap). A program for each chunk of x; out may be x.
    """
    program = tl.program_id(0)
    places = program * chunk + tl.arange(0, chunk)
    real = places < count
    epoch = tl.load(epochs_at + program) + 1
    x = tl.load(x_at + places, mask=real, other=0)
    for peer in tl.static_range(size):
        tl.store(message(x_at, memories_at, peer, rank, epoch, 0, size) + places, x, mask=real)
    meet(memories_at, program, epoch, lost_at, 0, most_looks, rank, size, on_card)
    if sums:
        total = total_of(x_at, memories_at, places, real, epoch, 0, rank, size, chunk)
        tl.store(out_at + places, total.to(out_at.dtype.element_ty), mask=real)
    else:
        for peer in tl.static_range(size):
            come = message(x_at, memories_at, rank, peer, epoch, 0, size) + places
            tl.store(out_at + peer * count + places, tl.load(come, mask=real, other=0, volatile=True), mask=real)
    tl.store(epochs_at + program, epoch)


@triton.jit  # type: ignore[untyped-decorator]
def sum_by_shares(
    x_at: tl.tensor,
    memories_at: tl.tensor,
    epochs_at: tl.tensor,
    lost_at: tl.tensor,
    count: int,
    share: int,
    most_looks: int,
    rank: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    leg: tl.constexpr,
    on_card: tl.constexpr,
) -> None:
    """x [count] becomes the sum that `exchange` makes, in two legs: rank r adds the r-th `share` of it.

    leg: bytes of one. A program for a chunk of every share.
    """
    program = tl.program_id(0)
    places = program * chunk + tl.arange(0, chunk)
    epoch = tl.load(epochs_at + program) + 1
    for peer in tl.static_range(size):
        real = (places < share) & (peer * share + places < count)
        part = tl.load(x_at + peer * share + places, mask=real, other=0)
        tl.store(message(x_at, memories_at, peer, rank, epoch, 0, size) + places, part, mask=real)
    meet(memories_at, program, epoch, lost_at, 0, most_looks, rank, size, on_card)
    real = (places < share) & (rank * share + places < count)
    total = total_of(x_at, memories_at, places, real, epoch, 0, rank, size, chunk).to(x_at.dtype.element_ty)
    for peer in tl.static_range(size):
        tl.store(message(x_at, memories_at, peer, rank, epoch, leg, size) + places, total, mask=real)
    meet(memories_at, program, epoch, lost_at, leg, most_looks, rank, size, on_card)
    for peer in tl.static_range(size):
        real = (places < share) & (peer * share + places < count)
        come = message(x_at, memories_at, rank, peer, epoch, leg, size) + places
        tl.store(x_at + peer * share + places, tl.load(come, mask=real, other=0, volatile=True), mask=real)
    tl.store(epochs_at + program, epoch)


@triton.jit  # type: ignore[untyped-decorator]
def message(
    x_at: tl.tensor,
    memories_at: tl.tensor,
    owner: tl.constexpr,
    sender: tl.constexpr,
    epoch: tl.tensor,
    leg: tl.constexpr,
    size: tl.constexpr,
) -> tl.tensor:
    """Where, in the memory of `owner`, what `sender` tells stands; of numbers like x's."""
    place = leg + 2 * size * _PROGRAMS * 4 + ((epoch & 1) * size + sender).to(tl.int64) * _CAPACITY
    at = (tl.load(memories_at + owner) + place).to(tl.pointer_type(x_at.dtype.element_ty))
    return tl.multiple_of(at, 16)


@triton.jit  # type: ignore[untyped-decorator]
def total_of(
    x_at: tl.tensor,
    memories_at: tl.tensor,
    places: tl.tensor,
    real: tl.tensor,
    epoch: tl.tensor,
    leg: tl.constexpr,
    rank: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    """The sum, in rank order, of what everybody has told this rank in a leg; float32."""
    total = tl.zeros((chunk,), tl.float32)
    for peer in tl.static_range(size):
        come = message(x_at, memories_at, rank, peer, epoch, leg, size) + places
        total += tl.load(come, mask=real, other=0, volatile=True).to(tl.float32)  # not a cache's of the epoch before
    return total


@triton.jit  # type: ignore[untyped-decorator]
def meet(
    memories_at: tl.tensor,
    program: tl.tensor,
    epoch: tl.tensor,
    lost_at: tl.tensor,
    leg: tl.constexpr,
    most_looks: int,
    rank: tl.constexpr,
    size: tl.constexpr,
    on_card: tl.constexpr,
) -> None:
    """Says everywhere that this rank has told all of its leg, and waits until everybody has said so here."""
    flags = tl.pointer_type(tl.int32)
    set_at = (epoch & 1) * size  # not % 2, which is -1 once the epoch has wrapped
    if on_card:
        fence()
    for peer in tl.static_range(size):
        flag = (tl.load(memories_at + peer) + leg).to(flags) + (set_at + rank) * _PROGRAMS + program
        tl.store(flag, epoch)
    mine = tl.load(memories_at + rank) + leg
    for peer in tl.static_range(size):
        flag = mine.to(flags) + (set_at + peer) * _PROGRAMS + program
        looks = 0
        seen = tl.load(flag, volatile=True)
        while (seen != epoch) & (looks < most_looks):
            seen = tl.load(flag, volatile=True)
            looks += 1
        if seen != epoch:
            tl.store(lost_at, 1)
            if on_card:  # noqa: SIM102 (this is the compiler's to decide, the next the card's)
                if looks >= _PATIENCE:
                    trap()
    if on_card:
        fence()
