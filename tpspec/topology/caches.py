"""What caches hold, how many tokens and texts, and what that takes; and what a round reads of them.

Of shapes, shards and sections of a topology, and of a head's config; must not know how a cache is laid out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tpspec.published.head_files import is_assistant, layer_shape
from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.topology.shards import by_heads, whole_shard
from tpspec.topology.sizes import WIDE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from tpspec.published.shape import ModelShape
    from tpspec.topology.config import CacheConfig, EngineConfig, ServeConfig, Topology
    from tpspec.topology.shards import Layers, Shard

BLOCK = 256  # tokens of a text whose features are kept together
FUTURES = 64  # slots of a sequence for tokens that may come
NUM_LEFT = 65  # rows of a text behind its state: its root, and a draft
KEPT_LEFT = 17  # of a beginning: a root, and a page of 16 tokens behind it


class States(NamedTuple):
    """Something of texts that run, and of beginnings that are kept: how many, or bytes of each."""

    running: int
    kept: int = 0


def target_slots(topology: Topology) -> int:
    """Of the target's cache: whole pages."""
    return -(-topology.cache.num_tokens // topology.cache.page) * topology.cache.page


def recent_slots(topology: Topology, shape: ModelShape) -> int:
    """Of the target's layers with a window: whole pages; 0 where they have the slots that all have."""
    return recent_of(shape, topology.cache, topology.serve, topology.engine)


def recent_of(shape: ModelShape, cache: CacheConfig, serve: ServeConfig, engine: EngineConfig) -> int:
    """`recent_slots` of such sections.

    As many requests as may run find place with all that their next tokens see, and the rows of a round besides: n
    positions that follow each other touch ceil((n - 1) / page) + 1 pages at most, wherever they begin.
    """
    if shape.window is None:
        return 0
    of_each = -(-(shape.window - 2) // cache.page) + 2
    num_pages = min(serve.max_running, engine.max_rows) * of_each + -(-engine.max_rows // cache.page)
    return num_pages * cache.page if num_pages * cache.page < cache.num_tokens else 0


def num_states(topology: Topology, shape: ModelShape) -> States:
    """Of the target; none of a model that keeps none."""
    return states_of(shape, topology.cache, topology.serve, topology.engine)


def states_of(shape: ModelShape, cache: CacheConfig, serve: ServeConfig, engine: EngineConfig) -> States:
    """`num_states` of such sections."""
    if not shape.stateful:
        return States(0)
    return States(min(serve.max_running, engine.max_rows), cache.states if cache.prefix else 0)


def draft_states(serve: ServeConfig, shape: ModelShape) -> States:
    """Of a draft model."""
    return States(serve.max_running if shape.stateful else 0)


def draft_slots(topology: Topology) -> int:
    """Of a draft model's cache: beyond what the target caches, each sequence holds the futures of its text."""
    page = topology.cache.page
    return target_slots(topology) + topology.serve.max_running * -(-FUTURES // page) * page


def num_positions(shape: ModelShape, num_slots: int) -> int:
    """Of a text of that target, with its futures, in a cache of so many slots."""
    return num_slots if shape.max_positions is None else min(num_slots, shape.max_positions + FUTURES)


def target_cache(topology: Topology, shape: ModelShape, shard: Shard) -> int:
    """Bytes that a shard keeps of texts."""
    kept = kv_bytes(shape, shard, topology.cache_dtype, target_slots(topology), recent_slots(topology, shape))
    return kept + state_bytes(shape, shard, topology.target.dtype, num_states(topology, shape))


def draft_cache(topology: Topology, shape: ModelShape, dtype: str) -> int:
    """Bytes that a draft model, which is held in that dtype, keeps of texts."""
    whole = whole_shard(shape)
    states = state_bytes(shape, whole, dtype, draft_states(topology.serve, shape))
    return kv_bytes(shape, whole, dtype, draft_slots(topology)) + states


def head_cache(topology: Topology, shape: ModelShape, folder: Path) -> int:
    """Bytes that a head keeps of texts; shape: of the target."""
    if "eagle" not in topology.draft.sources:
        return 0  # of a text the others keep its last token
    if not is_assistant(folder):
        return layer_cache(topology, layer_shape(folder))
    kept = [layers.shape for layers in by_heads(shape, whole_shard(shape)) if layers.keep]
    heads = [(one.num_kv_heads * one.head_dim, one.num_made - 1) for one in kept]
    # It makes keys and values of two layers once more, of what enters those.
    cached = sum(numbers * (2 * draft_slots(topology) + made * shape.hidden) for numbers, made in heads)
    return DTYPE_BYTES[_draft_dtype(topology)] * (cached + (len(heads) + 1) * shape.hidden * _told(topology))


def layer_cache(topology: Topology, layer: ModelShape) -> int:
    """Bytes that a layer which goes on from the target's own keeps of texts: a model of that layer."""
    dtype = _draft_dtype(topology)
    features = DTYPE_BYTES[dtype] * layer.hidden * _told(topology)
    return kv_bytes(layer, whole_shard(layer), dtype, draft_slots(topology)) + features


def num_told(serve: ServeConfig, num_tokens: int) -> int:
    """Tokens of which there is room for what a layer that goes on from the target's reads besides them. Once they are
    read, texts that begin alike share it, as they share the target's cache."""
    return num_tokens + serve.max_running * BLOCK


def _draft_dtype(topology: Topology) -> str:
    return topology.draft.dtype or topology.target.dtype


def _told(topology: Topology) -> int:
    return num_told(topology.serve, target_slots(topology))


def kv_bytes(shape: ModelShape, shard: Shard, dtype: str, num_tokens: int, num_recent: int = 0) -> int:
    """Bytes of K and V, and of keys of indexes, that a rank keeps for num_tokens, over all layers. dtype: or int8, with
    a scale for each head.

    num_recent: tokens that layers with a window keep, where that is another number.
    """
    kept = [layers for layers in by_heads(shape, shard) if layers.keep]
    of_indexes = sum(_index_bytes(layers.shape, dtype, num_tokens) for layers in kept)
    return of_indexes + sum(_kv_bytes(layers, dtype, num_tokens, num_recent) for layers in kept)


def _kv_bytes(layers: Layers, dtype: str, num_tokens: int, num_recent: int) -> int:
    """Of what layers attend to."""
    one, own, _ = layers
    head = _head_bytes(one.head_dim, dtype)
    saved = one.num_windowed * (num_tokens - num_recent) if num_recent else 0
    tensors = 2 if one.latent is None else 1
    return tensors * len(own.kv_heads) * head * (one.num_layers * num_tokens - saved)


def _index_bytes(one: ModelShape, dtype: str, num_tokens: int) -> int:
    """Of the keys of layers' indexes, which every rank keeps whole."""
    return 0 if one.indexer is None else _head_bytes(one.indexer.dim, dtype) * one.num_layers * num_tokens


def _head_bytes(dim: int, dtype: str) -> int:
    """Of a token."""
    return dim + 4 if dtype == "int8" else dim * DTYPE_BYTES[dtype]


def state_bytes(shape: ModelShape, shard: Shard, dtype: str, states: States) -> int:
    """Bytes that a rank keeps of texts in layers that have a state; dtype: of rows. One more text than may run."""
    each = each_state(shape, shard, dtype)
    return (states.running + 1) * each.running + states.kept * each.kept


def each_state(shape: ModelShape, shard: Shard, dtype: str) -> States:
    """Bytes that a rank keeps of one text, and of one beginning."""
    net, values, width = shape.delta_net or shape.short_conv, len(shard.delta_values), len(shard.conv_channels)
    if net is None:
        return States(0)
    if shape.delta_net is not None:
        width = shape.delta_net.row_of(len(shard.delta_keys), values)
    numbers, row = WIDE_BYTES * _states(shape, shard), len(net.layers) * DTYPE_BYTES[dtype] * width
    return States(*(numbers + (net.kernel - 1 + num_left) * row for num_left in (NUM_LEFT, KEPT_LEFT)))


def _states(shape: ModelShape, shard: Shard) -> int:
    """Numbers of a text's states, in all layers of linear attention."""
    net = shape.delta_net
    return 0 if net is None else len(net.layers) * len(shard.delta_values) * net.key_dim * net.value_dim


def kv_bytes_read(shape: ModelShape, shard: Shard, dtype: str, context: int) -> int:
    """Bytes of K and V that a token behind `context` others reads on a rank, and of keys of indexes; and of states,
    which are written, too."""
    layers, seen = by_heads(shape, shard), _num_seen(shape, context)
    recent = min(context, shape.window or context)
    read = sum(_kv_bytes(one, dtype, seen, recent) + _index_bytes(one.shape, dtype, context) for one in layers)
    return read + 2 * WIDE_BYTES * _states(shape, shard)


def num_attended(shape: ModelShape, shard: Shard, context: int) -> int:
    """What a rank multiplies for a row behind `context` others: queries with keys, and odds with values; queries of
    indexes with keys of these; and states, with a key, with a query, and as they are written."""
    layers, seen = by_heads(shape, shard), _num_seen(shape, context)
    beyond = context - min(context, shape.window or context)
    numbers = sum(
        len(own.heads) * one.head_dim * (one.num_layers * seen - one.num_windowed * beyond) for one, own, _ in layers
    )
    indexes = [(one.indexer, one.num_layers) for one, _, _ in layers if one.indexer is not None]
    scored = sum(indexer.num_heads * indexer.dim * num_layers * context for indexer, num_layers in indexes)
    return 2 * numbers + scored + 3 * _states(shape, shard)


def _num_seen(shape: ModelShape, context: int) -> int:
    """Of so many tokens, those that a row attends to in layers without a window."""
    return context if shape.indexer is None else min(context, shape.indexer.chosen)
