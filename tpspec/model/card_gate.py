"""What keeps a card from work that it has been asked for, until the host has said what that is about. In Triton,
imported on cards only.

The host says it by a plain store into its own memory, which a program looks at: the card then begins 7 us later, where
a replay that is launched only then begins after 48 (an H200, a replay of some 300 kernels). Annotations are Triton's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpspec.comm.peer_kernel import PATIENCE, trap

_PATIENCE = tl.constexpr(PATIENCE)


class Gate:
    """Of one card. What is launched behind the n-th `wait` begins when `open` has been called n times."""

    def __init__(self, device: torch.device) -> None:
        here = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._here, self._opened = here, here.numpy()
        self._passed = torch.zeros(1, dtype=torch.int64, device=device)

    def wait(self) -> None:
        """Of the card. Until `open` nothing may be asked of it that the host then waits for."""
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
