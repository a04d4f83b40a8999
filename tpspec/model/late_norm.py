"""A norm over heads that several ranks hold, of which each has its part of a sum: it is made behind the sum.

For it multiplies a row by one number, which is as well done behind a product. So it costs no collective more: each rank
sums the squares of its own numbers, and tells them in columns beside the sum, which are its own, in two parts, for the
dtype of rows may have 8 bits. Mamba-2 of one group has such a norm, as Granite 4's. Here in torch; card/late.py does it
on a card. Must not know what is normed.

Shapes: T rows, D hidden, Y = D + 2 columns for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.topology.rounds import LATE_COLUMNS

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.comm.communicator import Communicator
    from tpspec.model.steps import Steps


@dataclass(frozen=True, slots=True)
class LateNorm:
    """numbers: of a row on all ranks, that are normed together."""

    numbers: int
    eps: float

    def partly(self, made_TD: Tensor, squares_T: Tensor, steps: Steps, comm: Communicator) -> Tensor:
        """What ranks sum, [T, Y]. squares: sums of those of this rank's numbers, float32."""
        return steps.beside(made_TD, squares_T, comm.rank, comm.size)

    def normed(self, total_TY: Tensor, dim: int) -> Tensor:
        """As of Steps."""
        squares_T1 = total_TY[:, dim:].float().sum(1, keepdim=True)
        return (total_TY[:, :dim].float() * torch.rsqrt(squares_T1 / self.numbers + self.eps)).to(total_TY.dtype)


def beside(made_TD: Tensor, squares_T: Tensor, rank: int, size: int) -> Tensor:
    """As of Steps."""
    told_TX = made_TD.new_zeros(len(made_TD), LATE_COLUMNS * size)
    first_T = squares_T.to(made_TD.dtype)
    told_TX[:, LATE_COLUMNS * rank] = first_T
    told_TX[:, LATE_COLUMNS * rank + 1] = (squares_T - first_T.float()).to(made_TD.dtype)
    return torch.cat([made_TD, told_TX], 1)
