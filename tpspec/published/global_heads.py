"""Layers that see the whole text by other heads than those that see its last tokens: from a config.

In Gemma 4 they are fewer and longer, and their values may be made of what their keys are made of; in Laguna and Step
there are other numbers of queries, in MiMo half as many keys. Knows keys; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.published.model_types import MODEL_TYPES
from tpspec.published.reads import MOST
from tpspec.published.windows import FULL, SLIDING, kinds_of

if TYPE_CHECKING:
    from tpspec.published.reads import Reads

TYPES = ("gemma4_text", "gemma4_unified_text")
DIM = 512  # without global_head_dim
OVERRIDES = "per_layer_config"  # transformers' own, by layer; published checkpoints have global_head_dim
OVERRIDDEN = {"head_dim", "num_key_value_heads"}
COUNTS, COUNT, SLIDING_COUNT = "num_attention_heads_per_layer", "num_attention_heads", "num_sliding_attention_heads"
DOUBLED = ("mimo_v2_flash",)  # where layers with a window have twice as many heads of keys as the config says
COUNTED = {"laguna": COUNTS, "step3p5": COUNT}  # and which key says it of layers that see everything


@dataclass(frozen=True, slots=True)
class GlobalHeads:
    """layers: whose they are. num, num_kv, dim: in place of the model's. reuse_keys: there is no matrix of values."""

    layers: frozenset[int]
    num: int
    num_kv: int
    dim: int
    reuse_keys: bool = False


def query_heads(read: Reads, model_type: str, num_layers: int, usual: int) -> int:
    """Of layers with a window; of all where none has one. usual: what the model says of all."""
    if model_type not in COUNTED:
        return usual
    counts = _counts(read, model_type, num_layers, usual)
    return counts[SLIDING if SLIDING in counts else FULL]


def key_heads(read: Reads, model_type: str, num_layers: int, num_heads: int, usual: int) -> int:
    """Likewise, of keys and values. UserError where not as many query heads read each."""
    if model_type not in DOUBLED or SLIDING not in kinds_of(read, model_type, num_layers):
        return usual
    if num_heads % (2 * usual):
        raise read.refusal("num_key_value_heads", f"half a divisor of num_attention_heads ({num_heads})")
    return 2 * usual


def global_heads_of(
    read: Reads, model_type: str, num_layers: int, num_heads: int, num_kv: int, head_dim: int
) -> GlobalHeads | None:
    """None for a model whose layers all have the same. num_heads, num_kv, head_dim: of the others. UserError for what
    is no size."""
    if model_type in COUNTED:
        num = _counts(read, model_type, num_layers, num_heads).get(FULL, num_heads)
        if num % num_kv:
            raise read.refusal(COUNTED[model_type], f"multiples of num_key_value_heads ({num_kv})")
        return None if num == num_heads else GlobalHeads(_global(read, model_type, num_layers), num, num_kv, head_dim)
    if model_type in DOUBLED:
        layers = _global(read, model_type, num_layers)
        return GlobalHeads(layers, num_heads, num_kv // 2, head_dim) if 0 < len(layers) < num_layers else None
    if model_type not in TYPES:
        return None
    layers, reuse_keys = _global(read, model_type, num_layers), read.flag("attention_k_eq_v", False)
    if read.config.get(OVERRIDES) is not None:
        return _overridden(read, layers, num_heads, num_kv, reuse_keys=reuse_keys)
    own = "num_global_key_value_heads"
    if reuse_keys and read.config.get(own) is not None:
        num_kv = read.divisor(own, num_heads)
    return GlobalHeads(layers, num_heads, num_kv, read.even("global_head_dim", DIM), reuse_keys)


def _global(read: Reads, model_type: str, num_layers: int) -> frozenset[int]:
    kinds = kinds_of(read, model_type, num_layers)
    return frozenset(layer for layer, kind in enumerate(kinds) if kind != SLIDING)


def _counts(read: Reads, model_type: str, num_layers: int, usual: int) -> dict[str, int]:
    """Of query heads, by kinds of layers, as layer_types calls them."""
    if COUNTED[model_type] == COUNT:
        return _of_each_kind(read, model_type, num_layers)
    counts = read.config.get(COUNTS) or [usual] * num_layers
    right = f"a whole number above 0 for each of {num_layers} layers, the same for all of a kind"
    if not isinstance(counts, list) or not all(type(count) is int and 0 < count < MOST for count in counts):
        raise read.refusal(COUNTS, right)
    kinds = kinds_of(read, model_type, num_layers)
    if len(counts) != num_layers or len({*zip(kinds, counts, strict=True)}) > len({*kinds}):
        raise read.refusal(COUNTS, right)
    return dict(zip(kinds, counts, strict=True))


def _of_each_kind(read: Reads, model_type: str, num_layers: int) -> dict[str, int]:
    """The same where a key says it of each kind. What transformers writes of layers one by one must say as much."""
    kinds, full = kinds_of(read, model_type, num_layers), read.size(COUNT, MODEL_TYPES[model_type].num_heads)
    sliding = read.size(SLIDING_COUNT, full)
    own = {str(layer): {COUNT: sliding} for layer, kind in enumerate(kinds) if kind == SLIDING}
    if read.config.get(OVERRIDES) not in (None, own):
        raise read.refusal(OVERRIDES, f"{COUNT} {sliding}, as {SLIDING_COUNT} is, for each {SLIDING} layer alone")
    return {kind: sliding if kind == SLIDING else full for kind in kinds}


def _overridden(read: Reads, layers: frozenset[int], num_heads: int, num_kv: int, *, reuse_keys: bool) -> GlobalHeads:
    """Where each layer says by itself what it has in place of the model's."""
    which, own = ", ".join(map(str, sorted(layers))), read.section(OVERRIDES)
    if not set(own.config) <= {str(layer) for layer in layers}:
        raise read.refusal(OVERRIDES, f"of layers {which}, which see everything")
    found, usual = set(), read.even("head_dim", 256)  # what a layer does not say is the model's
    for layer in sorted(layers):
        one = own.section(str(layer))
        if unknown := sorted(set(one.config) - OVERRIDDEN):
            raise one.refusal(unknown[0], "left out: it is not supported")
        found.add((one.divisor("num_key_value_heads", num_heads, num_kv), one.even("head_dim", usual)))
    if len(found) > 1:
        raise read.refusal(OVERRIDES, f"the same for layers {which}: others are not supported")
    ((num_kv, dim),) = found
    return GlobalHeads(layers, num_heads, num_kv, dim, reuse_keys)
