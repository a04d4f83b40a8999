"""What a slice of a model takes: its weights.

Integers only, of shapes and shards; must not know tensors, files or devices.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from tpspec.published import per_layer, short_conv
from tpspec.published.blocks import MIXTURE
from tpspec.published.experts import BEFORE, BEHIND
from tpspec.published.formats import HEAD
from tpspec.published.fused import DTYPE_BYTES, Fused, Held, alike
from tpspec.published.groups import HEAD_BITS
from tpspec.topology import mixing
from tpspec.topology.shards import by_heads, whole_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpspec.published.mlp_names import MlpNames
    from tpspec.published.shape import ModelShape
    from tpspec.topology.shards import Layers, Shard

WIDE_BYTES = 4  # of a weight of a norm or router: float32, whatever the rest is held in


def weight_bytes(shape: ModelShape, shard: Shard, dtype: str, quantize: str | None = None) -> int:
    """Bytes of card memory for a shard's weights; the embedding table stays in host memory and is not counted.

    Quantized: the matrices of the layers shrink, the head to HEAD_BITS; norms, biases and routers do not. Those of a
    quantized checkpoint take what they take there, as far as codes are computed with; UserError where they should
    shrink again.
    """
    held = Held.of(shape, dtype, quantize)
    num_norms = shape.num_layers * shape.layer_norms + 1
    if shape.norms.mixture_out is not None:
        num_norms += len(_with_experts(shape))
    norms = num_norms * shape.hidden * (2 if shape.usual.norms_biased else 1)
    attention = sum(_attention_bytes(layers, held) for layers in by_heads(held.shape, shard))
    head = held.bytes_of([_head(shape, shard)], HEAD_BITS) + len(shard.vocab) * shape.head_bias * DTYPE_BYTES[dtype]
    mlps = _mlp_bytes(shard, held) + _expert_bytes(shard, held) + _per_layer_bytes(held)
    states = _linear_bytes(shard, held) + _conv_bytes(shard, held)
    return (norms + _routers(shape)) * WIDE_BYTES + attention + states + mlps + head


def last_layer(shape: ModelShape) -> ModelShape:
    """Of one more layer like a model's last, that drafts for it: a model of that layer."""
    experts = None if shape.experts is None else replace(shape.experts, first_layer=0, every=1)
    return replace(shape, num_layers=1, num_windowed=min(1, shape.num_windowed), experts=experts, delta_net=None,
                   short_conv=None, global_heads=None, sharing=None, per_layer=0, stored=None, blocks=())  # fmt: skip


def layer_bytes(shape: ModelShape, dtype: str, quantize: str | None = None) -> int:
    """Of that layer, whole: with a head, and what joins a token's embedding with the feature before it."""
    one = last_layer(shape)
    joins = [Fused((("fc", shape.hidden),), range(2 * shape.hidden), 2 * shape.hidden)]
    return weight_bytes(one, whole_shard(one), dtype, quantize) + Held.of(one, dtype, quantize).bytes_of(joins)


def expert_bytes(shape: ModelShape, shard: Shard, dtype: str, quantize: str | None = None) -> int:
    """What experts are of `weight_bytes`: of them a round reads those that its rows are sent to."""
    return _expert_bytes(shard, Held.of(shape, dtype, quantize))


def num_params(shape: ModelShape, shard: Shard) -> int:
    """That a shard multiplies a row with, however they are stored: of experts, those that a row is sent to."""
    held = weight_bytes(replace(shape, stored=None), shard, "float32") // DTYPE_BYTES["float32"]
    if shape.experts is None:
        return held
    idle = shape.experts.count - shape.experts.chosen
    return held - expert_params(shape, shard) * idle // shape.experts.count


def expert_params(shape: ModelShape, shard: Shard) -> int:
    """That a shard holds of all experts; 0 for a model without."""
    return expert_bytes(replace(shape, stored=None), shard, "float32") // DTYPE_BYTES["float32"]


