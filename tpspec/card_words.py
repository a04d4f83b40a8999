"""Words between a card and its host, by plain stores into the host's memory: each sees what the other has said without
asking CUDA, which takes several times as long. In Triton, imported on cards only.

What was launched behind a `Gate` begins 7 us after the host has opened it, where a replay that is launched only then
begins after 48 (an H200, a replay of some 300 kernels); and a copy and its event are seen 20 to 40 us after what was in
front of them. Annotations are Triton's.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = (1 << 31) - 16  # looks at a word, some minutes
MOST_WORDS = 1024  # that are told so
LOOKS = 1 << 17  # some 10 ms, after which the host asks whether the card has failed

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
    """Where a card tells a thread of its host some words, each time before it is asked for the next."""

    def __init__(self) -> None:
        self.here = torch.zeros(MOST_WORDS + 1, dtype=torch.int32, pin_memory=True)
        self.words = self.here.numpy().data
        self.told = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.number = 0

    def fetch(self, words: Tensor) -> Letter:
        """int32 of the card, at most MOST_WORDS, on their way: what is launched later waits for that."""
        self.number = self.number % (1 << 30) + 1
        wide, count = triton.next_power_of_2(words.numel()), words.numel()
        tell[(1,)](words, self.here, count, self.number, wide=wide, on_card=not knobs.runtime.interpret)
        self.told.record()
        return Letter(self, self.number, words.shape)


class Letter(NamedTuple):
    """Words that a card has been asked for."""

    mailbox: Mailbox
    number: int
    shape: torch.Size

    def here(self) -> Tensor:
        """Waits until they have come."""
        box, number, words, looks = self.mailbox, self.number, self.mailbox.words, 0
        assert number == box.number, "the next has been asked for before it was read"
        while words[0] != number:  # as CUDA waits: who sleeps in between, if for no time at all, is 100 us late
            looks += 1
            if looks % LOOKS == 0:
                box.told.query()  # type: ignore[no-untyped-call]  # raises what has become of the card
        return box.here[1 : 1 + self.shape.numel()].clone().view(self.shape)


_of_threads = threading.local()


def mailbox(device: torch.device) -> Mailbox:
    """Of this thread, which reads what a card has told it before it asks again."""
    boxes: dict[torch.device, Mailbox] = _of_threads.__dict__.setdefault("boxes", {})
    if device not in boxes:
        boxes[device] = Mailbox()
    return boxes[device]


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
