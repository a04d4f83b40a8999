"""The gate of attention: what query heads give is multiplied with it, in place of 1. card/gates.py does it on a card.

Source: Qwen3-Next (gated attention, arXiv 2505.06708); by heads: Step 3.5; of softplus: Laguna. What the gate of an MLP
goes through is steps.py's matter. Must not know shards.

Shapes: T rows, D hidden, H query heads of this shard, E head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.model.curves import sigmoid, softplus

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.linear import Linear
    from tpspec.published.gating import Gating


@dataclass(frozen=True, slots=True)
class HeadGate:
    """product: [D] -> [H E], or [H] where one number is for a head."""

    product: Linear
    gating: Gating
    head_dim: int

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, H E], of what attention reads."""
        made = self.product(x_TD)
        if self.gating.by_head:
            made = made[..., None].expand(-1, -1, self.head_dim).flatten(1)
        return sigmoid(made) if self.gating.act == "sigmoid" else softplus(made)
