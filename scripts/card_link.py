"""One card of a box that has more: what the others would add to a sum is nothing, and takes the link's time, for which
the card waits as it does for them: in its queue, by a kernel of one program, which leaves the card to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.comm.communicator import OneRank
from tpspec.comm.emulate import MonotonicClock

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tpspec.comm.communicator import Purpose
    from tpspec.topology.links import LinkTable


class CardOnALink(OneRank):
    """A group of one in whose collectives time passes."""

    def __init__(self, link: LinkTable) -> None:
        self._link, self._clock = link, MonotonicClock()

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        self._wait(self._link.seconds(x.nbytes), x.device)
        return super().all_reduce(x, purpose)

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        self._wait(self._link.gather_seconds(x.nbytes), x.device)
        return super().all_gather(x, purpose)

    def _wait(self, link_s: float, device: torch.device) -> None:
        seconds = link_s + self._link.skew_s
        if device.type == "cuda":
            from card_lingers import linger

            linger[(1,)](round(1e9 * seconds), num_warps=1)
        else:
            self._clock.wait_until(self._clock.now() + seconds)
