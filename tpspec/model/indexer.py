"""What chooses the tokens that rows attend to (DeepSeek-V3.2, arXiv 2512.02556, 2.1): in a layer, and those behind it.

A token's score for a row is a sum over the index's heads: of what is above 0 of the product of the row's query and the
token's key, times a weight that the row has for the head. A row attends to the `chosen` tokens with the highest scores
among those that it sees, itself one of them; of two with the same score, to the one before the other in the text, on
every rank and whichever rows are beside it. Keys are cached as those of attention are; scores are float32.

DeepSeek's own code turns queries and keys by a Hadamard matrix, and then rounds both to 8 bits. The first changes no
product, and the second is done here where a cache is held in 8 bits alone. Must not know attention, spans or ranks.

Shapes: T rows, D hidden, Q numbers that queries are made of, N heads of an index, I numbers of each, S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm
    from tpspec.model.rope import Turns

KEY_EPS = 1e-6  # of the norm of keys, whatever the config says of others; as transformers


class Read(NamedTuple):
    """What an index is made of, as attention has it: rows, what their queries are made of, and keys as they come."""

    x_TD: Tensor
    reduced_TQ: Tensor
    key_TI: Tensor


class Asked(NamedTuple):
    """By rows, of an index: queries, and what each head counts, in float32."""

    q_TNI: Tensor
    weights_TN: Tensor


@dataclass(frozen=True, slots=True)
class Indexer:
    """queries: [Q] -> [N I]. norm: of keys, that takes their mean off. weights: of heads, float32, and what scores are
    scaled by besides. rope: which of the model's. chosen: tokens that a row attends to at most."""

    queries: Linear
    norm: Norm
    weights_ND: Tensor
    rope: int
    chosen: int

    @property
    def dim(self) -> int:
        return len(self.norm.weight)

    def keys(self, key_TI: Tensor, turns: Turns) -> Tensor:
        """As they are cached, [T, 1, I]."""
        return turns.turn(self.norm(key_TI).unsqueeze(1))

    def asked(self, read: Read, turns: Turns) -> Asked:
        queries_TNI = self.queries(read.reduced_TQ).view(len(read.x_TD), -1, self.dim)
        return Asked(turns.turn(queries_TNI), F.linear(read.x_TD.float(), self.weights_ND))


def scores(q_NI: Tensor, weights_N: Tensor, key_IS: Tensor) -> Tensor:
    """[S] of one row, float32 as the keys are."""
    return weights_N @ torch.mm(q_NI.float(), key_IS).relu_()


def best(scores_S: Tensor, count: int) -> Tensor:
    """[count], the places of the highest, ascending. What is no number is above all: attention then tells of it."""
    scores_S = scores_S.nan_to_num(torch.inf, torch.inf, -torch.inf)
    least = scores_S.topk(count).values[-1]
    above_S, equal_S = scores_S > least, scores_S == least
    chosen_S = above_S | (equal_S & (equal_S.cumsum(0) <= count - above_S.sum()))
    return chosen_S.nonzero()[:, 0]