def _attention_bytes(layers: Layers, held: Held) -> int:
    """Of layers with attention, all of the same sizes."""
    shape, shard, which = layers
    wide = _inner_norms(shape, shard) + len(shard.heads) * _has_sinks(shape)
    plain = _biases(shape, shard) + mixing.num_made(shape, shard)
    matrices = sum(
        times * held.bytes_of(mixing.attention(shape, shard, at)) for at, times in _stored_layers(shape, which)
    )
    return matrices + len(which) * (wide * WIDE_BYTES + plain * DTYPE_BYTES[held.dtype])


def _has_sinks(shape: ModelShape) -> bool:
    """Of layers that all have a window, or none."""
    return shape.usual.sinks is not None and (shape.num_windowed > 0 or shape.usual.sinks_everywhere)


def _linear_bytes(shard: Shard, held: Held) -> int:
    """Of layers of linear attention."""
    shape, net = held.shape, held.shape.delta_net
    if net is None:
        return 0
    own = held.as_published  # of rates
    matrices = sum(times * held.bytes_of(mixing.mixer(shape, net, shard, at)) for at, times in _linear_layers(shape))
    matrices += sum(
        times * own.bytes_of(mixing.rates(shape, net, shard, at)) for at, times in _linear_layers(own.shape)
    )
    heads = len(shard.delta_values)
    wide = (net.kernel + net.biased) * mixing.num_seen(net, shard) + (1 + net.num_decays + net.sums) * heads
    wide += net.num_normed * heads // net.value_heads if net.sums else net.num_normed
    return matrices + len(net.layers) * wide * WIDE_BYTES


def _conv_bytes(shard: Shard, held: Held) -> int:
    """Of layers with a short convolution."""
    shape, net, own = held.shape, held.shape.short_conv, len(shard.conv_channels)
    if net is None:
        return 0
    names = short_conv.IN, short_conv.OUT
    layers = alike(shape.stored, (f"model.layers.{index}.{short_conv.MODULE}." for index in sorted(net.layers)), names)
    matrices = sum(times * held.bytes_of(mixing.convolution(shape, net, shard, at)) for at, times in layers)
    biases = net.biased * (short_conv.PARTS * own + shape.hidden * _adds_biases(shard)) * DTYPE_BYTES[held.dtype]
    return matrices + len(net.layers) * (biases + (net.kernel + net.biased) * own * WIDE_BYTES)


def _per_layer_bytes(held: Held) -> int:
    """Of what layers make of their numbers of a token, and of what makes those: whole on every rank."""
    shape, size = held.shape, held.shape.per_layer
    if not size:
        return 0
    hidden, layers = range(shape.hidden), (f"model.layers.{index}." for index in range(shape.num_layers))
    each = sum(
        times * held.bytes_of([
            Fused(((at + per_layer.GATE, size),), hidden, shape.hidden),
            Fused(((at + per_layer.OUT, shape.hidden),), range(size), size),
        ])
        for at, times in alike(shape.stored, layers, (per_layer.GATE, per_layer.OUT))
    )  # fmt: skip
    whole = Fused(((f"model.{per_layer.CONTEXT}", shape.num_layers * size),), hidden, shape.hidden)
    return each + held.bytes_of([whole]) + size * WIDE_BYTES


def _mlp_bytes(shard: Shard, held: Held) -> int:
    """Of what every row goes through."""
    shape, experts = held.shape, held.shape.experts
    if experts is None:
        biases = len(shape.feeding) * _mlp_biases(shape, shard) * shape.mlp_bias * DTYPE_BYTES[held.dtype]
        usual = _bytes_of(_mlps(shape), shard.channels, shape.intermediate, held)
        if shape.sharing is None:
            return biases + usual
        return usual + _bytes_of(_sharing_mlps(shape), shard.sharing_channels, shape.sharing.channels, held)
    dense = _bytes_of(_mlps(shape), shard.dense, experts.dense, held)
    shared = _bytes_of(_shared(shape), shard.shared, experts.shared, held)
    return dense + shared + sum(times * held.bytes_of(_around(shape, at)) for at, times in _latents(shape))


