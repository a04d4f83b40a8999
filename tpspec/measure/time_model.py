"""What a simulated round costs: from the cards and the link of a topology, or from the rounds that were recorded.

Knows sizes, cards and recorded seconds; must not know a round's order, an engine or tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from tpspec.errors import OutOfMemory, UserError
from tpspec.measure.trace import samples_of
from tpspec.published.checkpoint import local
from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.published.shape import shape_of
from tpspec.topology.caches import kv_bytes_read, num_attended, target_cache
from tpspec.topology.calibration import Sample, fit
from tpspec.topology.cost import Load, RankCost, StepCost, step_cost, thin_step
from tpspec.topology.links import LinkTable
from tpspec.topology.shards import split, whole_shard
from tpspec.topology.sizes import expert_bytes, num_params, weight_bytes
from tpspec.topology.sources import SOURCES
from tpspec.topology.target_shape import target_shape

if TYPE_CHECKING:
    from tpspec.measure.trace import Recording, Round
    from tpspec.published.shape import ModelShape
    from tpspec.topology.cards import Card
    from tpspec.topology.config import Topology
    from tpspec.topology.shards import Shard
    from tpspec.topology.sublayers import Sublayers

WEIGHT_BITS = {None: 16, "int8": 8, "int4": 4}
# Until a message over loopback or ipc is read; estimated.
MESSAGE_S = 100e-6
DRAFT_ROW_SHARE = 0.05  # of a recorded draft step, for each row more; estimated, for no recorded one has two


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds of everything. draft: of one step of the drafter, by its rows; None: drafts are free.

    message_s: until a message between the lead and a drafter on a rank of its own has arrived.
    """

    target: StepCost
    draft: StepCost | None = None
    message_s: float = MESSAGE_S


def on_cards(topology: Topology, gpus: Sequence[Card], context: int) -> TimeModel:
    """One card for each rank, in rank order. context: tokens that are cached, and read in every step."""
    if len(gpus) != topology.num_ranks:
        raise UserError(f"--gpus has {len(gpus)} cards; {topology.name} has {topology.num_ranks} ranks")
    target, shape = topology.target, target_shape(topology)
    shards = split(shape, target.fixed_weights or (1.0,) * len(target.ranks))
    on = [gpus[rank] for rank in target.ranks]
    for shard, card in zip(shards, on, strict=True):
        _check_fits(topology, shape, shard, card)
    row_bytes, link = shape.summed * DTYPE_BYTES[target.dtype], _link(topology)

    def step_of(shape: ModelShape) -> StepCost:
        kv = topology.cache_dtype
        loads = [_load(shape, shard, target.dtype, target.quantize, kv, context) for shard in shards]
        return step_cost(loads, on, shape, row_bytes, link)

    left_out = [_left_out(topology, name, shape) for name in topology.draft.sources]
    thin = [thin_step(step_of, shape, one) for one in left_out if one is not None]
    drafting = [*thin, *_whole_models(topology, gpus, context)]
    # Of several sources the dearest: whichever drafts, a step takes no longer.
    return TimeModel(step_of(shape), max(drafting, key=lambda step: step.seconds(1), default=None))


def _left_out(topology: Topology, name: str, shape: ModelShape) -> Sublayers | None:
    """Those that a source leaves out of the target; None where it does not draft with it. Refuses heads."""
    kind = SOURCES[name]
    if kind.computes and kind.loads != "model":
        raise UserError(
            f"source {name}: what its drafts cost on cards is not known; should be simulated with --calibrate, "
            "from a trace that drafted with it"
        )
    return kind.left_out(topology.draft.options, local(topology.target.model), shape)


def _whole_models(topology: Topology, gpus: Sequence[Card], context: int) -> Iterator[StepCost]:
    """A step of the draft model on each card that drafts. Looking drafts up in the text is free."""
    if topology.draft.own_model is None:
        return
    shape = shape_of(topology.draft.own_model)
    dtype = topology.draft.dtype or topology.target.dtype
    load = _load(shape, whole_shard(shape), dtype, topology.draft.quantize, dtype, context)
    for rank, gpu in enumerate(gpus):
        if topology.drafts_on(rank):
            yield step_cost([load], [gpu], shape, 0, None)


def _load(shape: ModelShape, shard: Shard, dtype: str, quantize: str | None, cache_dtype: str, context: int) -> Load:
    return Load(
        weights=weight_bytes(shape, shard, dtype, quantize),
        params=num_params(shape, shard) + num_attended(shape, shard, context),
        kv=kv_bytes_read(shape, shard, cache_dtype, context),
        bits=(quantize is None and shape.stored and shape.stored.small_bits) or WEIGHT_BITS[quantize],
        expert_weights=expert_bytes(shape, shard, dtype, quantize),
        experts=shape.experts,
    )


def _check_fits(topology: Topology, shape: ModelShape, shard: Shard, card: Card) -> None:
    """The target alone: what a drafter beside it needs is the planner's matter."""
    target = topology.target
    needed = weight_bytes(shape, shard, target.dtype, target.quantize)
    needed += target_cache(topology, shape, shard)
    if needed > card.usable_bytes:
        short = (needed - card.usable_bytes) / 2**30
        raise OutOfMemory(
            f"shard {shard.index} of {target.model} with {topology.cache.num_tokens} cached tokens is {short:.1f} GiB "
            f"short on a {card.name}"
        )


def _link(topology: Topology) -> LinkTable | None:
    num_shards, given = len(topology.target.ranks), topology.link
    if num_shards == 1:
        return None
    found = given.cost_for(num_shards)
    if found is None:
        raise UserError("link.table is missing; name the bus between the cards, for example --set link.table=pcie4")
    return found


def as_recorded(recordings: Sequence[Recording], topology: Topology) -> TimeModel:
    """Fitted to their rounds; the link is the topology's where that is emulated. UserError when there are too few."""
    rounds = [one for recording in recordings for one in (*recording.plain, *recording.speculative)]
    if not rounds:
        raise UserError("the trace has no recorded rounds to calibrate with; savings --trace FILE writes them")
    link = topology.link
    samples = [sample for recording in recordings for sample in _samples(recording)]
    fitted = fit(samples, _row_bytes(rounds), link.cost if link.emulate else None, link.dilation)
    context = fmean(sample.context for sample in samples)
    row_share = 1.0 if topology.draft.own_model is None else DRAFT_ROW_SHARE
    draft = RankCost(weights_s=(1 - row_share) * fitted.draft_s, row_s=row_share * fitted.draft_s)
    return TimeModel(fitted.step(context=context), StepCost((draft,)))


def _samples(recording: Recording) -> Iterator[Sample]:
    for rounds in (recording.plain, recording.speculative):
        yield from samples_of(rounds, recording.prompt_tokens)


def _row_bytes(rounds: Iterable[Round]) -> int:
    """Of one row in an all-reduce."""
    sent = [one for one in rounds if one.reduces]
    return round(fmean(one.reduce_bytes / (one.reduces * one.rows) for one in sent)) if sent else 0
