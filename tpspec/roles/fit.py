"""What a topology's models are to hold on each rank, and whether it fits: sizes, pools, bytes. Reads no weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.cache.pages import PagePool
from tpspec.cache.windows import WindowedPool
from tpspec.published.checkpoint import find
from tpspec.published.shape import ModelShape
from tpspec.roles.memory import check_memory
from tpspec.topology.caches import draft_slots, recent_slots, target_slots
from tpspec.topology.held import drafter_memory, shard_memory
from tpspec.topology.shards import split
from tpspec.topology.target_shape import found_target

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from tpspec.topology.config import Topology


def target_pool(topology: Topology, shape: ModelShape) -> PagePool:
    page = topology.cache.page
    num_pages, num_recent = target_slots(topology) // page, recent_slots(topology, shape) // page
    if shape.window is None or not num_recent:
        return PagePool(num_pages, page)
    return WindowedPool(num_pages, page, shape.window, num_recent)


def draft_pool(topology: Topology) -> PagePool:
    return PagePool(draft_slots(topology) // topology.cache.page, topology.cache.page)


def check_fits(topology: Topology, rank: int, device: torch.device, on_device: Sequence[int]) -> None:
    """OutOfMemory where this rank's shard, or its drafter's model, finds no room beside what on_device puts there.

    on_device: ranks of the world, this one too. For all of them to ask before any loads: later, each would find the
    memory free that its neighbours are about to take.
    """
    shards = shard_bytes(topology, on_card=device.type == "cuda")
    held = sum(shards.get(other, 0) for other in on_device)
    if rank in shards:
        what = f"shard {topology.target.ranks.index(rank)} of {topology.target.model} {_cached(topology)}"
        check_memory(shards[rank], device, what, held - shards[rank])
    check_drafter_fits(topology, rank, device, on_device, held)


def check_drafter_fits(
    topology: Topology, rank: int, device: torch.device, on_device: Sequence[int], held: int = 0
) -> None:
    """The same for the drafter alone. held: bytes that shards are about to take beside it."""
    draft = draft_bytes(topology, on_card=device.type == "cuda")
    if draft and topology.drafts_on(rank):
        drafting = draft * sum(topology.drafts_on(other) for other in on_device)
        model = topology.draft.own_model or topology.draft.head
        drafter = f"the layer of {topology.target.model} that drafts" if model is None else f"draft model {model}"
        check_memory(draft, device, f"{drafter} {_cached(topology)}", held + drafting - draft)


def _cached(topology: Topology) -> str:
    return f"with {topology.cache.num_tokens} cached tokens"


def shard_bytes(topology: Topology, *, on_card: bool) -> dict[int, int]:
    """By rank of the world."""
    target, shape = topology.target, found_target(topology)
    assert target.fixed_weights is not None, "a seat settles auto weights first"
    shards = zip(target.ranks, split(shape, target.fixed_weights), strict=True)
    return {rank: shard_memory(topology, shape, shard).total(on_card=on_card) for rank, shard in shards}


def draft_bytes(topology: Topology, *, on_card: bool) -> int:
    """Of the drafter's own model, head or layer, 0 where it has none."""
    target = found_target(topology)
    return drafter_memory(topology, target, *found_drafter(topology)).total(on_card=on_card)


def found_drafter(topology: Topology) -> tuple[ModelShape | None, Path | None]:
    """Of its own model the shape, and of its head the folder, where it has such."""
    draft = topology.draft
    head = None if draft.head is None else find(draft.head, head=True)
    return None if draft.own_model is None else ModelShape.of(find(draft.own_model)), head
