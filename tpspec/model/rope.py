"""Rotary position embedding (Su et al. 2104.09864), halves layout as in Hugging Face checkpoints.

The frequencies are transformers'; this file only turns vectors. Shapes: T rows, H heads, E head dim, P positions.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.frequencies import Frequencies


class Rope:
    """Cosines and signed sines of every position, in the model's dtype as transformers rounds them.

    gains_P: what queries are multiplied by besides, float32; None: nothing.
    """

    def __init__(self, frequencies: Frequencies, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        inverse = frequencies.of_texts(num_positions)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
        scale = torch.where(inverse > 0, frequencies.scale, 1.0)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.cos_PE = torch.cat([cos, cos], -1).to(device, dtype)
        self.sin_PE = torch.cat([-sin, sin], -1).to(device, dtype)
        self.gains_P: Tensor | None = None
        if frequencies.growth is not None:
            growth = frequencies.growth
            whole = (torch.arange(num_positions) + growth.ahead) // growth.length
            self.gains_P = (1 + growth.rate * whole.float().log1p()).to(device)

    def one_later(self) -> Rope:
        """Which turns what stands at a position as this one what stands at the next; the last has none."""
        later = copy(self)
        later.cos_PE, later.sin_PE = self.cos_PE[1:], self.sin_PE[1:]
        later.gains_P = None if self.gains_P is None else self.gains_P[1:]
        return later

    def at(self, positions_T: Tensor) -> Turns:
        gains_T11 = None if self.gains_P is None else self.gains_P[positions_T, None, None]
        return Turns(self.cos_PE[positions_T].unsqueeze(1), self.sin_PE[positions_T].unsqueeze(1), gains_T11)


@dataclass(frozen=True, slots=True)
class Turns:
    """Of a round's rows. gains: see Rope."""

    cos_T1E: Tensor
    sin_T1E: Tensor
    gains_T11: Tensor | None

    def turn(self, x_THE: Tensor) -> Tensor:
        return torch.addcmul(x_THE * self.cos_T1E, x_THE.roll(x_THE.shape[-1] // 2, -1), self.sin_T1E)

    def grown(self, q_THE: Tensor) -> Tensor:
        return q_THE if self.gains_T11 is None else (q_THE * self.gains_T11).to(q_THE.dtype)
