"""`cache.tokens: auto` becomes a number: on cards what they have room for, the same on every rank.

Knows topologies, and bytes that are free; must not know how many ranks there are besides those of one device.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import torch

from tpspec.comm.gap import in_a_thread
from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.published.shape import ModelShape
from tpspec.roles.fit import found_drafter
from tpspec.roles.memory import free_bytes
from tpspec.topology.config import USUAL_TOKENS
from tpspec.topology.held import MOST_TAPS, drafter_memory, shard_memory
from tpspec.topology.shards import split
from tpspec.topology.target_shape import found_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpspec.topology.config import Topology

LEAST_TOKENS = 2048  # whether there is room for those, who loads a shard finds out
MOST_TOKENS = 1 << 22
USEFUL_TEXTS = 64  # of the model's longest: those that run, and what others may begin with
GRAIN = 1024  # tokens
# Of a card's memory, for what NCCL, graphs and the allocator of a rank take besides; and for the same, and CUDA itself,
# of a drafter in a process of its own, which is not there yet. Estimated: of an 8B on an H200, without NCCL, a rank
# took 0.8 GiB, CUDA itself with it.
LEFT, LEAST_LEFT, PROCESS = 0.04, 1 << 30, 1 << 30
HOST_SHARE = 0.5  # of the host's free memory; there for those rows of what others may begin with


def num_cached(topology: Topology, device: torch.device, on_device: Sequence[int]) -> int:
    """Tokens, as far as this device decides. on_device: ranks of the world that share it, this one too."""
    if device.type != "cuda":
        return USUAL_TOKENS
    free = free_bytes(device)
    assert free is not None, "a card tells"
    if torch.cuda.get_device_properties(device).is_integrated:  # whose memory is the host's
        free = int(HOST_SHARE * free)
    return min(most_tokens(topology, on_device, free - left_on(topology, device, on_device)), _kept_on_host(topology))


def left_on(topology: Topology, device: torch.device, on_device: Sequence[int]) -> int:
    """Bytes that stay free for what is not counted, where a cache fills a card; 0 of others."""
    if device.type != "cuda" or topology.cache.tokens != "auto":
        return 0
    each = max(LEAST_LEFT, int(LEFT * torch.cuda.get_device_properties(device).total_memory))
    kind = topology.draft.placement.kind
    has_process = kind == "dedicated" or (kind == "gaps" and not in_a_thread(device))
    return len(on_device) * each + has_process * sum(map(topology.drafts_on, on_device)) * PROCESS


def most_tokens(topology: Topology, on_device: Sequence[int], room: int) -> int:
    """That these ranks have room for on one card, in so many bytes; LEAST_TOKENS where it is not even enough for them,
    and no more than the longest texts would fill."""
    shape = found_target(topology)
    most = min(MOST_TOKENS, (shape.max_positions or MOST_TOKENS) * max(USEFUL_TEXTS, topology.serve.max_running))
    grain = max(GRAIN, topology.cache.page)
    tokens = range(grain, most + grain, grain)
    return max(LEAST_TOKENS, grain * bisect_right(tokens, room, key=_held_by(topology, shape, on_device)))


def with_tokens(topology: Topology, tokens: int) -> Topology:
    """A page at least, as the rules of a topology have it."""
    cache = topology.cache.model_copy(update={"tokens": max(tokens, topology.cache.page)})
    return topology.model_copy(update={"cache": cache})


def _held_by(topology: Topology, shape: ModelShape, on_device: Sequence[int]) -> Callable[[int], int]:
    """Bytes that these ranks hold, of the tokens of the cache; the drafter's files are looked for once. shape: of the
    target."""
    target = topology.target
    assert target.fixed_weights is not None, "a seat settles auto weights first"
    shards = zip(target.ranks, split(shape, target.fixed_weights), strict=True)
    here = [shard for rank, shard in shards if rank in on_device]
    num_drafters = sum(map(topology.drafts_on, on_device))
    drafter = found_drafter(topology) if num_drafters else (None, None)

    def held(tokens: int) -> int:
        sized = with_tokens(topology, tokens)
        parts = [shard_memory(sized, shape, shard) for shard in here]
        parts += [drafter_memory(sized, shape, *drafter)] * num_drafters
        return sum(part.total(on_card=True) for part in parts)

    return held


def _kept_on_host(topology: Topology) -> int:
    """Tokens of which the host has room for what layers made of them, where that is kept (engine/taps.py)."""
    goes_on = any(kind.behind or kind.loads == "head" for kind in topology.draft.kinds)
    free = free_bytes(torch.device("cpu")) if goes_on and topology.cache.prefix else None
    if free is None:
        return MOST_TOKENS
    hidden = found_target(topology).hidden
    row = MOST_TAPS * hidden * DTYPE_BYTES[topology.target.dtype]
    return max(LEAST_TOKENS, int(HOST_SHARE * free) // row // GRAIN * GRAIN)
