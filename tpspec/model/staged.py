"""Numbers that the host makes and a card reads, always at the same place: copied without waiting for the card."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Staged:
    """`size` numbers on the host (pinned, for a card) and as many on the device."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self._here = torch.zeros(size, dtype=dtype, pin_memory=on_card)
        self.there = torch.zeros(size, dtype=dtype, device=device)
        self._copied = torch.cuda.Event() if on_card else None  # type: ignore[no-untyped-call]

    def room(self) -> Tensor:
        """Where to write what goes next; waits until what went last has left."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._here

    def send(self, size: int) -> None:
        """The first `size` numbers, after all that was asked of the device before."""
        self.there[:size].copy_(self._here[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
