"""Layers that keep nothing, and attend to what a layer before them keeps (Gemma 4's small models): from a config.json.

Such a layer has queries alone. Knows keys; must not know tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.published.global_heads import TYPES
from tpspec.published.windows import kinds_of

if TYPE_CHECKING:
    from tpspec.published.reads import Reads


@dataclass(frozen=True, slots=True)
class Sharing:
    """first: from this layer on none keeps anything. kept_by: of each of those, the layer whose keys and values it
    reads. channels: of their MLPs."""

    first: int
    kept_by: tuple[int, ...]
    channels: int


def sharing_of(read: Reads, model_type: str, num_layers: int, channels: int) -> Sharing | None:
    """None where every layer keeps something. channels: of the other MLPs. UserError for what is no such number."""
    key = "num_kv_shared_layers"
    if model_type not in TYPES or not (count := read.size(key, 0, least=0)):
        return None
    read.refuse("enable_moe_block")
    kinds, first = kinds_of(read, model_type, num_layers), num_layers - count
    if first < 1 or set(kinds[first:]) - set(kinds[:first]):
        raise read.refusal(key, f"so few that of the {num_layers} layers some of each type keep something")
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    wide = read.flag("use_double_wide_mlp", False)
    return Sharing(first, tuple(last[kind] for kind in kinds[first:]), channels * (2 if wide else 1))
