"""Builds the mixers of a shard's layers with linear attention from a checkpoint: which slices of which matrices.

How these are read is matrices.py's matter. Must not know the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpspec.cache.states import StateSizes, StateStore
from tpspec.model.delta_net import Mixer
from tpspec.model.layers import Norm
from tpspec.model.places import Place, numbers_of
from tpspec.topology.caches import KEPT_LEFT, NUM_LEFT
from tpspec.topology.delta_net import MODULE, OUT

if TYPE_CHECKING:
    from tpspec.model.matrices import Matrices
    from tpspec.topology.delta_net import DeltaNet
    from tpspec.topology.shards import Shard


@dataclass(frozen=True, slots=True)
class Mixers:
    """Of one shard of one checkpoint. hidden: numbers of a row between layers. eps: of its norms."""

    net: DeltaNet
    shard: Shard
    matrices: Matrices
    hidden: int
    eps: float

    def store(self, num_states: int, num_kept: int = 0) -> StateStore:
        """For so many texts and beginnings, empty."""
        net, heads, matrices = self.net, len(self.shard.delta_values), self.matrices
        row = net.mixed_of(len(self.shard.delta_keys), heads) + 2 * heads
        sizes = StateSizes(heads, net.key_dim, net.value_dim, row, net.kernel - 1)
        return StateStore(
            net.layers, sizes, num_states, NUM_LEFT, matrices.dtype, matrices.device,
            num_kept=num_kept, kept_left=KEPT_LEFT,
        )  # fmt: skip

    def mixer(self, layer: str) -> Mixer:
        """layer: what the names of its modules begin with. Rates are a few rows, and what is held in codes forgets too
        much through them."""
        at, net, matrices = f"{layer}{MODULE}.", self.net, self.matrices
        heads, keys, plain = self.shard.delta_values, self.shard.delta_keys, replace(self.matrices, quantize=None)
        of_keys, of_values = numbers_of(keys, net.key_dim), numbers_of(heads, net.value_dim)
        num_keys, num_values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
        parts = [range(first + of.start, first + of.stop) for first, of in
                 ((0, of_keys), (num_keys, of_keys), (2 * num_keys, of_values))]  # fmt: skip
        if net.is_in_groups:
            mixed, gate, rates = self._in_groups(at)
        else:
            mixed = [self._rows(at + net.mixed, part, net.num_mixed) for part in parts]
            gate = self._rows(at + net.gate, of_values, num_values)
            rates = [self._rows(at + name, heads, net.value_heads) for name in (net.writes, net.decays)]
        matrices.check_biases([self._rows(at + "conv1d", range(net.num_mixed), net.num_mixed)], biased=False)
        hidden = range(self.hidden)
        kernel_X1K = [matrices.read(f"{at}conv1d.weight", (net.num_mixed, 1, net.kernel), part) for part in parts]
        return Mixer(
            mixed=matrices.column_parallel(mixed, biased=False),
            rates=plain.column_parallel(rates, biased=False),
            gate=matrices.column_parallel([gate], biased=False),
            out=matrices.row_parallel(Place(at + OUT, len(hidden), num_values, hidden, of_values), biased=False),
            kernel=torch.cat(kernel_X1K).squeeze(1).T.contiguous().to(matrices.device, torch.float32),
            key_of=torch.tensor([head // net.group - keys.start for head in heads], device=matrices.device),
            num_keys=len(keys),
            key_dim=net.key_dim,
            decays_H=matrices.wide(at + "A_log", (net.value_heads,), heads).exp(),
            biases_H=matrices.wide(at + "dt_bias", (net.value_heads,), heads),
            norm=Norm(matrices.wide(at + "norm.weight", (net.value_dim,)), self.eps),
        )

    def _in_groups(self, at: str) -> tuple[list[Place], Place, list[Place]]:
        """What the convolution sees, the gate and the rates, of matrices whose rows are those of one key head after
        another: its query, its key, its value heads' values, then their gates; and their writes, then their decays."""
        net, heads, keys = self.net, self.shard.delta_values, self.shard.delta_keys
        K, V, group = net.key_dim, net.value_dim, net.group
        size = 2 * (K + group * V)  # rows of a key head

        def of_keys(first: int) -> list[int]:
            return [head * size + first + number for head in range(len(keys)) for number in range(K)]

        def of_values(first: int, size: int, each: int) -> list[int]:
            places = (divmod(head - keys.start * group, group) for head in heads)
            return [key * size + first + value * each + number for key, value in places for number in range(each)]

        def picked(name: str, size: int, rows: list[int]) -> Place:
            place = self._rows(at + name, numbers_of(keys, size), net.key_heads * size)
            return replace(place, picked=tuple(rows))

        mixed = picked(net.mixed, size, of_keys(0) + of_keys(K) + of_values(2 * K, size, V))
        rates = of_values(0, 2 * group, 1) + of_values(group, 2 * group, 1)
        gate = picked(net.gate, size, of_values(2 * K + group * V, size, V))
        return [mixed], gate, [picked(net.writes, 2 * group, rates)]

    def _rows(self, name: str, rows: range, size: int) -> Place:
        """Some of the `size` output rows of a matrix that reads the hidden state."""
        return Place(name, size, self.hidden, rows, range(self.hidden))
