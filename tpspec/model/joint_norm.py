"""A norm over the queries of all heads together, and one over the keys: heads that other ranks hold are among them.

Each rank sums the squares of its own numbers, and ranks add those up: a collective more in each layer, of eight bytes a
row. OLMo 2 (arXiv 2501.00656, 3.2) and MiniMax-M2 have such norms. Here in torch; card_joint.py does it on a card.

Shapes: T rows, X numbers that a layer's qkv gives here, N of them that are normed: queries, then keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.comm.communicator import Purpose

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.comm.communicator import Communicator
    from tpspec.model.steps import Steps


@dataclass(frozen=True, slots=True)
class JointNorm:
    """weight_N: float32. num_queries: of those N. own_keys: which of the others this rank counts; a head that several
    hold, one of them does. all_queries, all_keys: numbers on all ranks."""

    weight_N: Tensor
    eps: float
    num_queries: int
    own_keys: range
    all_queries: int
    all_keys: int

    def __call__(self, qkv_TX: Tensor, steps: Steps, comm: Communicator) -> Tensor:
        sums_T2 = comm.all_reduce(steps.squares(qkv_TX, self), Purpose.norm)
        return steps.jointly_normed(qkv_TX, sums_T2, self)

    def squares(self, qkv_TX: Tensor) -> Tensor:
        """As of Steps."""
        first = self.num_queries
        parts = qkv_TX[:, :first], qkv_TX[:, first + self.own_keys.start : first + self.own_keys.stop]
        return torch.stack([part.float().square().sum(1) for part in parts], 1)

    def normed(self, qkv_TX: Tensor, sums_T2: Tensor) -> Tensor:
        """As of Steps."""
        sizes = self.num_queries, len(self.weight_N) - self.num_queries
        means_T2 = sums_T2 / sums_T2.new_tensor([self.all_queries, self.all_keys])
        scales_TN = torch.rsqrt(means_T2 + self.eps).repeat_interleave(torch.tensor(sizes, device=sums_T2.device), 1)
        normed_TN = (qkv_TX[:, : len(self.weight_N)].float() * scales_TN * self.weight_N).to(qkv_TX.dtype)
        return torch.cat([normed_TN, qkv_TX[:, len(self.weight_N) :]], 1)
