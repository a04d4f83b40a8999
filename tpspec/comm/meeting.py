"""What a kernel that sums over ranks, and goes on, is given of those that it meets. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Meeting:
    """Of a group whose memory every rank sees; a program sums a row. See peer_kernel.py.

    memories, epochs, lost: tensors on the card. leg: where the memory of such rows begins.
    """

    rank: int
    size: int
    memories: Tensor
    epochs: Tensor
    lost: Tensor
    leg: int
    most_looks: int
    on_card: bool
