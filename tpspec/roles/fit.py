"""What a topology's models are to hold on each rank, and whether it fits: sizes, pools, bytes. Reads no weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.cache.pages import PagePool
from tpspec.cache.windows import WindowedPool
from tpspec.model.graphs import ROW_COUNTS
from tpspec.roles.memory import check_memory
from tpspec.topology.caches import (
    draft_cache,
    draft_slots,
    head_cache,
    layer_cache,
    recent_slots,
    target_cache,
    target_slots,
)
from tpspec.topology.checkpoint import find
from tpspec.topology.head_files import head_bytes
from tpspec.topology.shape import ModelShape
from tpspec.topology.shards import split
from tpspec.topology.sizes import DTYPE_BYTES, last_layer, layer_bytes, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tpspec.topology.config import Topology
    from tpspec.topology.shards import Shard


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
    shards = _shard_bytes(topology, on_card=device.type == "cuda")
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
    return f"with {topology.cache.tokens} cached tokens"


def _shard_bytes(topology: Topology, *, on_card: bool) -> dict[int, int]:
    """By rank of the world."""
    target, shape = topology.target, ModelShape.of(find(topology.target.model))
    assert target.fixed_weights is not None, "a seat settles auto weights first"
    held = (
        _bytes(shape, shard, target.dtype, target.quantize, on_card=on_card) + target_cache(topology, shape, shard)
        for shard in split(shape, target.fixed_weights)
    )
    return dict(zip(target.ranks, held, strict=True))


def draft_bytes(topology: Topology, *, on_card: bool) -> int:
    """Of the drafter's own model, head or layer, 0 where it has none."""
    if topology.draft.head is not None:
        folder = find(topology.draft.head, head=True)
        return head_bytes(folder) + head_cache(topology, ModelShape.of(find(topology.target.model)), folder)
    dtype, quantize = topology.draft.dtype or topology.target.dtype, topology.draft.quantize
    if topology.draft.has_own_layer:
        target = ModelShape.of(find(topology.target.model))
        return layer_bytes(target, dtype, quantize) + layer_cache(topology, last_layer(target))
    if (model := topology.draft.own_model) is None:
        return 0
    shape = ModelShape.of(find(model))
    (whole,) = split(shape, (1.0,))
    return _bytes(shape, whole, dtype, quantize, on_card=on_card) + draft_cache(topology, shape, whole, dtype)


def _bytes(shape: ModelShape, shard: Shard, dtype: str, quantize: str | None, *, on_card: bool) -> int:
    """Beside its cache."""
    recorded = sum(ROW_COUNTS) * len(shard.vocab) * DTYPE_BYTES[dtype] if on_card else 0  # logits that stay there
    return weight_bytes(shape, shard, dtype, quantize) + recorded
