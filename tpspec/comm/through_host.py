"""Collectives of ranks on cards through the host's memory, for cards that several ranks share, or that cannot reach
each other. The host waits for the card before each one, so that they cannot be recorded (model/graphs.py).

Knows tensors; must not know what joins the ranks on the host, nor what a collective is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.comm.communicator import InTurn

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.comm.communicator import Communicator, Purpose


class ThroughHost(InTurn):
    """A communicator of tensors on a device, over one of tensors on the host."""

    is_queued = False

    def __init__(self, host: Communicator) -> None:
        self.rank, self.size = host.rank, host.size
        self._host = host

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        """The sum, in x's memory."""
        return x.copy_(self._host.all_reduce(x.cpu(), purpose))

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        return self._host.all_gather(x.cpu(), purpose).to(x.device)
