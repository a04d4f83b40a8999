"""Rotary position embedding (Su et al. 2104.09864), halves layout as in Hugging Face checkpoints.

The frequencies are transformers'; this file only turns vectors. Shapes: T rows, H heads, E head dim, P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.architectures import Frequencies


class Rope:
    """Cosines and signed sines of every position, in the model's dtype as transformers rounds them."""

    def __init__(self, frequencies: Frequencies, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies.inverse)
        scale = torch.where(frequencies.inverse > 0, frequencies.scale, 1.0)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.cos_PE = torch.cat([cos, cos], -1).to(device, dtype)
        self.sin_PE = torch.cat([-sin, sin], -1).to(device, dtype)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, 1, E]."""
        return self.cos_PE[positions_T].unsqueeze(1), self.sin_PE[positions_T].unsqueeze(1)


def turn(x_THE: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    cos_T1E, sin_T1E = turns
    return torch.addcmul(x_THE * cos_T1E, x_THE.roll(x_THE.shape[-1] // 2, -1), sin_T1E)
