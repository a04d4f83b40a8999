"""A mixture of experts in place of an MLP: what those to which a router sends a row make of it is added up.

Every shard has its channels of every expert. card/experts.py does the same on a card. Must not know ranks or names, nor
how experts are chosen.

Shapes: T rows, D hidden, K experts for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpspec.model.curves import sigmoid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tpspec.model.linear import Linear
    from tpspec.model.mlp import Mlp
    from tpspec.model.router import Router
    from tpspec.model.steps import Steps


@dataclass(frozen=True, slots=True)
class Multiplied:
    """Each number of a row by one of its own."""

    own_D: Tensor

    def __call__(self, x_TI: Tensor) -> Tensor:
        return x_TI * self.own_D


class Around(NamedTuple):
    """What makes of rows what experts, and not the router, read; and of what these give together, a partial sum, one of
    rows again, or None."""

    before: Linear
    behind: Linear | None


class Mixture:
    """whole: every expert that has a row gets all of them, so that a row's bits do not depend on where others are sent
    (deterministic); else the rows that are its own."""

    def __init__(self, router: Router, experts: Sequence[Mlp], *, whole: bool, around: Around | None = None) -> None:
        self.router, self.experts, self._whole, self._around = router, experts, whole, around

    def __call__(self, x_TD: Tensor, steps: Steps) -> Tensor:
        chosen_TK, weights_TK = self.router(x_TD, whole=self._whole)
        x_TD = x_TD if self._around is None else self._around.before(x_TD)
        weights_P, sums_TD = weights_TK.flatten(), x_TD.new_zeros(x_TD.shape, dtype=torch.float32)
        for expert, pairs in _by_expert(chosen_TK):
            rows, weights_R1 = pairs // chosen_TK.shape[1], weights_P[pairs, None]
            sums_TD.index_add_(0, rows, self._weighed(self.experts[expert], x_TD, rows, weights_R1, steps))
        return behind(self._around, sums_TD.to(x_TD.dtype))

    def _weighed(self, mlp: Mlp, x_TD: Tensor, rows: Tensor, weights_R1: Tensor, steps: Steps) -> Tensor:
        """What an expert makes of some rows, or of what these come to by their weights; [R, D] in float32."""
        if not self.router.experts.on_inputs:
            made_RD = mlp(x_TD, steps)[rows] if self._whole else mlp(x_TD[rows], steps)
            return made_RD.float() * weights_R1
        read_RD = (x_TD[rows] * weights_R1).to(x_TD.dtype)
        made_RD = mlp(x_TD.index_copy(0, rows, read_RD), steps)[rows] if self._whole else mlp(read_RD, steps)
        return made_RD.float()


def behind(around: Around | None, sums_TD: Tensor) -> Tensor:
    return sums_TD if around is None or around.behind is None else around.behind(sums_TD)


class Shared:
    """A mixture, and beside it an MLP that every row goes through. gate_1D: of what that gives, float32; or None.
    scale: of it, behind that gate."""

    def __init__(self, mixture: Mlp, shared: Mlp, gate_1D: Tensor | None = None, scale: float = 1.0) -> None:
        self.mixture, self.shared, self.gate_1D, self.scale = mixture, shared, gate_1D, scale

    def __call__(self, x_TD: Tensor, steps: Steps) -> Tensor:
        made_TD = self.shared(x_TD, steps)
        if self.gate_1D is not None:
            made_TD = made_TD * sigmoid((x_TD.float() * self.gate_1D).sum(1, keepdim=True)).to(x_TD.dtype)
        return torch.add(self.mixture(x_TD, steps), made_TD, alpha=self.scale)


class Apart:
    """An MLP that every row goes through, and a mixture, each of whose sums over ranks has a norm of its own: the parts
    of this shard stand one behind the other, [2 T, D]. own_D: what rows are multiplied by before the MLP reads them."""

    def __init__(self, shared: Mlp, mixture: Mlp, own_D: Tensor) -> None:
        self.shared, self.mixture, self.own_D = shared, mixture, own_D

    def __call__(self, x_TD: Tensor, steps: Steps) -> Tensor:
        made_TD = self.shared(x_TD * self.own_D, steps)
        return torch.cat([made_TD, self.mixture(x_TD, steps)])


def _by_expert(chosen_TK: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each expert that has rows, and its places in the flattened T * K, ascending."""
    chosen_P = chosen_TK.flatten()
    places = torch.split(chosen_P.argsort(stable=True), chosen_P.bincount().tolist())
    return ((expert, pairs) for expert, pairs in enumerate(places) if len(pairs))
