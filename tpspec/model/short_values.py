"""Values of fewer numbers than keys have: attention and the cache know one size of a head, so that values are filled up
with zeros before, and what attention makes of those is left out behind. Both ends are a `Linear`. Must not know
attention or ranks.

Shapes: T rows, G kv heads, V numbers of a value, E of a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.linear import Linear


@dataclass(frozen=True, slots=True)
class Filled:
    """[T, D] -> [T, (H + 2 G) E]. made: [D] -> [(H + G) E + G V], queries, keys and values. scale: of values."""

    made: Linear
    num_values: int
    size: int
    key_size: int
    scale: float

    def __call__(self, x_TI: Tensor) -> Tensor:
        made_TX = self.made(x_TI)
        qk_TX, v_TX = made_TX.tensor_split([made_TX.shape[1] - self.num_values * self.size], 1)
        v_TGV = (v_TX * self.scale).view(len(x_TI), self.num_values, self.size)
        return torch.cat([qk_TX, F.pad(v_TGV, (0, self.key_size - self.size)).flatten(1)], 1)


@dataclass(frozen=True, slots=True)
class Cut:
    """[T, H E] -> [T, D], a partial sum. out: [H V] -> [D]."""

    out: Linear
    size: int
    key_size: int

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.out(x_TI.view(len(x_TI), -1, self.key_size)[..., : self.size].flatten(1))
