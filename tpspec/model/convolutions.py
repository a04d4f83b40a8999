"""Builds the short convolutions of a shard's layers from a checkpoint: which slices of which matrices.

How these are read is matrices.py's matter. Must not know the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.cache.states import StateSizes, StateStore
from tpspec.model.places import Place, rows_of
from tpspec.model.short_conv import GatedConv
from tpspec.published.short_conv import IN, MODULE, OUT, PARTS
from tpspec.topology.caches import KEPT_LEFT, NUM_LEFT

if TYPE_CHECKING:
    from tpspec.model.matrices import Matrices
    from tpspec.published.short_conv import ShortConv


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Of one shard of one checkpoint. channels: the shard's. hidden: numbers of a row between layers."""

    net: ShortConv
    channels: range
    matrices: Matrices
    hidden: int

    def store(self, num_states: int, num_kept: int = 0) -> StateStore:
        """For so many texts and beginnings, empty."""
        sizes = StateSizes(0, 0, 0, len(self.channels), self.net.kernel - 1)
        return StateStore(
            self.net.layers, sizes, num_states, NUM_LEFT, self.matrices.dtype, self.matrices.device,
            num_kept=num_kept, kept_left=KEPT_LEFT,
        )  # fmt: skip

    def mixer(self, layer: str) -> GatedConv:
        """layer: what the names of its modules begin with."""
        net, matrices, own, at = self.net, self.matrices, self.channels, f"{layer}{MODULE}."
        size, hidden, name = net.channels, range(self.hidden), f"{at}conv"
        parts = [range(part * size + own.start, part * size + own.stop) for part in range(PARTS)]
        matrices.check_biases([rows_of(name, own, size, self.hidden)], biased=net.biased)
        kernel_M1K = matrices.wide(f"{name}.weight", (size, 1, net.kernel), own)
        return GatedConv(
            made=matrices.column_parallel(
                [rows_of(at + IN, part, PARTS * size, self.hidden) for part in parts], biased=net.biased
            ),
            out=matrices.row_parallel(Place(at + OUT, self.hidden, size, hidden, own), biased=net.biased),
            kernel=kernel_M1K.squeeze(1).T.contiguous(),
            biases_M=matrices.wide(f"{name}.bias", (size,), own) if net.biased else None,
        )
