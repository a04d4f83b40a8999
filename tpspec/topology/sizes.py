"""What a slice of a model takes: its weights.

Integers only, of shapes and shards; must not know tensors, files or devices.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from tpspec.published import per_layer
from tpspec.published.formats import HEAD
from tpspec.published.matrix_bytes import DTYPE_BYTES, Held, alike
from tpspec.published.places import all_of
from tpspec.published.short_conv import MODULE
from tpspec.topology import feeding, mixing
from tpspec.topology.shards import by_heads, whole_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tpspec.published.places import Fused
    from tpspec.published.shape import ModelShape
    from tpspec.topology.shards import Layers, Shard

WIDE_BYTES = 4  # of a weight of a norm or router: float32, whatever the rest is held in


def weight_bytes(shape: ModelShape, shard: Shard, dtype: str, quantize: str | None = None) -> int:
    """Bytes of card memory for a shard's weights; the embedding table stays in host memory and is not counted.

    Quantized: the matrices of the layers shrink, the head to HEAD_BITS; norms, biases and routers do not. Those of a
    quantized checkpoint take what they take there, as far as codes are computed with; UserError where they should
    shrink again.
    """
    held = _held(shape, shard, dtype, quantize)
    num_norms = shape.num_layers * shape.layer_norms + 1
    if shape.norms.mixture_out is not None:
        num_norms += len(shape.mixtures)
    norms = num_norms * shape.hidden * (2 if shape.usual.norms_biased else 1)
    attention = sum(_attention_bytes(layers, held) for layers in by_heads(held.shape, shard))
    head = held.bytes_of([feeding.head(shape, shard, "model.embed_tokens" if shape.tied else HEAD)])
    mlps = _mlp_bytes(shard, held) + _expert_bytes(shard, held) + _per_layer_bytes(held)
    states = _linear_bytes(shard, held) + _conv_bytes(shard, held)
    return (norms + _routers(shape)) * WIDE_BYTES + attention + states + mlps + head


def _held(shape: ModelShape, shard: Shard, dtype: str, quantize: str | None) -> Held:
    return Held(shape, dtype, quantize, adds_biases=shard.index == 0)


def last_layer(shape: ModelShape) -> ModelShape:
    """Of one more layer like a model's last, that drafts for it: a model of that layer."""
    experts = None if shape.experts is None else replace(shape.experts, first_layer=0, every=1)
    indexer = None if shape.indexer is None else replace(shape.indexer, layers=frozenset({0}))
    return replace(shape, num_layers=1, num_windowed=min(1, shape.num_windowed), experts=experts, indexer=indexer,
                   delta_net=None, short_conv=None, global_heads=None, sharing=None, per_layer=0, stored=None,
                   blocks=())  # fmt: skip


def layer_bytes(shape: ModelShape, dtype: str, quantize: str | None = None) -> int:
    """Of that layer, whole: with a head, and what joins a token's embedding with the feature before it."""
    one = last_layer(shape)
    shard, joins = whole_shard(one), all_of("fc", shape.hidden, 2 * shape.hidden)
    return weight_bytes(one, shard, dtype, quantize) + _held(one, shard, dtype, quantize).bytes_of([joins])


def expert_bytes(shape: ModelShape, shard: Shard, dtype: str, quantize: str | None = None) -> int:
    """What experts are of `weight_bytes`: of them a round reads those that its rows are sent to."""
    return _expert_bytes(shard, _held(shape, shard, dtype, quantize))


def held_params(shape: ModelShape, shard: Shard) -> int:
    """That a shard holds, however they are stored."""
    return weight_bytes(replace(shape, stored=None), shard, "float32") // DTYPE_BYTES["float32"]


def num_params(shape: ModelShape, shard: Shard) -> int:
    """That a shard multiplies a row with, however they are stored: of experts, those that a row is sent to."""
    held = held_params(shape, shard)
    if shape.experts is None:
        return held
    idle = shape.experts.count - shape.experts.chosen
    return held - expert_params(shape, shard) * idle // shape.experts.count


def expert_params(shape: ModelShape, shard: Shard) -> int:
    """That a shard holds of all experts; 0 for a model without."""
    return expert_bytes(replace(shape, stored=None), shard, "float32") // DTYPE_BYTES["float32"]


def _bytes_of(held: Held, every: Iterable[str], make: Callable[[str], list[Fused]]) -> int:
    """Of all modules whose names begin so. make: the matrices of one."""
    names = tuple(part.name for one in make("") for part in one.parts)
    return sum(times * held.bytes_of(make(at)) for at, times in alike(held.shape.stored, tuple(every), names))


def _within(layers: Iterable[int], module: str = "") -> Iterable[str]:
    """What the names in each layer begin with, or in a module of each, that ends with a dot."""
    return (f"model.layers.{index}.{module}" for index in layers)


def _attention_bytes(layers: Layers, held: Held) -> int:
    """Of layers with attention, all of the same sizes."""
    shape, shard, which = layers
    wide = _inner_norms(shape, shard) + len(shard.heads) * _has_sinks(shape)
    if shape.indexer is not None:  # its weights of heads, and the norm of its keys
        wide += shape.indexer.num_heads * shape.hidden + 2 * shape.indexer.dim
    every = _within(which, f"{shape.usual.attention}.")
    matrices = _bytes_of(held, every, lambda at: mixing.attention(shape, shard, at))
    return matrices + len(which) * (wide * WIDE_BYTES + _num_made(shape, shard) * DTYPE_BYTES[held.dtype])


