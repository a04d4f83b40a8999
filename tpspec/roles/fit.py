"""What a topology's models are to hold on each rank, and whether it fits: sizes, pools, bytes. Reads no weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.cache.pages import PagePool
from tpspec.model.graphs import ROW_COUNTS
from tpspec.roles.memory import check_memory
from tpspec.topology.checkpoint import find
from tpspec.topology.shape import ModelShape
from tpspec.topology.shards import DTYPE_BYTES, kv_bytes_per_token, layer_bytes, split, weight_bytes
from tpspec.topology.slots import draft_slots, head_bytes, target_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tpspec.topology.config import Topology
    from tpspec.topology.shards import Shard


def target_pool(topology: Topology) -> PagePool:
    return PagePool(target_slots(topology) // topology.cache.page, topology.cache.page)


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
    target, shape, slots = topology.target, ModelShape.of(find(topology.target.model)), target_slots(topology)
    assert target.fixed_weights is not None, "a seat settles auto weights first"
    shards = split(shape, target.fixed_weights)
    held = (
        _bytes(shape, own, target.dtype, target.quantize, topology.cache_dtype, slots, on_card=on_card)
        for own in shards
    )
    return dict(zip(target.ranks, held, strict=True))


def draft_bytes(topology: Topology, *, on_card: bool) -> int:
    """Of the drafter's own model, head or layer, 0 where it has none."""
    if topology.draft.head is not None:
        return head_bytes(find(topology.draft.head, head=True))
    dtype, quantize = topology.draft.dtype or topology.target.dtype, topology.draft.quantize
    if topology.draft.has_own_layer:
        return layer_bytes(ModelShape.of(find(topology.target.model)), dtype, quantize)
    if (model := topology.draft.own_model) is None:
        return 0
    shape = ModelShape.of(find(model))
    (whole,) = split(shape, (1.0,))
    return _bytes(shape, whole, dtype, quantize, dtype, draft_slots(topology), on_card=on_card)


def _bytes(
    shape: ModelShape,
    shard: Shard,
    dtype: str,
    quantize: str | None,
    cache_dtype: str,
    num_slots: int,
    *,
    on_card: bool,
) -> int:
    cached = num_slots * kv_bytes_per_token(shape, shard, cache_dtype)
    recorded = sum(ROW_COUNTS) * len(shard.vocab) * DTYPE_BYTES[dtype] if on_card else 0  # logits that stay there
    return weight_bytes(shape, shard, dtype, quantize) + cached + recorded
