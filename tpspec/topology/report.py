"""What a topology means, as lines of text: each rank's role, slices and memory, and what a round sends.

Computes from sizes alone; must not print, import torch, read a weight or need a card.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from tpspec.topology.assistants import check_assistant
from tpspec.topology.caches import (
    draft_cache,
    draft_states,
    each_state,
    head_cache,
    layer_cache,
    num_states,
    target_cache,
)
from tpspec.topology.checkpoint import check_name, local
from tpspec.topology.config import Topology
from tpspec.topology.head_files import check_layer, head_bytes, is_assistant
from tpspec.topology.rounds import collectives_per_draft, collectives_per_round, round_bytes
from tpspec.topology.shape import ModelShape, shape_of
from tpspec.topology.shards import Shard, split
from tpspec.topology.sizes import DTYPE_BYTES, last_layer, layer_bytes, weight_bytes

HEADERS = ("rank", "role", "query heads", "kv heads", "channels", "vocab rows", "weights", "kv cache", "total")
NO_SLICES = ("-", "-", "-", "-")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank."""

    weights: int = 0
    kv: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.weights + other.weights, self.kv + other.kv)

    @property
    def total(self) -> int:
        return self.weights + self.kv


def describe(topology: Topology) -> list[str]:
    """The lines that `check` prints."""
    shape = shape_of(topology.target.model)
    target, draft = topology.target, topology.draft
    drafter = " ".join(filter(None, (" then ".join(draft.sources), draft.own_model or draft.head)))
    return [
        topology.name,
        f"target {target.model} ({target.quantize or target.dtype}), accept by {topology.accept}",
        f"draft {drafter}, tokens {draft.tokens}, pipeline {topology.pipeline.policy}",
        "",
        *table([HEADERS, *_rows(topology, shape)]),
        *_states(topology, shape),
        "",
        *_round(topology, shape),
        *_notes(topology),
    ]


def _rows(topology: Topology, shape: ModelShape) -> Iterator[tuple[str, ...]]:
    holders = dict(zip(topology.target.ranks, _shards(topology, shape), strict=True))
    for rank, memory in enumerate(memories(topology)):
        slices = _slices(holders[rank]) if rank in holders else NO_SLICES
        yield (str(rank), _role(topology, rank), *slices, *map(_size, (*astuple(memory), memory.total)))


def memories(topology: Topology) -> list[Memory]:
    """Of each rank: its shard, and the drafter that runs there."""
    shape, drafter = shape_of(topology.target.model), _drafter_memory(topology)
    shards = (_shard_memory(topology, shape, shard) for shard in _shards(topology, shape))
    held = dict(zip(topology.target.ranks, shards, strict=True))
    return [
        held.get(rank, Memory()) + (drafter if topology.drafts_on(rank) else Memory())
        for rank in range(topology.num_ranks)
    ]


def _shards(topology: Topology, shape: ModelShape) -> tuple[Shard, ...]:
    return split(shape, topology.target.fixed_weights or (1.0,) * len(topology.target.ranks))


def _shard_memory(topology: Topology, shape: ModelShape, shard: Shard) -> Memory:
    held = weight_bytes(shape, shard, topology.target.dtype, topology.target.quantize)
    return Memory(held, target_cache(topology, shape, shard))


def _drafter_memory(topology: Topology) -> Memory:
    """A drafter's model is whole wherever it runs, and keeps a cache of its own. A head that is not here counts 0."""
    if topology.draft.head is not None:
        folder = local(topology.draft.head, head=True)
        if folder is None:
            return Memory()
        target = shape_of(topology.target.model)
        if is_assistant(folder):
            check_assistant(target, folder)
        return Memory(head_bytes(folder), head_cache(topology, target, folder))
    dtype, quantize = topology.draft.dtype or topology.target.dtype, topology.draft.quantize
    if topology.draft.has_own_layer:
        target = shape_of(topology.target.model)
        if (folder := local(topology.target.model)) is not None:
            check_layer(folder, target.num_layers)
        return Memory(layer_bytes(target, dtype, quantize), layer_cache(topology, last_layer(target)))
    if topology.draft.own_model is None:
        return Memory()
    shape = shape_of(topology.draft.own_model)
    for kind in topology.draft.kinds:
        if kind.loads == "model":
            kind.check_model(shape, topology.draft.own_model)
    (whole,) = split(shape, (1.0,))
    return Memory(weight_bytes(shape, whole, dtype, quantize), draft_cache(topology, shape, whole, dtype))


def _states(topology: Topology, shape: ModelShape) -> Iterator[str]:
    """What of the caches is of no token."""
    target, draft = topology.target, topology.draft
    if shape.delta_net is not None:
        count = num_states(topology, shape)
        each = [each_state(shape, shard, target.dtype) for shard in _shards(topology, shape)]
        text, beginning = (_size(sum(sizes)) for sizes in zip(*each, strict=True))
        texts = f"{count.running} texts that run, {text} each, and of {count.kept} beginnings, {beginning} each"
        yield f"kv caches hold states, too: of {texts}"
    if draft.own_model is not None and (own := shape_of(draft.own_model)).delta_net is not None:
        (whole,) = split(own, (1.0,))
        running = draft_states(topology.serve, own).running
        size = _size(each_state(own, whole, draft.dtype or target.dtype).running)
        yield f"the draft model's holds states, too: of {running} texts, {size} each"


def _role(topology: Topology, rank: int) -> str:
    if topology.role_of(rank) == "drafter":
        return "dedicated drafter"
    if not topology.drafts_on(rank):
        return "target shard"
    return "target shard, drafts " + ("inline" if topology.draft.placement.kind == "inline" else "in gaps")


def _slices(shard: Shard) -> tuple[str, ...]:
    parts = (shard.heads, shard.kv_heads, shard.channels, shard.vocab)
    return tuple(f"{part.start}-{part.stop - 1} ({len(part)})" for part in parts)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _round(topology: Topology, shape: ModelShape) -> list[str]:
    num_shards = len(topology.target.ranks)
    sent = round_bytes(shape, num_shards, 1, DTYPE_BYTES[topology.target.dtype])
    purposes = ", ".join(f"{purpose} {num_bytes:,}" for purpose, num_bytes in sent.items())
    return [
        f"collectives per round: {collectives_per_round(shape, num_shards)}",
        *_drafting(topology, shape),
        f"bytes each rank contributes, per row of a round: {sum(sent.values()):,} ({purposes})",
    ]


def _drafting(topology: Topology, shape: ModelShape) -> Iterator[str]:
    """What drafts add to a round, where the target itself makes them."""
    draft, num_shards = topology.draft, len(topology.target.ranks)
    folder = local(topology.target.model)
    for name, kind in zip(draft.sources, draft.kinds, strict=True):
        left_out = kind.left_out(draft.options, folder, shape)
        if left_out is None:
            continue
        each = collectives_per_draft(shape, num_shards, left_out)
        kept = f"{2 * shape.num_layers - len(left_out)} of {2 * shape.num_layers} sublayers"
        yield f"collectives per token drafted by {name}: {each}, of {kept}"


def _notes(topology: Topology) -> Iterator[str]:
    if topology.target.fixed_weights is None:
        yield "slices above are for equal weights; auto decides them on the machine, from its cards"
    head = topology.draft.head
    if head is not None and local(head, head=True) is None:
        check_name(head)
        yield f"head {head} is not here, so its memory is not counted; a run looks for it on the hub"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of columns, the first row the heads."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
