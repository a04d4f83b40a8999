"""The matrices of what mixes a text in a layer, attention, linear attention or a short convolution: which slices of
them a shard has, and which of those are computed as one. Both what they take and how they are read goes by these lists.

Names and integers only, of shapes and shards; must not know bytes, tensors or files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tpspec.published.indexer import KEY, MODULE, QUERIES
from tpspec.published.latent import LATENT, MADE, REDUCED
from tpspec.published.places import Fused, Place, all_of, below, heads_of, numbers_of, rows_of, summed
from tpspec.published.short_conv import IN, OUT, PARTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.published.delta_net import DeltaNet
    from tpspec.published.latent import Latent
    from tpspec.published.shape import ModelShape
    from tpspec.published.short_conv import ShortConv
    from tpspec.topology.shards import Shard


def attention(shape: ModelShape, shard: Shard, at: str) -> list[Fused]:
    """All of a layer's. Here and below, shape, shard: of layers whose heads are of one sort (shards.by_heads); at: what
    the names of the matrices begin with."""
    if shape.latent is not None:
        return [*latents(shape, shape.latent, shard, at), out(shape, shard, at)]
    beside = gate(shape, shard, at), others(shape, shard, at) if shape.replicates_norm else None
    return [qkv(shape, shard, at), *(one for one in beside if one is not None), out(shape, shard, at)]


def qkv(shape: ModelShape, shard: Shard, at: str) -> Fused:
    """Of queries, keys and values, or of those of them that there are."""
    heads, kept = (shard.heads, shape.num_heads), (shard.kv_heads, shape.num_kv_heads)
    sizes = (*heads, shape.head_dim), (*kept, shape.head_dim), (*kept, shape.value_dim)
    named = zip(shape.usual.qkv[: shape.num_made], sizes, strict=False)
    parts = [heads_of(at + name, *size, shape.hidden) for name, size in named]
    if shape.gating is not None and shape.gating.own is None:
        parts[0] = _beside_gate(shape, shard, at, range(shape.head_dim))
    return Fused(below(parts), shape.qkv_bias)


def gate(shape: ModelShape, shard: Shard, at: str) -> Fused | None:
    """A product of its own, though its rows may be among those of queries."""
    gating, dim = shape.gating, shape.head_dim
    if gating is None:
        return None
    if gating.own is None:
        return Fused((_beside_gate(shape, shard, at, range(dim, 2 * dim)),), shape.qkv_bias)
    each = gating.num_rows(1, dim)
    return Fused((heads_of(at + gating.own, shard.heads, shape.num_heads, each, shape.hidden),))


def _beside_gate(shape: ModelShape, shard: Shard, at: str, wanted: range) -> Place:
    """Those numbers of each head, of a matrix that makes a gate as long behind its query."""
    each = 2 * shape.head_dim
    picked = tuple(range(head * each + wanted.start, head * each + wanted.stop) for head in range(len(shard.heads)))
    place = heads_of(at + shape.usual.qkv[0], shard.heads, shape.num_heads, each, shape.hidden)
    return replace(place, picked=picked)


def others(shape: ModelShape, shard: Shard, at: str) -> Fused | None:
    """Queries, then keys, of heads that other ranks have, where a norm over all of them has this one make them, too;
    None where all are here."""
    here = (shard.heads, shape.num_heads), (shard.kv_heads, shape.num_kv_heads)
    parts = [
        heads_of(at + name, heads, count, shape.head_dim, shape.hidden)
        for name, (own, count) in zip(shape.usual.qkv, here, strict=False)
        for heads in (range(own.start), range(own.stop, count))
        if heads
    ]
    return Fused(tuple(parts), shape.qkv_bias) if parts else None


def out(shape: ModelShape, shard: Shard, at: str) -> Fused:
    dim = shape.value_dim if shape.latent is None else shape.latent.values
    columns, size = numbers_of(shard.heads, dim), shape.num_heads * dim
    return summed(at + shape.usual.out, shape.hidden, columns, size, biased=shape.o_bias)


def latents(shape: ModelShape, latent: Latent, shard: Shard, at: str) -> list[Fused]:
    """Of queries, or of what those are made of by another, and of the whole latent, which every rank makes; and of an
    indexer, whole as well, behind them.

    Ranks that choose tokens apart choose the same, for they multiply the same numbers with the same matrices, none of
    which is beside some that another rank has not. Where unlike cards sum in another order, a token on the edge may be
    attended to by the heads of one rank and not by those of another: either is a choice of the indexer's, and what is
    summed over ranks is the same on all of them all the same.
    """
    width, size = latent.queries or shape.hidden, latent.cached
    queries = heads_of(at + latent.query_name, shard.heads, shape.num_heads, latent.head_dim, width)
    cached = rows_of(at + LATENT, range(size), size, shape.hidden)
    if latent.queries is None:
        return [Fused((queries, cached))]
    reduced = rows_of(at + REDUCED, range(width), width, shape.hidden)
    if (indexer := shape.indexer) is None:
        return [Fused((reduced, cached)), Fused((queries,))]
    at += f"{MODULE}."
    key = rows_of(at + KEY, range(indexer.dim), indexer.dim, shape.hidden)
    asked = all_of(at + QUERIES, indexer.num_heads * indexer.dim, width)
    return [Fused((reduced, cached, key)), Fused((queries,)), asked]


def made(shape: ModelShape, latent: Latent, shard: Shard, at: str) -> Fused:
    """What heads make keys and values of a latent with; no product, and never quantized."""
    return Fused((heads_of(at + MADE, shard.heads, shape.num_heads, latent.made, latent.rank),))


class LinearMatrices(NamedTuple):
    """Of a layer of linear attention: of what the convolution sees, queries, keys and values; of the gate; of the rates
    at which a state is written and forgets; of what is summed. The gate, and a rate, are one product, or two, of which
    the second reads what the first gives. Rates are a few rows, and what is held in codes forgets too much through
    them."""

    mixed: Fused
    gate: list[Fused]
    rates: list[list[Fused]]
    out: Fused

    @property
    def all(self) -> list[Fused]:
        return [self.mixed, *self.gate, *(one for rate in self.rates for one in rate), self.out]


def linear(hidden: int, net: DeltaNet, shard: Shard, at: str) -> LinearMatrices:
    """hidden: numbers of a row."""
    mixed, gate, rates = (_in_groups if net.is_in_groups else _in_turn)(hidden, net, shard, at)

    def behind(reduced: str, fused: Fused) -> list[Fused]:
        """Of what reads as many numbers as a key has, which every rank makes."""
        first = replace(all_of(at + reduced, net.key_dim, hidden), exact=fused.exact)
        return [first, fused.reading(net.key_dim)]

    columns, size = numbers_of(shard.delta_values, net.value_dim), net.value_heads * net.value_dim
    out = summed(at + net.out, hidden, columns, size)
    if net.reduced is None:
        return LinearMatrices(Fused(mixed), [Fused((gate,))], [[Fused(rates, exact=True)]], out)
    (writes, decays), (of_decays, of_gate) = (Fused((rate,), exact=True) for rate in rates), net.reduced
    apart = [[writes], behind(of_decays, decays)]
    return LinearMatrices(Fused(mixed), behind(of_gate, Fused((gate,))), apart, out)


def seen(net: DeltaNet, shard: Shard) -> list[range]:
    """This shard's queries, keys and values, of all that the convolution sees."""
    way = -1 if net.sums else 1
    return [part.rows for part in below(_qkv(0, net, shard, ("",) * 3)[::way])][::way]


