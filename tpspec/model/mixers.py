"""Builds the mixers of a shard's layers with linear attention from a checkpoint: which slices of which matrices.

How these are read is matrices.py's matter. Must not know the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpspec.cache.states import StateSizes, StateStore
from tpspec.errors import UserError
from tpspec.model.delta_net import Mixer
from tpspec.model.late_norm import LateNorm
from tpspec.model.linear import Chained, Stacked
from tpspec.model.norm import Norm
from tpspec.model.places import Place, numbers_of, rows_of, whole_place
from tpspec.model.product_scales import NO_SCALES
from tpspec.topology.caches import KEPT_LEFT, NUM_LEFT

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.linear import Linear
    from tpspec.model.matrices import Matrices
    from tpspec.model.product_scales import Scales
    from tpspec.published.delta_net import DeltaNet
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
        net, matrices = self.net, self.matrices
        at, hidden = f"{layer}{net.module}.", range(self.hidden)
        heads, keys = self.shard.delta_values, self.shard.delta_keys
        of_values, num_values = numbers_of(heads, net.value_dim), net.value_heads * net.value_dim
        mixed, gate, rates = self._in_groups(at) if net.is_in_groups else self._in_turn(at)
        convolved, biases_M = self._convolution(at)
        out = Place(at + net.out, len(hidden), num_values, hidden, of_values, scale=self.scales.made)
        return Mixer(
            mixed=matrices.column_parallel(mixed, biased=False),
            rates=self._rates(at, rates),
            gate=self._made(matrices, [gate], at, net.reduced and net.reduced[1]),
            out=matrices.row_parallel(out, biased=False),
            kernel=convolved,
            key_of=torch.tensor([head // net.group - keys.start for head in heads], device=matrices.device),
            num_keys=len(keys),
            key_dim=net.key_dim,
            decays_H=self._decays(at + "A_log"),
            biases_F=matrices.wide(at + "dt_bias", (net.value_heads * net.num_decays,), self._of_decays),
            norm=self._norm(at, of_values),
            skips_H=matrices.wide(at + "D", (net.value_heads,), heads) if net.sums else None,
            conv_biases_M=biases_M,
            late=self._late,
            most_written=net.most_written,
        )

    def _norm(self, at: str, of_values: range) -> Norm | None:
        net = self.net
        if net.norm is None:
            return None
        rows = of_values if net.sums else None
        return Norm(self.matrices.wide(f"{at}{net.norm}.weight", (net.num_normed,), rows), net.eps or self.eps)

    def _rates(self, at: str, rates: list[Place]) -> Linear:
        """They are a few rows, and what is held in codes forgets too much through them."""
        plain, reduced = replace(self.matrices, quantize=None), self.net.reduced
        if reduced is None:
            return plain.column_parallel(rates, biased=False)
        writes, decays = rates
        return Stacked([plain.column_parallel([writes], biased=False), self._made(plain, [decays], at, reduced[0])])

    def _made(self, matrices: Matrices, places: list[Place], at: str, reduced: str | None) -> Linear:
        """reduced: what makes, on every rank, the numbers that they are made of; None: of the hidden state."""
        if reduced is None:
            return matrices.column_parallel(places, biased=False)
        size = self.net.key_dim
        first = matrices.column_parallel([whole_place(at + reduced, size, self.hidden)], biased=False)
        places = [replace(place, num_inputs=size, columns=range(size)) for place in places]
        return Chained(first, matrices.column_parallel(places, biased=False))

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

    def _here(self) -> tuple[range, range, range]:
        """Numbers of this shard's queries, keys and values, of those of all heads."""
        net, shard = self.net, self.shard
        keys, values = numbers_of(shard.delta_keys, net.key_dim), numbers_of(shard.delta_values, net.value_dim)
        return keys, keys, values

    def _seen(self) -> list[range]:
        """The same, of all that the convolution sees."""
        net = self.net
        num_keys, num_values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
        firsts = (num_values + num_keys, num_values, 0) if net.sums else (0, num_keys, 2 * num_keys)
        parts = zip(firsts, self._here(), strict=True)
        return [range(first + of.start, first + of.stop) for first, of in parts]

    def _convolution(self, at: str) -> tuple[Tensor, Tensor | None]:
        net, matrices, name = self.net, self.matrices, at + CONVOLUTION
        if f"{name}.weight" not in matrices.checkpoint and len(net.mixed) > 1:
            return self._three_convolutions(at), None
        matrices.check_biases([rows_of(name, range(net.num_mixed), net.num_mixed, self.hidden)], biased=net.biased)
        kernel_X1K = [matrices.wide(f"{name}.weight", (net.num_mixed, 1, net.kernel), part) for part in self._seen()]
        kernel = torch.cat(kernel_X1K).squeeze(1).T.contiguous()
        if not net.biased:
            return kernel, None
        return kernel, torch.cat([matrices.wide(f"{name}.bias", (net.num_mixed,), part) for part in self._seen()])

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
        self.matrices.check_biases(
            [rows_of(name, range(size), size, self.hidden) for name, size in zip(names, sizes, strict=True)],
            biased=False,
        )
        kernel_X1K = torch.cat([
            self.matrices.wide(f"{name}.weight", (size, 1, net.kernel)) for name, size in zip(names, sizes, strict=True)
        ])  # fmt: skip
        here = torch.cat([torch.arange(part.start, part.stop) for part in self._seen()])
        return kernel_X1K[here.to(kernel_X1K.device)].squeeze(1).T.contiguous()

    def _in_turn(self, at: str) -> tuple[list[Place], Place, list[Place]]:
        """What the convolution sees, the gate and the rates; where those are one matrix, the gate's rows are the first,
        and the last are of one rate."""
        net, heads = self.net, self.shard.delta_values
        of_values, num_values = numbers_of(heads, net.value_dim), net.value_heads * net.value_dim
        size = num_values + net.num_mixed + net.value_heads
        of_gate, of_x, of_keys, of_queries, of_rates = self.scales.mixed

        def some(name: str, rows: range, first: int, alone: int, scale: float = 1.0) -> Place:
            """first: of them in a matrix that is all; alone: rows of one that is not."""
            if not net.sums:
                return rows_of(at + name, rows, alone, self.hidden)
            rows = range(first + rows.start, first + rows.stop)
            return replace(rows_of(at + name, rows, size, self.hidden), scale=scale)

        if len(net.mixed) > 1:
            sizes = (num_keys := net.key_heads * net.key_dim), num_keys, num_values
            each = zip(net.mixed, self._here(), sizes, strict=True)
            mixed = [some(name, part, 0, size) for name, part, size in each]
        else:
            seen = zip(self._seen(), (of_queries, of_keys, of_x), strict=True)
            mixed = [some(net.mixed[0], part, num_values, net.num_mixed, scale) for part, scale in seen]
        first = num_values + net.num_mixed
        decays = some(net.decays, self._of_decays, first, net.value_heads * net.num_decays, of_rates)
        rates = [some(net.writes, heads, first, net.value_heads, of_rates), decays]
        return mixed, some(net.gate, of_values, 0, num_values, of_gate), rates

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
            place = rows_of(at + name, numbers_of(keys, size), net.key_heads * size, self.hidden)
            return replace(place, picked=tuple(rows))

        mixed = picked(net.mixed[0], size, of_keys(0) + of_keys(K) + of_values(2 * K, size, V))
        rates = of_values(0, 2 * group, 1) + of_values(group, 2 * group, 1)
        gate = picked(net.gate, size, of_values(2 * K + group * V, size, V))
        return [mixed], gate, [picked(net.writes, 2 * group, rates)]
