"""What each rank holds: its shard, what drafts there, their caches, and what their rounds take on a card.

Of shapes and files' sizes; must not look for a model, or at a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.published.head_files import head_bytes, is_assistant, layer_shape
from tpspec.topology.caches import draft_cache, draft_slots, head_cache, layer_cache, target_cache, target_slots
from tpspec.topology.shards import whole_shard
from tpspec.topology.sizes import last_layer, layer_bytes, weight_bytes
from tpspec.topology.working import ROW_COUNTS, fixed_bytes, most_verified, recorded_bytes, working_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from tpspec.published.shape import ModelShape
    from tpspec.topology.config import Topology
    from tpspec.topology.shards import Shard


MOST_TAPS = 3  # layers whose rows a head goes on from


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank. rounds: of a card, beside the others."""

    weights: int = 0
    kv: int = 0
    rounds: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.weights + other.weights, self.kv + other.kv, self.rounds + other.rounds)

    def total(self, *, on_card: bool) -> int:
        return self.weights + self.kv + self.rounds * on_card


def shard_memory(topology: Topology, shape: ModelShape, shard: Shard) -> Memory:
    target = topology.target
    held = weight_bytes(shape, shard, target.dtype, target.quantize)
    num_slots = target_slots(topology)
    max_rows, num_verified, kinds = topology.engine.max_rows, most_verified(topology), topology.draft.kinds
    rounds = working_bytes(shape, shard, target.dtype, num_slots, max_rows, num_verified)
    if any(kind.behind or kind.loads == "head" for kind in kinds):
        rounds += recorded_bytes(MOST_TAPS * shape.hidden, target.dtype, num_verified)
    if any(kind.thins for kind in kinds):  # which is recorded, too, of few rows
        rounds += recorded_bytes(len(shard.vocab), target.dtype)
    if topology.deterministic:
        rounds += fixed_bytes(shape, shard, target.dtype, num_slots, topology.engine.fixed_rows)
    return Memory(held, target_cache(topology, shape, shard), rounds)


def drafter_memory(topology: Topology, target: ModelShape, own: ModelShape | None, head: Path | None) -> Memory:
    """Of a drafter wherever it runs, all its sources together: nothing of those that have no weights of their own.

    own: of its model. head: the folder of its head. Beside either, or alone, it may have a layer of the target's.
    """
    dtype, quantize = topology.draft.dtype or topology.target.dtype, topology.draft.quantize
    held = Memory()

    def rounds(shape: ModelShape) -> int:
        return working_bytes(shape, whole_shard(shape), dtype, draft_slots(topology), ROW_COUNTS[-1])

    if own is not None:
        kept = draft_cache(topology, own, dtype)
        held += Memory(weight_bytes(own, whole_shard(own), dtype, quantize), kept, rounds(own))
    if head is not None:
        is_eagle = "eagle" in topology.draft.sources
        one_layer = is_eagle and not is_assistant(head)
        taken = rounds(layer_shape(head)) if one_layer else recorded_bytes(target.vocab, dtype)
        held += Memory(head_bytes(head, target, dtype, is_eagle=is_eagle), head_cache(topology, target, head), taken)
    if topology.draft.has_own_layer:
        layer = last_layer(target)
        held += Memory(layer_bytes(target, dtype, quantize), layer_cache(topology, layer), rounds(layer))
    return held
