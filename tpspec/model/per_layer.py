"""Numbers that a token has for each layer beside its embedding, and what a layer makes of its own.

Per-layer embeddings, as Google calls them, of Gemma 4's small models. All that is whole on every rank, and costs no
collective. Knows rows; must not know ids, nor where the table is.

Shapes: T rows, D hidden, L layers, P numbers of a token for one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.staged import copied

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm
    from tpspec.model.steps import Steps


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """product: [D] -> [L P], of embeddings. norm: of each layer's numbers of that."""

    product: Linear
    norm: Norm
    hidden: int
    num_layers: int

    def split(self, x_TX: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tables, [T, D + L P] -> embeddings [T, D], and what layers get, [L, T, P]."""
        x_TD, shape = copied(x_TX[:, : self.hidden]), (len(x_TX), self.num_layers, -1)
        told_TLP, own_TLP = (self.product(x_TD) * self.hidden**-0.5).view(shape), x_TX[:, self.hidden :].view(shape)
        return x_TD, ((self.norm(told_TLP) + own_TLP) * 2**-0.5).transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Of one layer. gate: [D] -> [P]; out: [P] -> [D]; norm: of what it gives, before that is added."""

    gate: Linear
    out: Linear
    norm: Norm

    def __call__(self, x_TD: Tensor, inputs_TP: Tensor, steps: Steps) -> Tensor:
        """What is added to the rows, not yet normed: [T, D]."""
        return self.out(steps.gate(torch.cat([self.gate(x_TD), inputs_TP], 1)))