def _expert_bytes(shard: Shard, held: Held) -> int:
    shape, experts = held.shape, held.shape.experts
    latent = experts.latent if experts else 0
    matrices = _bytes_of(_experts(shape), shard.channels, shape.intermediate, held, latent, shape.mlp_names)
    if experts is None or not experts.biased:
        return matrices
    biases = len(_with_experts(shape)) * experts.count * _mlp_biases(shape, shard)
    return matrices + biases * DTYPE_BYTES[held.dtype]


def _bytes_of(
    mlps: Sequence[tuple[str, int]],
    channels: range,
    size: int,
    held: Held,
    latent: int = 0,
    names: MlpNames | None = None,
) -> int:
    """mlps: what the names in one begin with, and how many are stored as it is. latent: of what they read, if not a
    row. names: of their matrices, if they are experts."""
    hidden, names = latent or held.shape.hidden, names or held.shape.mlp_names.plain
    return sum(times * held.bytes_of(_mlp(names, at, channels, size, hidden)) for at, times in mlps)


@cache
def _stored_layers(shape: ModelShape, which: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Of layers whose attention is stored alike: what the names in one begin with, and how many there are."""
    layers = (f"model.layers.{index}." for index in which)
    gate = (shape.gating.own,) if shape.gating is not None and shape.gating.own is not None else ()
    usual = shape.usual
    names = (*shape.attention_names, *gate, usual.out)
    return alike(shape.stored, layers, [f"{usual.attention}.{name}" for name in names])


@cache
def _linear_layers(shape: ModelShape) -> tuple[tuple[str, int], ...]:
    """The same of layers of linear attention."""
    net = shape.delta_net
    if net is None:
        return ()
    linear, names = sorted(net.layers), (*net.mixed, net.gate, net.out, net.writes, net.decays, *(net.reduced or ()))
    return alike(shape.stored, (f"model.layers.{index}.{net.module}." for index in linear), names)


@cache
def _mlps(shape: ModelShape) -> tuple[tuple[str, int], ...]:
    """The same of layers that have an MLP, as most do."""
    with_experts = {*_with_experts(shape)}
    return _without_experts(
        shape, [layer for layer in shape.feeding if layer < shape.num_keeping and layer not in with_experts]
    )


@cache
def _sharing_mlps(shape: ModelShape) -> tuple[tuple[str, int], ...]:
    """The same of MLPs of layers that keep nothing."""
    return _without_experts(shape, range(shape.num_keeping, shape.num_layers))


@cache
def _shared(shape: ModelShape) -> tuple[tuple[str, int], ...]:
    """The same of MLPs beside experts."""
    if shape.experts is None or not shape.experts.shared:
        return ()
    return _alike(shape, [f"model.layers.{layer}.{shape.mlp_names.shared}." for layer in _with_experts(shape)])


@cache
def _experts(shape: ModelShape) -> tuple[tuple[str, int], ...]:
    """The same of experts: a mixture has thousands. A tensor of all of a layer's may be plain where each expert alone
    would not be."""
    count, together = 0 if shape.experts is None else shape.experts.count, shape.mlp_names.stacked
    mixtures = [shape.mlp_names.within(f"model.layers.{layer}.") for layer in _with_experts(shape)]

    def is_plain(at: str) -> bool:
        return together is not None and shape.stored is not None and shape.stored.scheme_of(at + together) is None

    each = [at if is_plain(at) else f"{at}experts.{index}." for at in mixtures for index in range(count)]
    return _alike(shape, each, shape.mlp_names)


@cache
def _latents(shape: ModelShape) -> tuple[tuple[str, int], ...]:
    """The same of mixtures whose experts read latents."""
    layers = _with_experts(shape) if shape.experts is not None and shape.experts.latent else ()
    mixtures = (shape.mlp_names.within(f"model.layers.{index}.") for index in layers)
    return alike(shape.stored, mixtures, (BEFORE, BEHIND))


def _around(shape: ModelShape, at: str) -> list[Fused]:
    """Whole on every rank."""
    latent = 0 if shape.experts is None else shape.experts.latent
    before, behind = ((at + BEFORE, latent),), ((at + BEHIND, shape.hidden),)
    return [Fused(before, range(shape.hidden), shape.hidden), Fused(behind, range(latent), latent)]


def _with_experts(shape: ModelShape) -> tuple[int, ...]:
    """Layers that have some."""
    if shape.experts is None:
        return ()
    if shape.blocks:
        return tuple(layer for layer, kind in enumerate(shape.blocks) if kind == MIXTURE)
    return tuple(shape.experts.layers(shape.num_layers))


def _without_experts(shape: ModelShape, layers: Iterable[int]) -> tuple[tuple[str, int], ...]:
    return _alike(shape, [shape.mlp_names.without_experts(f"model.layers.{layer}.") for layer in layers])


def _alike(shape: ModelShape, mlps: Iterable[str], names: MlpNames | None = None) -> tuple[tuple[str, int], ...]:
    """mlps: what the names of matrices in one begin with. names: of those, if they are experts."""
    names = names or shape.mlp_names.plain
    return alike(shape.stored, mlps, [name for name in (names.gate, names.up, names.down) if name is not None])


def _head(shape: ModelShape, shard: Shard) -> Fused:
    name = "model.embed_tokens" if shape.tied else HEAD
    return Fused(((name, len(shard.vocab)),), range(shape.hidden), shape.hidden)


def attention_params(shape: ModelShape, shard: Shard) -> int:
    """Numbers in the matrices of one layer's attention; of the most usual, where they are not alike."""
    shape, shard, _ = max(by_heads(shape, shard), key=lambda layers: len(layers.which))
    matrices = mixing.attention(shape, shard, "")
    return sum(one.num_rows * len(one.columns) for one in matrices) + mixing.num_made(shape, shard)


def _inner_norms(shape: ModelShape, shard: Shard) -> int:
    """Numbers of those within a layer's attention."""
    if shape.latent is not None:
        return shape.latent.rank + (shape.latent.queries or 0)
    if shape.usual.joint_norm:
        return (len(shard.heads) + len(shard.kv_heads)) * shape.head_dim
    return min(2, shape.num_made) * shape.head_dim * shape.qk_norm


def _mlp(names: MlpNames, at: str, channels: range, size: int, hidden: int) -> list[Fused]:
    """Of gate and up; of down. at: before their names. channels: of so many, those of a shard. hidden: of what they
    read."""
    gate_up = tuple((at + name, len(channels)) for name in (names.gate, names.up) if name is not None)
    return [Fused(gate_up, range(hidden), hidden), Fused(((at + names.down, hidden),), channels, size)]


def _biases(shape: ModelShape, shard: Shard) -> int:
    """Numbers of those of a layer's attention."""
    num_lines = len(shard.heads) + (shape.num_made - 1) * len(shard.kv_heads)
    num_lines += sum(num for _, num in mixing.other_heads(shape, shard))
    of_qkv = num_lines * shape.head_dim * shape.qkv_bias
    return of_qkv + shape.hidden * (shape.o_bias and _adds_biases(shard))


def _mlp_biases(shape: ModelShape, shard: Shard) -> int:
    """Of those of one MLP, or expert."""
    made = 1 if shape.mlp_names.gate is None else 2
    return made * len(shard.channels) + shape.hidden * _adds_biases(shard)


def _adds_biases(shard: Shard) -> bool:
    """Of what is summed over ranks: one of them does."""
    return shard.index == 0


def _routers(shape: ModelShape) -> int:
    """Numbers of all routers, and of the gates of what is beside experts, which every rank holds."""
    experts = shape.experts
    if experts is None:
        return 0
    has_biases = experts.corrected is not None or experts.biased
    each = experts.count * (shape.hidden + has_biases + experts.apart) + shape.hidden * experts.shared_gated
    return len(_with_experts(shape)) * each
