"""Words between a card and its host, by plain stores into the host's memory: each sees what the other has said without
asking CUDA, which takes several times as long. In Triton, imported on cards only.

What was launched behind a `Gate` begins 7 us after the host has opened it, where a replay that is launched only then
begins after 48 (an H200, a replay of some 300 kernels); and a copy and its event are seen 20 to 40 us after what was in
front of them. Annotations are Triton's.
"""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton import knobs

from tpspec.comm.peer_kernel import PATIENCE, fence, trap
from tpspec.staged import Fetched

if TYPE_CHECKING:
    from torch import Tensor

MOST_WORDS = 1024  # that are told so
LOOKS = 4096  # after which the host asks whether the card has failed

_PATIENCE = tl.constexpr(PATIENCE)


class Gate:
    """Of one card. What is launched behind the n-th `wait` begins when `open` has been called n times."""

    def __init__(self, device: torch.device) -> None:
        self._here = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._opened = self._here.numpy()
        self._passed = torch.zeros(1, dtype=torch.int64, device=device)

    def wait(self) -> None:
        """Of the card. Until `open` nothing may be asked of it that the host then waits for."""
        wait_for[(1,)](self._here, self._passed, num_warps=1)

    def open(self) -> None:
        """What the host has written before, the card sees."""
        self._opened[0] += 1


class Mailbox:
    """Where a card tells its host some words, again and again, each time before it is asked for the next."""

    def __init__(self) -> None:
        self._here = torch.zeros(MOST_WORDS + 1, dtype=torch.int32, pin_memory=True)
        self._number, self._words = self._here.numpy()[:1], self._here.numpy()[1:]
        self._told = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._shape, self._asked = torch.Size(), 0

    def fetch(self, words: Tensor) -> Mailbox | Fetched:
        """int32 of the card, on their way; all that is launched later waits for that."""
        if words.numel() > MOST_WORDS:
            return Fetched(words)
        self._shape, self._asked = words.shape, self._asked % (1 << 30) + 1
        wide = triton.next_power_of_2(words.numel())
        tell[(1,)](words, self._here, words.numel(), self._asked, wide=wide, on_card=not knobs.runtime.interpret)
        self._told.record()
        return self

    def here(self) -> Tensor:
        """Waits until they have come."""
        number, asked, looks = self._number, self._asked, 0
        while number[0] != asked:
            sleep(0)  # other threads go on
            looks += 1
            if looks % LOOKS == 0:
                self._told.query()  # type: ignore[no-untyped-call]  # raises what has become of the card
        return torch.from_numpy(self._words[: self._shape.numel()].copy()).view(self._shape)


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


@triton.jit(do_not_specialize=["count", "number"])  # type: ignore[untyped-decorator]
def tell(
    words_at: tl.tensor, to: tl.tensor, count: int, number: int, wide: tl.constexpr, on_card: tl.constexpr
) -> None:
    """Words [count] go behind the first of `to`, which then becomes their number."""
    at = tl.arange(0, wide)
    words = tl.load(words_at + at, mask=at < count)
    tl.store(to + 1 + at, words, mask=at < count)
    if on_card:
        fence()
    tl.store(to, number)
