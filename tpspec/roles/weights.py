"""`target.weights: auto` becomes numbers: each rank says what it has, and all of them compute the same parts.

Knows topologies and devices; reads no weight. Which part is whose is topology/balance.py's matter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.published.shape import ModelShape
from tpspec.roles.fit import draft_bytes
from tpspec.roles.memory import free_bytes
from tpspec.roles.room import left_on
from tpspec.topology.balance import Capacity, balanced
from tpspec.topology.caches import target_cache
from tpspec.topology.cards import card
from tpspec.topology.held import shard_memory
from tpspec.topology.rounds import NORM_BYTES, all_reduces
from tpspec.topology.shards import split, whole_shard
from tpspec.topology.sizes import expert_bytes, weight_bytes
from tpspec.topology.target_shape import found_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.topology.config import Topology
    from tpspec.topology.shards import Shard

# Ranks on the CPUs of a box count as equals; what one of them reads alone, of a server's memory. Estimated.
CPU_BYTES_PER_S = 4e10
UNKNOWN_BYTES_PER_S = 4e11  # of a card that topology/cards.yaml does not list; estimated
USUAL_DRAFT = 4  # tokens of a round where the topology leaves their number open


def capacity(topology: Topology, rank: int, device: torch.device, on_device: Sequence[int]) -> Capacity:
    """Of this rank. on_device: ranks of the world that share its device, this one too."""
    drafting = draft_bytes(topology, on_card=device.type == "cuda") if topology.draft.source != "none" else 0
    sharing = [other for other in on_device if other in topology.target.ranks]
    held = drafting * sum(topology.drafts_on(other) for other in on_device) + left_on(topology, device, on_device)
    free = free_bytes(device)
    room = (float(2**62) if free is None else float(free - held)) / max(1, len(sharing))
    room -= _rounds(topology) if device.type == "cuda" else 0
    others = _others(topology)
    speed = _bytes_per_s(device)
    beside = topology.draft.placement.kind == "gaps" and topology.draft.placement.rank == rank
    aside = others + (_aside(topology, drafting, speed) if beside else 0.0)
    return Capacity(max(room - others, 0.0), speed, aside)


def with_weights(topology: Topology, capacities: Sequence[Capacity]) -> Topology:
    """The topology with a number for each target rank. Raises OutOfMemory where nothing would fit."""
    shape, target = found_target(topology), topology.target
    whole = whole_shard(shape)
    cached = target_cache(topology, shape, whole)
    held = weight_bytes(shape, whole, target.dtype, target.quantize) + cached
    parts = balanced(held, capacities, 1 - _idle(topology, shape, whole) / held)
    weights = tuple(round(part / max(parts), 3) for part in parts)
    return topology.model_copy(update={"target": target.model_copy(update={"weights": weights})})


def _rounds(topology: Topology) -> int:
    """Bytes of what rounds take of a card, as if all ranks held equal parts."""
    shape = found_target(topology)
    return max(
        shard_memory(topology, shape, shard).rounds for shard in split(shape, (1.0,) * len(topology.target.ranks))
    )


def _others(topology: Topology) -> int:
    """Bytes of what a rank makes of other ranks' heads, as if all ranks held equal parts."""
    target, shape = topology.target, found_target(topology)
    if not shape.replicates_norm:
        return 0
    alone = replace(shape, replicates_norm=False)
    shards = split(shape, (1.0,) * len(target.ranks))
    with_others, own = (
        [weight_bytes(one, shard, target.dtype, target.quantize) for shard in shards] for one in (shape, alone)
    )
    return max(more - less for more, less in zip(with_others, own, strict=True))


def _idle(topology: Topology, shape: ModelShape, whole: Shard) -> float:
    """Bytes of the experts that no row of a round is sent to."""
    if shape.experts is None:
        return 0.0
    of_experts = expert_bytes(shape, whole, topology.target.dtype, topology.target.quantize)
    return of_experts * (1 - shape.experts.share_read(_num_drafted(topology) + 1))


def _num_drafted(topology: Topology) -> int:
    return USUAL_DRAFT if topology.draft.tokens == "auto" else topology.draft.tokens


def _bytes_per_s(device: torch.device) -> float:
    if device.type != "cuda":
        return CPU_BYTES_PER_S
    try:
        return card(torch.cuda.get_device_name(device)).gbytes_per_s * 1e9
    except UserError:
        return UNKNOWN_BYTES_PER_S


def _aside(topology: Topology, draft: int, speed: float) -> float:
    """What a drafter in the gaps reads in a round beyond what it reads while its shard waits."""
    num_drafted = _num_drafted(topology)
    waits_s = _waits_s(topology, found_target(topology), num_drafted + 1)
    return draft if waits_s is None else max(0.0, num_drafted * draft - waits_s * speed)


def _waits_s(topology: Topology, shape: ModelShape, num_rows: int) -> float | None:
    """Of a shard in a round; None where the topology does not say what a collective takes."""
    link = topology.link  # what is emulated is the box that it names, whatever the number of ranks
    cost = link.cost if link.emulate else link.cost_for(len(topology.target.ranks))
    if cost is None:
        return None
    row_bytes = shape.summed * DTYPE_BYTES[topology.target.dtype]
    dilation = link.dilation if link.emulate else 1.0
    sent = all_reduces(shape)
    waits_s = sent.rows * cost.seconds(num_rows * row_bytes) + sent.norms * cost.seconds(num_rows * NORM_BYTES)
    return waits_s * dilation
