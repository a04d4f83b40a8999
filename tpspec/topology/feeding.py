"""The matrices of MLPs, of mixtures in their place, and of the head: as mixing.py has those of the rest of a layer.

Names and integers only, of shapes and shards; must not know bytes, tensors or files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tpspec.published.experts import BEFORE, BEHIND
from tpspec.published.groups import HEAD_BITS
from tpspec.published.places import Fused, all_of, below, rows_of, summed

if TYPE_CHECKING:
    from tpspec.published.experts import Experts
    from tpspec.published.mlp_names import MlpNames
    from tpspec.published.shape import ModelShape
    from tpspec.topology.shards import Shard


def mlp(shape: ModelShape, shard: Shard, layer: str, *, shares: bool = False) -> list[Fused]:
    """Of gate and up, and of down, in a layer without experts. layer: what the names of its modules begin with. shares:
    whether it keeps nothing of a token."""
    channels, size = shard.channels, shape.intermediate
    if shares and shape.sharing is not None:
        channels, size = shard.sharing_channels, shape.sharing.channels
    elif shape.experts is not None:
        channels, size = shard.dense, shape.experts.dense
    names = shape.mlp_names
    return _mlp(names.plain, names.without_experts(layer), channels, size, shape.hidden, biased=shape.mlp_bias)


def shared(shape: ModelShape, experts: Experts, shard: Shard, layer: str) -> list[Fused]:
    """The same of the MLP beside experts."""
    names = shape.mlp_names
    return _mlp(names.plain, f"{layer}{names.shared}.", shard.shared, experts.shared, shape.hidden)


def around(shape: ModelShape, experts: Experts, at: str) -> list[Fused]:
    """Before experts that read latents, and behind them: whole on every rank. at: before the names in a mixture."""
    return [all_of(at + BEFORE, experts.latent, shape.hidden), all_of(at + BEHIND, shape.hidden, experts.latent)]


def expert(shape: ModelShape, experts: Experts, shard: Shard, at: str) -> list[Fused]:
    """Of one with matrices of its own, with whose names these begin."""
    width, names = experts.latent or shape.hidden, shape.mlp_names
    return _mlp(names, at, shard.channels, shape.intermediate, width, biased=experts.biased)


def stacked(shape: ModelShape, experts: Experts, shard: Shard, at: str, index: int, *, upright: bool) -> list[Fused]:
    """Of the expert of that number, of tensors that hold all of a mixture's. at: before the names in that. upright: see
    Place."""
    names, channels, size, hidden = shape.mlp_names, shard.channels, shape.intermediate, shape.hidden
    assert names.together is not None, "they have such tensors"
    *read, down = (at + name for name in names.together)
    gate_up = below([rows_of(name, channels, size, hidden) for name in (read[0], read[-1])])
    if names.alternate:
        both = range(2 * channels.start, 2 * channels.stop)
        in_turn = range(0, len(both), 2), range(1, len(both), 2)
        gate_up = (replace(rows_of(read[0], both, 2 * size, hidden), picked=in_turn),)
    made = Fused(gate_up, experts.biased), summed(down, hidden, channels, size, biased=experts.biased)
    return [one.each(expert=(index, experts.count), upright=upright) for one in made]


def _mlp(names: MlpNames, at: str, channels: range, size: int, width: int, *, biased: bool = False) -> list[Fused]:
    """channels: of so many, those of a shard. width: numbers that it reads, and gives."""
    read = [at + name for name in (names.gate, names.up) if name is not None]
    gate_up = below([rows_of(name, channels, size, width) for name in read])
    return [Fused(gate_up, biased), summed(at + names.down, width, channels, size, biased=biased)]


def head(shape: ModelShape, shard: Shard, name: str) -> Fused:
    return Fused((rows_of(name, shard.vocab, shape.vocab, shape.hidden),), shape.head_bias, bits=HEAD_BITS)