def _num_made(shape: ModelShape, shard: Shard) -> int:
    """Numbers of what heads make keys and values of a latent with, in a layer."""
    return 0 if shape.latent is None else mixing.made(shape, shape.latent, shard, "").num_numbers


def _has_sinks(shape: ModelShape) -> bool:
    """Of layers that all have a window, or none."""
    return shape.usual.sinks is not None and (shape.num_windowed > 0 or shape.usual.sinks_everywhere)


def _linear_bytes(shard: Shard, held: Held) -> int:
    """Of layers of linear attention."""
    hidden, net = held.shape.hidden, held.shape.delta_net
    if net is None:
        return 0
    every = _within(net.layers, f"{net.module}.")
    matrices = _bytes_of(held, every, lambda at: mixing.linear(hidden, net, shard, at).all)
    heads = len(shard.delta_values)
    wide = (net.kernel + net.biased) * net.mixed_of(len(shard.delta_keys), heads)
    wide += (1 + net.num_decays + net.sums) * heads
    wide += net.num_normed * heads // net.value_heads if net.sums else net.num_normed
    return matrices + len(net.layers) * wide * WIDE_BYTES


def _conv_bytes(shard: Shard, held: Held) -> int:
    """Of layers with a short convolution."""
    shape, net = held.shape, held.shape.short_conv
    if net is None:
        return 0
    every = _within(net.layers, f"{MODULE}.")
    matrices = _bytes_of(held, every, lambda at: mixing.convolution(shape.hidden, net, shard, at))
    return matrices + len(net.layers) * (net.kernel + net.biased) * len(shard.conv_channels) * WIDE_BYTES


def _per_layer_bytes(held: Held) -> int:
    """Of what layers make of their numbers of a token, and of what makes those: whole on every rank."""
    size, num_layers, hidden = held.shape.per_layer, held.shape.num_layers, held.shape.hidden
    if not size:
        return 0
    each = _bytes_of(held, _within(range(num_layers)), lambda at: per_layer.inputs(at, size, hidden))
    return each + held.bytes_of([per_layer.context(num_layers, size, hidden)]) + size * WIDE_BYTES


def _mlp_bytes(shard: Shard, held: Held) -> int:
    """Of what every row goes through."""
    shape, experts = held.shape, held.shape.experts
    sharing = range(shape.num_keeping, shape.num_layers)
    others = sorted({*shape.feeding} - {*shape.mixtures, *sharing})
    matrices = _bytes_of(held, _within(others), lambda at: feeding.mlp(shape, shard, at))
    matrices += _bytes_of(held, _within(sharing), lambda at: feeding.mlp(shape, shard, at, shares=True))
    if experts is not None and experts.shared:
        matrices += _bytes_of(held, _within(shape.mixtures), lambda at: feeding.shared(shape, experts, shard, at))
    if experts is not None and experts.latent:
        every = map(shape.mlp_names.within, _within(shape.mixtures))
        matrices += _bytes_of(held, every, lambda at: feeding.around(shape, experts, at))
    return matrices


def _expert_bytes(shard: Shard, held: Held) -> int:
    shape, experts = held.shape, held.shape.experts
    if experts is None:
        return 0
    every = _experts(shape if held.quantize is None else replace(shape, stored=None))
    return _bytes_of(held, every, lambda at: feeding.expert(shape, experts, shard, at))


@cache
def _experts(shape: ModelShape) -> tuple[str, ...]:
    """What the names of each begin with: a mixture has thousands. A tensor of all of a layer's may be plain where each
    expert alone would not be."""
    count, together = 0 if shape.experts is None else shape.experts.count, shape.mlp_names.stacked
    mixtures = [shape.mlp_names.within(layer) for layer in _within(shape.mixtures)]

    def is_plain(at: str) -> bool:
        return together is not None and shape.stored is not None and shape.stored.scheme_of(at + together) is None

    return tuple(at if is_plain(at) else f"{at}experts.{index}." for at in mixtures for index in range(count))


def attention_params(shape: ModelShape, shard: Shard) -> int:
    """Numbers in the matrices of one layer's attention; of the most usual, where they are not alike."""
    shape, shard, _ = max(by_heads(shape, shard), key=lambda layers: len(layers.which))
    matrices = mixing.attention(shape, shard, "")
    return sum(one.num_numbers for one in matrices) + _num_made(shape, shard)


def _inner_norms(shape: ModelShape, shard: Shard) -> int:
    """Numbers of those within a layer's attention."""
    if shape.latent is not None:
        return shape.latent.rank + (shape.latent.queries or 0)
    if shape.usual.joint_norm:
        return (len(shard.heads) + len(shard.kv_heads)) * shape.head_dim
    return min(2, shape.num_made) * shape.head_dim * shape.qk_norm


def _routers(shape: ModelShape) -> int:
    """Numbers of all routers, and of the gates of what is beside experts, which every rank holds."""
    experts = shape.experts
    if experts is None:
        return 0
    has_biases = experts.corrected is not None or experts.biased
    each = experts.count * (shape.hidden + has_biases + experts.apart) + shape.hidden * experts.shared_gated
    return len(shape.mixtures) * each
