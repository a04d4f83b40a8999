"""What a topology means, as lines of text: each rank's role, slices and memory, and what a round sends.

Computes from sizes alone; must not print, import torch, read a weight or need a card.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpspec.published.assistants import check_assistant
from tpspec.published.checkpoint import check_name, local
from tpspec.published.head_files import check_eagle, check_layer, check_medusa, is_assistant
from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.published.parallel import mask_of
from tpspec.published.shape import ModelShape, check_card, shape_of
from tpspec.published.tokenizers import FILE, check_same_tokenizer
from tpspec.topology.caches import draft_states, each_state, num_states
from tpspec.topology.config import Topology
from tpspec.topology.held import Memory, drafter_memory, shard_memory
from tpspec.topology.rank_paths import CHOICES, read_choices
from tpspec.topology.rounds import FEW_ROWS, collectives_per_draft, collectives_per_round, round_bytes
from tpspec.topology.shards import Shard, split, whole_shard
from tpspec.topology.sources import check_behind
from tpspec.topology.target_shape import target_shape

HEADERS = ("rank", "role", "query heads", "kv heads", "channels", "vocab rows", "weights", "kv cache")
NO_SLICES = ("-", "-", "-", "-")


def describe(topology: Topology) -> list[str]:
    """The lines that `check` prints."""
    shape = target_shape(topology)
    if topology.device == "cuda":
        check_card(shape)
    target, draft = topology.target, topology.draft
    drafter = " ".join(filter(None, (" then ".join(draft.sources), draft.own_model or draft.head)))
    return [
        topology.name,
        f"target {target.model} ({target.quantize or target.dtype}), accept by {topology.accept}",
        f"draft {drafter}, tokens {draft.tokens}, pipeline {topology.pipeline.policy}",
        "",
        *table(list(_rows(topology, shape))),
        *_global_heads(topology, shape),
        *_states(topology, shape),
        "",
        *_round(topology, shape),
        *_notes(topology, shape),
    ]


def _rows(topology: Topology, shape: ModelShape) -> Iterator[tuple[str, ...]]:
    """The heads, and a row for each rank; what rounds take where there may be cards."""
    on_card = topology.device != "cpu"
    yield (*HEADERS, *(["rounds"] if on_card else []), "total")
    holders = dict(zip(topology.target.ranks, _shards(topology, shape), strict=True))
    for rank, memory in enumerate(memories(topology)):
        slices = _slices(holders[rank]) if rank in holders else NO_SLICES
        sizes = memory.weights, memory.kv, *([memory.rounds] if on_card else []), memory.total(on_card=on_card)
        yield (str(rank), _role(topology, rank), *slices, *map(_size, sizes))


def memories(topology: Topology) -> list[Memory]:
    """Of each rank: its shard, and the drafter that runs there."""
    shape, drafter = target_shape(topology), _drafter_memory(topology)
    shards = (shard_memory(topology, shape, shard) for shard in _shards(topology, shape))
    held = dict(zip(topology.target.ranks, shards, strict=True))
    return [
        held.get(rank, Memory()) + (drafter if topology.drafts_on(rank) else Memory())
        for rank in range(topology.num_ranks)
    ]


def _shards(topology: Topology, shape: ModelShape) -> tuple[Shard, ...]:
    return split(shape, topology.target.fixed_weights or (1.0,) * len(topology.target.ranks))


def _drafter_memory(topology: Topology) -> Memory:
    """A head that is not here counts 0. UserError where what is named cannot draft."""
    draft, target, head, own = topology.draft, target_shape(topology), None, None
    if draft.tree == "static" and (choices := draft.options.get(CHOICES)) is not None:
        read_choices(str(choices))
    if draft.has_own_layer and (folder := local(topology.target.model)) is not None:
        check_behind(target)
        check_layer(folder, target.num_layers)
    if draft.head is not None and (head := local(draft.head, head=True)) is not None:
        if is_assistant(head):
            check_assistant(target, head)
        elif "eagle" in draft.sources:
            check_eagle(head, target.hidden)
        else:
            check_medusa(head)
    if draft.own_model is not None:
        own = shape_of(draft.own_model)
        for kind in draft.kinds:
            if kind.loads == "model":
                kind.check_model(own, draft.own_model)
        if "pard" in draft.sources and (folder := local(draft.own_model)) is not None:
            mask_of(folder)
        _check_tokenizers(topology.target.model, draft.own_model)
    return drafter_memory(topology, target, own, head)


def _check_tokenizers(target: str, draft: str) -> None:
    """UserError where both are here, and differ."""
    ours, theirs = local(target), local(draft)
    if ours is not None and theirs is not None and (ours / FILE).is_file() and (theirs / FILE).is_file():
        check_same_tokenizer(ours, theirs, target, draft)


def _global_heads(topology: Topology, shape: ModelShape) -> Iterator[str]:
    """What the table does not say of a model some of whose layers have others."""
    if shape.global_heads is not None:
        each = [" and ".join(map(_slice, (one.global_heads, one.global_kv_heads))) for one in _shards(topology, shape)]
        yield f"query and kv heads of layers that see everything: {', '.join(each)}"


def _states(topology: Topology, shape: ModelShape) -> Iterator[str]:
    """What of the caches is of no token."""
    target, draft = topology.target, topology.draft
    if shape.stateful:
        count = num_states(topology, shape)
        each = [each_state(shape, shard, target.dtype) for shard in _shards(topology, shape)]
        text, beginning = (_size(sum(sizes)) for sizes in zip(*each, strict=True))
        texts = f"{count.running} texts that run, {text} each, and of {count.kept} beginnings, {beginning} each"
        yield f"kv caches hold states, too: of {texts}"
    if draft.own_model is not None and (own := shape_of(draft.own_model)).stateful:
        running = draft_states(topology.serve, own).running
        size = _size(each_state(own, whole_shard(own), draft.dtype or target.dtype).running)
        yield f"the draft model's holds states, too: of {running} texts, {size} each"


def _role(topology: Topology, rank: int) -> str:
    if topology.role_of(rank) == "drafter":
        return "dedicated drafter"
    if not topology.drafts_on(rank):
        return "target shard"
    return "target shard, drafts " + ("inline" if topology.draft.placement.kind == "inline" else "in gaps")


def _slices(shard: Shard) -> tuple[str, ...]:
    return tuple(map(_slice, (shard.heads, shard.kv_heads, shard.channels, shard.vocab)))


def _slice(part: range) -> str:
    return f"{part.start}-{part.stop - 1} ({len(part)})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _round(topology: Topology, shape: ModelShape) -> list[str]:
    num_shards = len(topology.target.ranks)
    sent = round_bytes(shape, num_shards, 1, DTYPE_BYTES[topology.target.dtype])
    said = {purpose: num_bytes for purpose, num_bytes in sent.items() if num_bytes} or sent
    purposes = ", ".join(f"{purpose} {num_bytes:,}" for purpose, num_bytes in said.items())
    of_few = f", of up to {FEW_ROWS} rows" if shape.replicates_norm else ""
    return [
        f"collectives per round{of_few}: {collectives_per_round(shape, num_shards)}",
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


def _notes(topology: Topology, shape: ModelShape) -> Iterator[str]:
    for bits, held in () if shape.stored is None else shape.stored.widths:
        if bits != held:
            yield f"codes of {bits} bits are held in {held}, and weights above are what that takes"
    if topology.target.fixed_weights is None:
        yield "slices above are for equal weights; auto decides them on the machine, from its cards"
    if topology.cache.tokens == "auto" and topology.device != "cpu":
        yield f"kv caches above are of {topology.cache.num_tokens} tokens; auto is on cards what they have room for"
    head = topology.draft.head
    if head is not None and local(head, head=True) is None:
        check_name(head, head=True)
        yield f"head {head} is not here, so its memory is not counted; a run looks for it on the hub"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of columns, the first row the heads."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
