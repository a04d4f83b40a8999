"""The matrices of what mixes a text in a layer: attention, linear attention or a short convolution. What a rank has of
each, and in what order they are read.

Integers and names only, of shapes and shards; must not know bytes, tensors or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.published import short_conv
from tpspec.published.fused import Fused
from tpspec.published.latent import LATENT, REDUCED

if TYPE_CHECKING:
    from tpspec.published.delta_net import DeltaNet
    from tpspec.published.latent import Latent
    from tpspec.published.shape import ModelShape
    from tpspec.published.short_conv import ShortConv
    from tpspec.topology.shards import Shard


def attention(shape: ModelShape, shard: Shard, at: str) -> list[Fused]:
    """Of q, k and v; of their gate; of o. at: before their names."""
    if shape.latent is not None:
        return _latent_attention(shape, shape.latent, shard, f"{at}self_attn.")
    num_q, num_kv = (len(heads) * shape.head_dim for heads in (shard.heads, shard.kv_heads))
    at, hidden, gating = f"{at}{shape.usual.attention}.", range(shape.hidden), shape.gating
    rows = (num_q, num_kv, len(shard.kv_heads) * shape.value_dim)[: shape.num_made]
    made = [tuple((at + name, num) for name, num in zip(shape.attention_names, rows, strict=True))]
    if gating is not None:  # a product of its own, though its rows may be among those of queries
        own = gating.own or shape.attention_names[0]
        made.append(((at + own, gating.num_rows(len(shard.heads), shape.head_dim)),))
    o = _o(shape, shard, at, shape.value_dim)
    return [*(Fused(parts, hidden, shape.hidden) for parts in made), o, *_others(shape, shard, at)]


def _others(shape: ModelShape, shard: Shard, at: str) -> list[Fused]:
    """Queries and keys of other ranks' heads, where a norm over all of them has this one make them, too."""
    qk = tuple((at + name, num * shape.head_dim) for name, num in other_heads(shape, shard))
    return [Fused(qk, range(shape.hidden), shape.hidden)] if qk else []


def other_heads(shape: ModelShape, shard: Shard) -> list[tuple[str, int]]:
    """How many stand before and behind this rank's, of queries and of keys, and the name of their matrix."""
    if not shape.replicates_norm:
        return []
    here, totals = (shard.heads, shard.kv_heads), (shape.num_heads, shape.num_kv_heads)
    named = zip(shape.attention_names, here, totals, strict=False)
    beside = [(name, num) for name, own, total in named for num in (own.start, total - own.stop)]
    return [(name, num) for name, num in beside if num]


def mixer(shape: ModelShape, net: DeltaNet, shard: Shard, at: str) -> list[Fused]:
    """Of what the convolution sees; of the gate; of what is summed. at: before their names."""
    hidden, values = range(shape.hidden), len(shard.delta_values) * net.value_dim
    keys = len(shard.delta_keys) * net.key_dim
    seen = (keys, keys, values) if len(net.mixed) > 1 else (num_seen(net, shard),)
    mixed = tuple((at + name, rows) for name, rows in zip(net.mixed, seen, strict=True))
    columns = range(shard.delta_values.start * net.value_dim, shard.delta_values.stop * net.value_dim)
    return [
        Fused(mixed, hidden, shape.hidden),
        *_made(shape, net, ((at + net.gate, values),), net.reduced and at + net.reduced[1]),
        Fused(((at + net.out, shape.hidden),), columns, net.value_heads * net.value_dim),
    ]


def rates(shape: ModelShape, net: DeltaNet, shard: Shard, at: str) -> list[Fused]:
    """Of what is written to a state, and what it forgets. at: before their names."""
    heads = len(shard.delta_values)
    if net.writes == net.decays:
        return _made(shape, net, ((at + net.writes, 2 * heads),), None)
    writes, decays = (at + net.writes, heads), (at + net.decays, heads * net.num_decays)
    if net.reduced is None:
        return _made(shape, net, (writes, decays), None)
    return [*_made(shape, net, (writes,), None), *_made(shape, net, (decays,), at + net.reduced[0])]


def _made(shape: ModelShape, net: DeltaNet, parts: tuple[tuple[str, int], ...], reduced: str | None) -> list[Fused]:
    """reduced: what makes, on every rank, the numbers that they are made of; None: of the hidden state."""
    hidden, size = shape.hidden, net.key_dim
    if reduced is None:
        return [Fused(parts, range(hidden), hidden)]
    return [Fused(((reduced, size),), range(hidden), hidden), Fused(parts, range(size), size)]


def num_seen(net: DeltaNet, shard: Shard) -> int:
    """Numbers of a token that a shard's convolution sees."""
    return net.mixed_of(len(shard.delta_keys), len(shard.delta_values))


def convolution(shape: ModelShape, net: ShortConv, shard: Shard, at: str) -> list[Fused]:
    """Of what it sees, between two gates; of what is summed. at: before their names."""
    hidden, channels = range(shape.hidden), shard.conv_channels
    return [
        Fused(((at + short_conv.IN, short_conv.PARTS * len(channels)),), hidden, shape.hidden),
        Fused(((at + short_conv.OUT, shape.hidden),), channels, net.channels),
    ]


def _latent_attention(shape: ModelShape, latent: Latent, shard: Shard, at: str) -> list[Fused]:
    """Every rank makes the whole latent, and what queries are made of; what heads make of it is no product of these."""
    num_q, latents = len(shard.heads) * latent.head_dim, (at + LATENT, latent.cached)
    hidden, o = range(shape.hidden), _o(shape, shard, at, latent.values)
    if latent.queries is None:
        return [Fused(((at + latent.query_name, num_q), latents), hidden, shape.hidden), o]
    reduced, size = ((at + REDUCED, latent.queries), latents), latent.queries
    return [Fused(reduced, hidden, shape.hidden), Fused(((at + latent.query_name, num_q),), range(size), size), o]


def _o(shape: ModelShape, shard: Shard, at: str, head_dim: int) -> Fused:
    columns = range(shard.heads.start * head_dim, shard.heads.stop * head_dim)
    return Fused(((at + shape.usual.out, shape.hidden),), columns, shape.num_heads * head_dim)


def num_made(shape: ModelShape, shard: Shard) -> int:
    """Numbers of what heads make keys and values of a latent with, in a layer; never quantized."""
    return 0 if shape.latent is None else len(shard.heads) * shape.latent.made * shape.latent.rank
