"""The second half of a layer: two products with a gate between them. Knows rows; must not know ranks or sizes.

Shapes: T rows, D hidden, C channels of this shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.linear import Linear
    from tpspec.model.steps import Steps

GAIN, MOST = 1.702, 7.0  # of a clamped gate: of what goes into its sigmoid, and of what comes in; see rows.inc


class Mlp(Protocol):
    def __call__(self, x_TD: Tensor, steps: Steps) -> Tensor:
        """[T, D] -> this shard's part of the sum, [T, D]."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """gate_up: [D] -> [2C], or [C] of one without a gate; down: [C] -> [D], a partial sum. numbers: of what stands
    between them, see `Steps.gate`."""

    gate_up: Linear
    down: Linear
    numbers: tuple[float, ...] = ()

    def __call__(self, x_TD: Tensor, steps: Steps) -> Tensor:
        return self.down(steps.gated(self.gate_up, x_TD, self.numbers))
