"""Layers that see the whole text by heads of another size than those that see its last tokens (Gemma 4): from a config.

Such heads are fewer and longer, and their values may be made of what their keys are made of. Knows keys; must not know
tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.topology.windows import SLIDING, kinds_of

if TYPE_CHECKING:
    from tpspec.topology.reads import Reads

TYPES = ("gemma4_text", "gemma4_unified_text")
DIM = 512  # without global_head_dim
OVERRIDES = "per_layer_config"  # transformers' own, by layer; published checkpoints have global_head_dim
OVERRIDDEN = {"head_dim", "num_key_value_heads"}


@dataclass(frozen=True, slots=True)
class GlobalHeads:
    """layers: whose they are. num_kv, dim: in place of the model's. reuse_keys: there is no matrix of values."""

    layers: frozenset[int]
    num_kv: int
    dim: int
    reuse_keys: bool


def global_heads_of(read: Reads, model_type: str, num_layers: int, num_heads: int, num_kv: int) -> GlobalHeads | None:
    """None for a type whose layers all have the same; num_kv: of the others. UserError for what is no size."""
    if model_type not in TYPES:
        return None
    kinds = kinds_of(read, model_type, num_layers)
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind != SLIDING)
    reuse_keys = read.flag("attention_k_eq_v", False)
    if read.config.get(OVERRIDES) is not None:
        return _overridden(read, layers, num_heads, num_kv, reuse_keys=reuse_keys)
    own = "num_global_key_value_heads"
    if reuse_keys and read.config.get(own) is not None:
        num_kv = read.divisor(own, num_heads)
    return GlobalHeads(layers, num_kv, read.even("global_head_dim", DIM), reuse_keys)


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
    return GlobalHeads(layers, num_kv, dim, reuse_keys)
