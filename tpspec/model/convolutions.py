"""Builds the short convolutions of a shard's layers from a checkpoint.

Which slices of which matrices these are is topology/mixing.py's matter, how they are read matrices.py's. Must not
know the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.cache.states import StateSizes, StateStore
from tpspec.model.short_conv import GatedConv
from tpspec.published.places import all_of
from tpspec.published.short_conv import MODULE
from tpspec.topology import mixing
from tpspec.topology.caches import KEPT_LEFT, NUM_LEFT

if TYPE_CHECKING:
    from tpspec.model.matrices import Matrices
    from tpspec.published.short_conv import ShortConv
    from tpspec.topology.shards import Shard


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Of one shard of one checkpoint. hidden: numbers of a row between layers."""

    net: ShortConv
    shard: Shard
    matrices: Matrices
    hidden: int

    def store(self, num_states: int, num_kept: int = 0) -> StateStore:
        """For so many texts and beginnings, empty."""
        sizes = StateSizes(0, 0, 0, len(self.shard.conv_channels), self.net.kernel - 1)
        return StateStore(
            self.net.layers, sizes, num_states, NUM_LEFT, self.matrices.dtype, self.matrices.device,
            num_kept=num_kept, kept_left=KEPT_LEFT,
        )  # fmt: skip

    def mixer(self, layer: str) -> GatedConv:
        """layer: what the names of its modules begin with."""
        net, matrices, own, at = self.net, self.matrices, self.shard.conv_channels, f"{layer}{MODULE}."
        size, name = net.channels, f"{at}conv"
        matrices.check_biases(all_of(name, size, self.hidden, biased=net.biased))
        made, out = map(matrices.product, mixing.convolution(self.hidden, net, self.shard, at))
        return GatedConv(
            made=made,
            out=out,
            kernel=matrices.wide(f"{name}.weight", (size, 1, net.kernel), own).squeeze(1).T.contiguous(),
            biases_M=matrices.wide(f"{name}.bias", (size,), own) if net.biased else None,
        )
