"""Builds the MLPs of a shard's layers, or mixtures in their place, from a checkpoint.

Which slices of which matrices these are is topology/feeding.py's matter, how they are read matrices.py's. Must not
know the other half of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tpspec.errors import UserError
from tpspec.model.builder import Builder
from tpspec.model.experts import Apart, Around, Mixture, Multiplied, Shared
from tpspec.model.limits import Limits
from tpspec.model.mlp import GatedMlp
from tpspec.model.router import Router
from tpspec.published.places import all_of
from tpspec.topology import feeding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.model.mlp import Mlp
    from tpspec.published.experts import Experts
    from tpspec.published.mlp_names import MlpNames
    from tpspec.published.places import Fused

EXPERTS_NORM = "pre_feedforward_layernorm_2"  # where they have one of their own


@dataclass(frozen=True, slots=True)
class Mlps(Builder):
    """Of one shard of one checkpoint."""

    def of_layer(self, index: int, layer: str, *, whole: bool) -> Mlp:
        """layer: what the names of its modules begin with."""
        spec, shape, shard, experts = self.spec, self.shape, self.shard, self.shape.experts
        names = shape.mlp_names
        at = names.within(layer)
        if experts is None or index not in shape.mixtures:
            shares = index >= shape.num_keeping
            dense = self._gated(feeding.mlp(shape, shard, layer, shares=shares))
            return replace(dense, numbers=self._bends(at, names))
        if names.together is None:
            for module in {"mlp", names.module}:
                self._check_apart(layer, module)
        limits = spec.limits[index] if spec.limits else Limits()
        mixture = self._mixture(layer, names, experts, limits.experts, whole=whole)
        if not experts.shared:
            return mixture
        shared = self._gated(feeding.shared(shape, experts, shard, layer), limits.shared)
        if experts.apart:
            return Apart(shared, mixture, self._plain_norm(f"{at}{spec.shape.norms.mlp}.weight"))
        gate = f"{at}{names.shared_gate}.weight"
        gate_1D = self.matrices.wide(gate, (1, shape.hidden)) if experts.shared_gated else None
        return Shared(mixture, shared, gate_1D, experts.shared_scale)

    def _bends(self, at: str, names: MlpNames) -> tuple[float, ...]:
        """Of xielu: how much it bends above 0 and below, and its slope."""
        if names.bends is None:
            return ()
        above, below, slope = (self.matrices.number(at + name) for name in names.bends)
        return F.softplus(above).item(), (slope + F.softplus(below)).item(), slope.item()

    def _plain_norm(self, name: str) -> Tensor:
        """What rows that are normed without a weight are multiplied with."""
        return self.matrices.wide(name, (self.shape.hidden,)).to(self.matrices.dtype)

    def _around(self, at: str, experts: Experts) -> Around | None:
        if experts.apart:
            return Around(Multiplied(self._plain_norm(f"{at}{EXPERTS_NORM}.weight")), None)
        if not experts.latent:
            return None
        return Around(*map(self.matrices.product, feeding.around(self.shape, experts, at)))

    def _mixture(self, layer: str, names: MlpNames, experts: Experts, limit: tuple[float, ...], *, whole: bool) -> Mlp:
        router, on_card = self._router(layer, names, experts), self.matrices.device.type == "cuda"
        at = names.within(layer)
        parts = replace(self, matrices=replace(self.matrices, reference=on_card))
        stand = self._stand(at, names, experts.count)
        each = (self._expert(at, experts, index, stand) for index in range(experts.count))
        mlps = [parts._gated(fused, limit) for fused in each]
        around = self._around(at, experts)
        if not on_card:
            return Mixture(router, mlps, whole=whole, around=around)
        from tpspec.model.card.experts import CardMixture  # Triton comes with torch for cards only

        return CardMixture(router, mlps, around)

    def _expert(self, at: str, experts: Experts, index: int, stand: bool | None) -> list[Fused]:
        """stand: see _stand."""
        if stand is None:
            return feeding.expert(self.shape, experts, self.shard, f"{at}experts.{index}.")
        return feeding.stacked(self.shape, experts, self.shard, at, index, upright=stand)

    def _stand(self, at: str, names: MlpNames, count: int) -> bool | None:
        """Whether the matrices of experts that are one tensor have a row for each output, as its shape tells; None
        where each expert has its own."""
        hidden, size, checkpoint = self.shape.hidden, self.shape.intermediate, self.matrices.checkpoint
        if names.together is None or not (names.alternate or at + names.together[0] in checkpoint):
            return None
        if names.alternate:
            return names.upright
        *made, down = (at + name for name in names.together)
        for name in made:
            self.matrices.check_plain(name)
        if hidden == size or down not in checkpoint:
            return names.upright
        found, standing, lying = checkpoint.shape(down), (count, hidden, size), (count, size, hidden)
        return found == standing or (names.upright and found != lying)

    def _check_apart(self, layer: str, module: str) -> None:
        """transformers 5 computes with the experts of a layer in one piece, whatever they are called apart."""
        name, checkpoint = f"{layer}{module}.experts.gate_up_proj", self.matrices.checkpoint
        if name in checkpoint:
            raise UserError(
                f"{checkpoint.folder}: {name} holds all experts of a layer; should be a tensor for each, as "
                "transformers' save_pretrained writes with save_original_format, which is its default"
            )

    def _router(self, layer: str, names: MlpNames, experts: Experts) -> Router:
        name, correction = f"{names.within(layer)}{names.router}", f"{layer}{names.correction}"
        held = self.matrices.checkpoint.under(name)
        if held and "weight" not in held:
            kind = ", ".join(sorted(held - {correction.rpartition(".")[2]}))
            raise UserError(
                f"{self.matrices.checkpoint.folder}: router {name} is quantized ({kind}); should be a plain weight"
            )
        self.matrices.check_biases(all_of(name, experts.count, self.shape.hidden, biased=experts.biased))
        weight_ND = self.matrices.wide(f"{name}.weight", (experts.count, self.shape.hidden))
        if experts.apart:  # it reads what is normed without a weight, and has one of its own
            at = name.removesuffix("proj")
            own_D = self.matrices.wide(at + "scale", (self.shape.hidden,)) * self.shape.hidden**-0.5
            scales_N = self.matrices.wide(at + "per_expert_scale", (experts.count,))
            return Router(weight_ND * own_D, experts, scales_N=scales_N)
        if not (experts.corrected or experts.biased):
            return Router(weight_ND, experts)
        bias, size = correction if experts.corrected else f"{name}.bias", (experts.count,)
        if names.may_lack_correction and correction not in self.matrices.checkpoint:
            return Router(weight_ND, experts, torch.zeros(size, device=self.matrices.device))
        lying = (1, *size)  # as Ernie 4.5 has it
        stored = lying if self.matrices.checkpoint.has(bias, lying) else size
        return Router(weight_ND, experts, self.matrices.wide(bias, stored).view(size))

    def _gated(self, fused: Sequence[Fused], numbers: tuple[float, ...] = ()) -> GatedMlp:
        """Of gate and up, and of down. numbers: see GatedMlp."""
        (gate_up, down), scales = fused, self.spec.scales
        product = self.matrices.product
        return GatedMlp(product(gate_up.scaled(scales.gate)), product(down.scaled(scales.down)), numbers)