def _qkv(hidden: int, net: DeltaNet, shard: Shard, names: Sequence[str]) -> list[Place]:
    keys, values = (shard.delta_keys, net.key_heads, net.key_dim), (shard.delta_values, net.value_heads, net.value_dim)
    return [heads_of(name, *of, hidden) for name, of in zip(names, (keys, keys, values), strict=True)]


Parts = tuple[tuple[Place, ...], Place, tuple[Place, ...]]


def _in_turn(hidden: int, net: DeltaNet, shard: Shard, at: str) -> Parts:
    """What the convolution sees, the gate and the rates. Of Mamba-2 all are one matrix, with the gate's rows
    first, values before keys and queries, and one rate, which is both, last."""
    heads, count = shard.delta_values, net.value_heads
    names = net.mixed if len(net.mixed) > 1 else net.mixed * 3
    mixed = _qkv(hidden, net, shard, [at + name for name in names])
    gate = heads_of(at + net.gate, heads, count, net.value_dim, hidden)
    writes = heads_of(at + net.writes, heads, count, 1, hidden)
    if net.sums:
        gate, *seen, rate = below([gate, *reversed(mixed), writes])
        return tuple(reversed(seen)), gate, (rate, rate)
    return below(mixed), gate, (writes, heads_of(at + net.decays, heads, count, net.num_decays, hidden))


def _in_groups(hidden: int, net: DeltaNet, shard: Shard, at: str) -> Parts:
    """The same of matrices whose rows are those of one key head after another: its query, its key, its value heads'
    values, then their gates; and their writes, then their decays."""
    heads, keys = shard.delta_values, shard.delta_keys
    K, V, group = net.key_dim, net.value_dim, net.group
    size = 2 * (K + group * V)  # rows of a key head

    def of_keys(first: int) -> list[range]:
        return [range(head * size + first, head * size + first + K) for head in range(len(keys))]

    def of_values(first: int, size: int, each: int) -> list[range]:
        places = (divmod(head - keys.start * group, group) for head in heads)
        firsts = (key * size + first + value * each for key, value in places)
        return [range(start, start + each) for start in firsts]

    def some(name: str, size: int, picked: list[range]) -> Place:
        return replace(heads_of(at + name, keys, net.key_heads, size, hidden), picked=tuple(picked))

    mixed = some(net.mixed[0], size, of_keys(0) + of_keys(K) + of_values(2 * K, size, V))
    rates = some(net.writes, 2 * group, of_values(0, 2 * group, 1) + of_values(group, 2 * group, 1))
    return (mixed,), some(net.gate, size, of_values(2 * K + group * V, size, V)), (rates,)


def convolution(hidden: int, net: ShortConv, shard: Shard, at: str) -> list[Fused]:
    """Of what it sees, between two gates; of what is summed. hidden: numbers of a row."""
    own, size = shard.conv_channels, net.channels
    made = below([rows_of(at + IN, own, size, hidden)] * PARTS)
    return [Fused(made, net.biased), summed(at + OUT, hidden, own, size, biased=net.biased)]
