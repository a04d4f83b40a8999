"""A word that a card waits for, which its host stores in its own memory, and what kernels need for such words: fences,
and an end to waiting. In Triton, imported on cards only. Knows no other room.

What was launched behind a `Gate` begins 7 us after the host has opened it, where a replay that is launched only then
begins after 48 (an H200, a replay of some 300 kernels). The other way, from a card to its host, a kernel that stores
words where the host looks is no faster than a copy and an event (31 to 39 us for 19 to 23, on another H200).
Annotations are Triton's.
"""

from __future__ import annotations

import platform

import torch
import triton
import triton.language as tl

PATIENCE = (1 << 31) - 16  # looks at a word: some minutes in a card's own memory, half an hour in the host's
IN_ORDER = "x86_64", "AMD64"  # machines, as Python calls them

_PATIENCE = tl.constexpr(PATIENCE)


def gate_of(device: torch.device) -> Gate | None:
    """None where a host does not store in the order of its program: the card might see the gate open before what the
    host has written for it."""
    return Gate(device) if platform.machine() in IN_ORDER else None


class Gate:
    """Of one card. What is launched behind the n-th `wait` begins when `open` has been called n times."""

    def __init__(self, device: torch.device) -> None:
        self._here = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._opened = self._here.numpy()
        self._passed = torch.zeros(1, dtype=torch.int64, device=device)

    def wait(self) -> None:
        """The card stops here until `open`: until then nothing may be asked of it that the host waits for."""
        wait_for[(1,)](self._here, self._passed, num_warps=1)

    def open(self) -> None:
        """What the host has written before, the card sees."""
        self._opened[0] += 1


@triton.jit  # type: ignore[untyped-decorator]
def wait_for(opened_at: tl.tensor, passed_at: tl.tensor) -> None:
    """Until opened [1], which the host counts, is more than passed [1], which is then one more. Whose host has not said
    a word after PATIENCE looks, the card ends its work with an error (a trap)."""
    passed, looks = tl.load(passed_at), 0
    opened = tl.load(opened_at, volatile=True)
    while (opened <= passed) & (looks < _PATIENCE):
        opened = tl.load(opened_at, volatile=True)
        looks += 1
    if opened <= passed:
        trap()
    tl.store(passed_at, passed + 1)


@triton.jit  # type: ignore[untyped-decorator]
def fence() -> None:
    """What any thread of this program wrote before is seen everywhere before what any writes after."""
    tl.debug_barrier()
    nothing = tl.arange(0, 128)
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [nothing], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def trap() -> None:
    """The host's next wait raises, and whatever it asks of the card from then on."""
    nothing = tl.arange(0, 128)
    tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [nothing], dtype=tl.int32, is_pure=False, pack=1)
