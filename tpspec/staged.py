"""Numbers that go from the host to a card, or back, while both go on with their work. Knows no other room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

MOST_UNPINNED = 1 << 16  # bytes that CUDA takes from memory that is not pinned before it does what it was asked before
MOST_PINNED = 1 << 24  # bytes of a copy that nobody waits for: what torch has once pinned it keeps
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number: numpy knows no bfloat16


def sent(numbers: Sequence[int] | Sequence[float] | Tensor, device: torch.device) -> Tensor:
    """Numbers on a device, a list as int64 or float32 (an empty one as int64). What `torch.tensor` makes there itself
    it waits for; of this, no more than what is beyond MOST_PINNED."""
    if not isinstance(numbers, torch.Tensor):
        numbers = torch.tensor(numbers) if numbers else torch.empty(0, dtype=torch.int64)
    goes = device.type == "cuda" and numbers.device.type == "cpu"
    if goes and MOST_UNPINNED < numbers.nbytes <= MOST_PINNED:
        numbers = torch.empty_like(numbers, pin_memory=True).copy_(numbers)
    return numbers.to(device, non_blocking=True)


def copied(x: Tensor, to: Tensor | None = None) -> Tensor:
    """By a kernel: on a card, one that overlaps with what is in front of it may stand behind this. to: where, if not in
    memory of its own."""
    return torch.mul(x, 1, out=to)


class Staged:
    """`size` numbers on the host (pinned, for a card) and as many on the device, always at the same places: the copy
    may be part of a recording."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self._here = torch.zeros(size, dtype=dtype, pin_memory=on_card)
        self._words = self._here.view(WORDS[dtype.itemsize]).numpy()
        self.there = torch.zeros(size, dtype=dtype, device=device)
        self._copied = torch.cuda.Event() if on_card else None  # type: ignore[no-untyped-call]
        self._has_left, self._is_marked = True, False

    def room(self) -> NDArray[Any]:
        """Where to write what goes next, as WORDS. Waits until what went last has left: by what `sent` was told, or
        until the device has done all that it was asked for; not at all where that is known."""
        if self._copied is not None and not self._has_left:
            if not self._is_marked:
                self._copied.record()
            self._copied.synchronize()
        self._has_left = self._is_marked = False
        return self._words

    def copy(self, start: int, stop: int) -> None:
        """Numbers [start, stop) as they are then, after all that was asked of the device before."""
        self.there[start:stop].copy_(self._here[start:stop], non_blocking=True)

    def sent(self) -> None:
        """What was written has left once the device has done what it was asked for so far."""
        self._is_marked = True
        if self._copied is not None:
            self._copied.record()

    def left(self) -> None:
        """What was written has left: who knows it need not ask CUDA, which takes its time."""
        self._has_left = True


class Fetched:
    """Numbers of a device on their way to the host. place: where they come to."""

    def __init__(self, x: Tensor) -> None:
        self.place = x.to("cpu", non_blocking=x.nbytes <= MOST_PINNED)  # from a card, if so, into pinned memory
        self._copied = torch.cuda.Event() if x.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def here(self) -> Tensor:
        """Waits until they have come."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.place
