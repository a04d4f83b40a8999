"""The norm of rows, and of heads each alone. Data, and what it is in torch; steps do the same in fewer passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over the last dimension; centred: LayerNorm, which alone may have a bias. weight, bias: float32, for some
    weights are 1 + w and would lose most of w."""

    weight: Tensor
    eps: float
    centred: bool = False
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        shape, numbers = self.weight.shape, x.float()
        if self.centred:
            return F.layer_norm(numbers, shape, self.weight, self.bias, self.eps).to(x.dtype)
        return F.rms_norm(numbers, shape, self.weight, self.eps).to(x.dtype)
