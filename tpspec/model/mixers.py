"""Builds the mixers of a shard's layers with linear attention from a checkpoint.

Which slices of which matrices these are is topology/mixing.py's matter, how they are read matrices.py's. Must not
know the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.cache.states import StateSizes, StateStore
from tpspec.errors import UserError
from tpspec.model.delta_net import Mixer
from tpspec.model.late_norm import LateNorm
from tpspec.model.linear import Chained, Stacked
from tpspec.model.norm import Norm
from tpspec.model.product_scales import NO_SCALES
from tpspec.published.places import all_of, numbers_of
from tpspec.topology import mixing
from tpspec.topology.caches import KEPT_LEFT, NUM_LEFT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.model.linear import Linear
    from tpspec.model.matrices import Matrices
    from tpspec.model.product_scales import Scales
    from tpspec.published.delta_net import DeltaNet
    from tpspec.published.places import Fused
    from tpspec.topology.shards import Shard

CONVOLUTION = "conv1d"


@dataclass(frozen=True, slots=True)
class Mixers:
    """Of one shard of one checkpoint. hidden: numbers of a row between layers. eps: of its norms. scales: see there."""

    net: DeltaNet
    shard: Shard
    matrices: Matrices
    hidden: int
    eps: float
    scales: Scales = NO_SCALES

    def store(self, num_states: int, num_kept: int = 0) -> StateStore:
        """For so many texts and beginnings, empty."""
        net, heads, matrices = self.net, len(self.shard.delta_values), self.matrices
        row = net.row_of(len(self.shard.delta_keys), heads)
        sizes = StateSizes(heads, net.key_dim, net.value_dim, row, net.kernel - 1)
        return StateStore(
            net.layers, sizes, num_states, NUM_LEFT, matrices.dtype, matrices.device,
            num_kept=num_kept, kept_left=KEPT_LEFT,
        )  # fmt: skip

    def mixer(self, layer: str) -> Mixer:
        """layer: what the names of its modules begin with."""
        net, matrices, at = self.net, self.matrices, f"{layer}{self.net.module}."
        heads, keys = self.shard.delta_values, self.shard.delta_keys
        mixed, gate, rates, out = mixing.linear(self.hidden, net, self.shard, at)
        of_gate, of_values, of_keys, of_queries, of_rates = self.scales.mixed
        convolved, biases_M = self._convolution(at)
        return Mixer(
            mixed=matrices.product(mixed.scaled(of_queries, of_keys, of_values)),
            rates=self._rates([[one.scaled(of_rates, of_rates) for one in rate] for rate in rates]),
            gate=self._chained([one.scaled(of_gate) for one in gate]),
            out=matrices.product(out.scaled(self.scales.made)),
            kernel=convolved,
            key_of=torch.tensor([head // net.group - keys.start for head in heads], device=matrices.device),
            num_keys=len(keys),
            key_dim=net.key_dim,
            decays_H=self._decays(at + "A_log"),
            biases_F=matrices.wide(at + "dt_bias", (net.value_heads * net.num_decays,), self._of_decays),
            norm=self._norm(at),
            skips_H=matrices.wide(at + "D", (net.value_heads,), heads) if net.sums else None,
            conv_biases_M=biases_M,
            late=self._late,
            most_written=net.most_written,
        )

    def _norm(self, at: str) -> Norm | None:
        net = self.net
        if net.norm is None:
            return None
        rows = numbers_of(self.shard.delta_values, net.value_dim) if net.sums else None
        return Norm(self.matrices.wide(f"{at}{net.norm}.weight", (net.num_normed,), rows), net.eps or self.eps)

    def _rates(self, rates: list[list[Fused]]) -> Linear:
        first, *more = map(self._chained, rates)
        return Stacked([first, *more]) if more else first

    def _chained(self, products: Sequence[Fused]) -> Linear:
        """One, or two, of which the second reads what the first gives."""
        first, *then = map(self.matrices.product, products)
        return Chained(first, *then) if then else first

    def _decays(self, name: str) -> Tensor:
        """How fast each head forgets."""
        heads, size, matrices = self.shard.delta_values, self.net.value_heads, self.matrices
        lying = (1, 1, size, 1)  # as Kimi Linear has it
        stored = lying if matrices.checkpoint.has(name, lying) else (size,)
        return matrices.wide(name, stored).flatten()[heads.start : heads.stop].exp()

    @property
    def _of_decays(self) -> range:
        """Of all heads' decays, those of this shard's."""
        return numbers_of(self.shard.delta_values, self.net.num_decays)

    @property
    def _late(self) -> LateNorm | None:
        """Of heads that are not all here."""
        net = self.net
        is_whole = len(self.shard.delta_values) == net.value_heads
        return LateNorm(net.num_normed, self.eps) if net.shares_norm and not is_whole else None

    def _convolution(self, at: str) -> tuple[Tensor, Tensor | None]:
        net, matrices, name = self.net, self.matrices, at + CONVOLUTION
        if f"{name}.weight" not in matrices.checkpoint and len(net.mixed) > 1:
            return self._three_convolutions(at), None
        matrices.check_biases(all_of(name, net.num_mixed, self.hidden, biased=net.biased))
        seen = mixing.seen(net, self.shard)
        kernel_X1K = [matrices.wide(f"{name}.weight", (net.num_mixed, 1, net.kernel), part) for part in seen]
        kernel = torch.cat(kernel_X1K).squeeze(1).T.contiguous()
        if not net.biased:
            return kernel, None
        return kernel, torch.cat([matrices.wide(f"{name}.bias", (net.num_mixed,), part) for part in seen])

    def _three_convolutions(self, at: str) -> Tensor:
        """Where three tensors are one convolution, of queries, keys and values as they were published, or of a third of
        them each, as transformers writes them."""
        net, checkpoint = self.net, self.matrices.checkpoint
        names = [f"{at}{letter}_{CONVOLUTION}" for letter in "qkv"]
        sizes = [checkpoint.shape(f"{name}.weight")[0] for name in names]
        if sum(sizes) != net.num_mixed:
            raise UserError(
                f"{checkpoint.folder}: {', '.join(names)} have {sum(sizes)} rows; should have {net.num_mixed} together"
            )
        for name, size in zip(names, sizes, strict=True):
            self.matrices.check_biases(all_of(name, size, self.hidden))
        kernel_X1K = torch.cat([
            self.matrices.wide(f"{name}.weight", (size, 1, net.kernel)) for name, size in zip(names, sizes, strict=True)
        ])  # fmt: skip
        here = torch.cat([torch.arange(part.start, part.stop) for part in mixing.seen(net, self.shard)])
        return kernel_X1K[here.to(kernel_X1K.device)].squeeze(1).T.contiguous()
