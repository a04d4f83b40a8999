"""Who holds which slice of a model, over any number of ranks and any weights, without padding.

Integers only: knows no tensors, no files and no devices. Query heads are the unit of attention. What a slice takes:
sizes.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from tpspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from tpspec.published.delta_net import DeltaNet
    from tpspec.published.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Shard:
    """One target rank's part: query heads, the KV heads these read, MLP channels, and rows of the head.

    dense, shared: channels of MLPs that are no experts in a model with experts, whose `channels` are an expert's.
    delta_values, delta_keys: value heads of layers of linear attention, and the key heads these read. conv_channels: of
    short convolutions.
    global_heads, global_kv_heads: of layers that have others, in place of heads and kv_heads. sharing_channels: of
    layers that keep nothing, in place of channels.
    """

    index: int
    heads: range
    kv_heads: range
    channels: range
    vocab: range
    dense: range = range(0)
    shared: range = range(0)
    delta_values: range = range(0)
    delta_keys: range = range(0)
    global_heads: range = range(0)
    global_kv_heads: range = range(0)
    sharing_channels: range = range(0)
    conv_channels: range = range(0)


def split(shape: ModelShape, weights: Sequence[float]) -> tuple[Shard, ...]:
    """One shard for each weight, each part proportional to it; together they hold the model exactly once.

    Only a KV head on a boundary is held by both sides. UserError when there are more shards than query heads.
    """
    heads = _ranges(shape.num_heads, weights, "query heads")
    channels = _aligned_ranges(shape.intermediate, weights, "MLP channels")
    vocab = _aligned_ranges(shape.vocab, weights, "vocabulary rows")
    read, wide, none = _read(heads, shape.group), shape.global_heads, [range(0)] * len(weights)
    net = shape.delta_net
    values = none if net is None else _values(net, weights)
    keys = values if net is None else _read(values, net.group)
    experts = shape.experts
    dense = _aligned_ranges(experts.dense, weights, "MLP channels") if experts and experts.dense else none
    shared = _aligned_ranges(experts.shared, weights, "MLP channels") if experts and experts.shared else none
    global_heads = none if wide is None else _ranges(wide.num, weights, "query heads")
    read_wide = none if wide is None else _read(global_heads, wide.num // wide.num_kv)
    sharing = none if shape.sharing is None else _aligned_ranges(shape.sharing.channels, weights, "MLP channels")
    conv = none if shape.short_conv is None else _aligned_ranges(shape.short_conv.channels, weights, "channels")
    parts = zip(
        heads, read, channels, vocab, dense, shared, values, keys, global_heads, read_wide, sharing, conv, strict=True
    )
    return tuple(Shard(index, *part) for index, part in enumerate(parts))


def whole_shard(shape: ModelShape) -> Shard:
    """All of a model that is not sharded."""
    (one,) = split(shape, (1.0,))
    return one


class Layers(NamedTuple):
    """Layers whose attention has the same sizes, as a model of those alone and its shard. which: they are in theirs."""

    shape: ModelShape
    shard: Shard
    which: tuple[int, ...]

    @property
    def keep(self) -> bool:
        """Whether they keep keys and values of a token."""
        return self.shape.num_made > 1


def by_heads(shape: ModelShape, shard: Shard) -> tuple[Layers, ...]:
    """The layers with attention, in as many parts as there are sizes of their heads, and of what these are made of."""
    wide, without = shape.global_heads, shape.delta_net.alone if shape.delta_net else shape.stateful
    choosing: Container[int] = () if shape.indexer is None else shape.indexer.layers
    # By whether heads are others, whether some are kept, and whether an indexer chooses among these.
    sorts: dict[tuple[bool, bool, bool], list[int]] = {}
    for layer in shape.mixing:
        if layer not in without:
            is_wide = wide is not None and layer in wide.layers
            sorts.setdefault((is_wide, layer < shape.num_keeping, layer in choosing), []).append(layer)
    return tuple(of_one_sort(shape, shard, *sort, tuple(which)) for sort, which in sorts.items())


def of_one_sort(
    shape: ModelShape, shard: Shard, is_wide: bool, keeps: bool, chooses: bool, which: tuple[int, ...] = ()
) -> Layers:
    """Those layers. is_wide: whether their heads are the model's global_heads; keeps: see Layers.keep; chooses: whether
    they have an indexer of their own."""
    one = replace(shape, num_layers=len(which), delta_net=None, short_conv=None, global_heads=None, sharing=None,
                  indexer=shape.indexer if chooses else None, blocks=())  # fmt: skip
    if shape.global_heads is not None:  # which all have that see everything
        one = replace(one, num_windowed=0 if is_wide or shape.window is None else len(which))
    if shape.global_heads is not None and is_wide:
        wide, shard = shape.global_heads, replace(shard, heads=shard.global_heads, kv_heads=shard.global_kv_heads)
        one = replace(one, num_heads=wide.num, num_kv_heads=wide.num_kv, head_dim=wide.dim)
        one = replace(one, num_made=2 if wide.reuse_keys else 3)
    return Layers(one if keeps else replace(one, num_made=1), shard, which)


def _values(net: DeltaNet, weights: Sequence[float]) -> list[range]:
    """Value heads of linear attention."""
    count, what = net.whole
    size = net.value_heads // count
    return [range(own.start * size, own.stop * size) for own in _ranges(count, weights, what)]


def _read(heads: Sequence[range], group: int) -> list[range]:
    """Heads that those read which share one, `group` each."""
    return [range(own.start // group, (own.stop - 1) // group + 1) for own in heads]


def _ranges(total: int, weights: Sequence[float], what: str) -> list[range]:
    bounds = accumulate(_counts(total, weights, what), initial=0)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _aligned_ranges(total: int, weights: Sequence[float], what: str) -> list[range]:
    """Boundaries at multiples of 16 or 8, which kernels like, where that moves little between ranks."""
    step = _alignment(total, len(weights))
    units = _ranges(-(-total // step), weights, what)
    return [range(own.start * step, min(own.stop * step, total)) for own in units]


def _alignment(total: int, num_shards: int) -> int:
    """The largest alignment that is at most a sixteenth of an equal part: below that, the slowest rank pays for it."""
    return next((step for step in (16, 8) if total >= 16 * step * num_shards), 1)


def _counts(total: int, weights: Sequence[float], what: str) -> list[int]:
    """`total` things in proportion to `weights` by largest remainder (the first rank wins a tie), at least one each."""
    if len(weights) > total:
        raise UserError(f"{len(weights)} shards for {total} {what}; should be at most {total} target ranks")
    # Exact, so that every rank of a world of unlike machines comes to the same slices.
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts
