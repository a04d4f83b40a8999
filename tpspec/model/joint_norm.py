"""A norm over the queries of all heads together, and one over the keys: heads that other ranks hold are among them.

Each rank sums the squares of its own numbers, and ranks add those up: a collective more in each layer, of eight bytes a
row. Or, in rounds of few rows, each makes the queries and keys of all heads, and waits for nobody: that is reading the
weights of the others, which takes less time than a slow bus does for the smallest message. OLMo 2 (arXiv 2501.00656,
3.2) and MiniMax-M2 have such norms. Here in torch; card/joint.py does it on a card.

Shapes: T rows, D hidden, X numbers that a product gives, N of a layer's qkv that are normed: queries, then keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpspec.comm.communicator import Purpose
from tpspec.topology.rounds import FEW_ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.comm.communicator import Communicator
    from tpspec.model.linear import Linear
    from tpspec.model.steps import Steps


class Columns(NamedTuple):
    """Of the numbers that a product gives: queries, which are the first, and keys."""

    num_queries: int
    keys: range

    def squares(self, made_TX: Tensor) -> Tensor:
        """As of Steps."""
        parts = made_TX[:, : self.num_queries], made_TX[:, self.keys.start : self.keys.stop]
        return torch.stack([part.float().square().sum(1) for part in parts], 1)


class Others(NamedTuple):
    """The heads that are not here: [T, D] -> their queries, then their keys; all of which count."""

    product: Linear
    columns: Columns


@dataclass(frozen=True, slots=True)
class JointNorm:
    """weight_N: float32. own: of qkv, what this rank counts; a key head that several hold, one of them does.
    all_queries, all_keys: numbers on all ranks. others: where ranks tell each other of many rows alone.
    """

    weight_N: Tensor
    eps: float
    own: Columns
    all_queries: int
    all_keys: int
    others: Others | None = None

    @property
    def num_queries(self) -> int:
        """Of those N."""
        return self.own.num_queries

    def __call__(self, x_TD: Tensor, qkv_TX: Tensor, steps: Steps, comm: Communicator) -> Tensor:
        if self.others is None or len(x_TD) > FEW_ROWS:
            sums_T2 = comm.all_reduce(steps.squares(qkv_TX, self.own), Purpose.norm)
        else:
            here = Columns(self.num_queries, range(self.num_queries, len(self.weight_N)))
            sums_T2 = steps.squares(qkv_TX, here)
            sums_T2 = steps.squares(self.others.product(x_TD), self.others.columns, sums_T2)
        return steps.jointly_normed(qkv_TX, sums_T2, self)

    def normed(self, qkv_TX: Tensor, sums_T2: Tensor) -> Tensor:
        """As of Steps."""
        sizes = self.num_queries, len(self.weight_N) - self.num_queries
        means_T2 = sums_T2 / sums_T2.new_tensor([self.all_queries, self.all_keys])
        scales_TN = torch.rsqrt(means_T2 + self.eps).repeat_interleave(torch.tensor(sizes, device=sums_T2.device), 1)
        normed_TN = (qkv_TX[:, : len(self.weight_N)].float() * scales_TN * self.weight_N).to(qkv_TX.dtype)
        return torch.cat([normed_TN, qkv_TX[:, len(self.weight_N) :]], 1)
