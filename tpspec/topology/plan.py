"""Which way of sharding and drafting a box should be fastest: enumerates, refuses what does not fit, ranks.

Everything here is a prediction of `cost.py`. Must not print, write a file (`proposal.py` words it) or need the cards.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tpspec.errors import OutOfMemory, UserError
from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.published.shape import check_card, shape_of
from tpspec.topology.balance import Capacity, balanced
from tpspec.topology.caches import (
    States,
    draft_states,
    kv_bytes,
    kv_bytes_read,
    num_attended,
    num_told,
    recent_of,
    state_bytes,
    states_of,
)
from tpspec.topology.config import CacheConfig, EngineConfig, ServeConfig
from tpspec.topology.cost import (
    Load,
    Prediction,
    StepCost,
    gaps_round_s,
    overlapped_round_s,
    predict,
    sequential_round_s,
    step_cost,
    thin_step,
    tokens_per_round,
)
from tpspec.topology.layout import Layout, Plan, Ranking, Refusal, Wish
from tpspec.topology.shards import split, whole_shard
from tpspec.topology.sizes import expert_bytes, last_layer, layer_bytes, num_params, weight_bytes
from tpspec.topology.sources import SOURCES, check_behind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpspec.published.shape import ModelShape
    from tpspec.topology.shards import Shard

QUANTIZED: dict[int, str | None] = {16: None, 8: "int8", 4: "int4"}
MOST_DRAFTED = 16
# Rounds whose drafts were ready: 80-90% published for fan-out 3; estimated here.
HIT_RATE = 0.8
FAN_OUT = 3
TRIES = 8  # to give each card no more than it has room for


def plan(wish: Wish) -> Ranking:
    """Raises UserError for names nobody knows, OutOfMemory when nothing fits."""
    if not 0 <= wish.acceptance <= 1:
        raise UserError(f"--acceptance {wish.acceptance}: should be between 0 and 1")
    _check_draft(wish.draft)
    if wish.link is None and len(wish.gpus) > 1:
        raise UserError("--link is missing; should be a slot such as pcie4, a box of links.yaml, or a probe's file")
    planner = _Planner(wish)
    judged = [planner.judge(layout) for layout in planner.layouts()]
    plans = [one for one in judged if isinstance(one, Plan)]
    refusals = sorted((one for one in judged if isinstance(one, Refusal)), key=lambda one: one.short_bytes)
    if not plans:
        raise OutOfMemory(_nothing_fits(wish, refusals[0]))
    ranked = sorted(plans, key=lambda one: -one.prediction.tokens_per_s)
    return Ranking(tuple(ranked), tuple(refusals))


def _check_draft(draft: str) -> None:
    """Refuses a source that stands for a model or a head: only its folder says what a draft costs, if anything does."""
    kind, costed = SOURCES.get(draft), [name for name, one in SOURCES.items() if one.behind or not one.computes]
    if draft and (kind is None or draft in costed):
        return
    what = (
        "is empty" if kind is None else "costs what its model does" if kind.loads == "model" else "is not costed here"
    )
    raise UserError(
        f"--draft {draft}: {what}; should be a draft model's folder or hub id, or one of {', '.join(costed)}"
    )


def _nothing_fits(wish: Wish, nearest: Refusal) -> str:
    layout = nearest.layout
    return (
        f"{wish.model} does not fit these cards with {wish.context} tokens of context: the nearest, "
        f"{len(layout.shards)} shards of {layout.bits} bits, is {nearest.short_bytes / 2**30:.1f} GiB short "
        f"on a {nearest.card.name}"
    )


class _Planner:
    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.target = shape_of(wish.model)
        check_card(self.target)
        self.draft = None
        if wish.behind:
            check_behind(self.target)
            self.draft = last_layer(self.target)
        elif wish.draft_model is not None:
            self.draft = shape_of(wish.draft_model)
        self.left_out = wish.left_out(self.target)
        self._known: dict[Layout, tuple[float, ...]] = {}  # weights of layouts
        self.by_speed = sorted(range(len(wish.gpus)), key=lambda index: -wish.gpus[index].gbytes_per_s)
        wish.link_for(2)  # an unknown name is told before anything is computed

    def layouts(self) -> Iterator[Layout]:
        for num_shards in range(1, min(len(self.by_speed), self.target.most_shards) + 1):
            for bits in widths(self.target):
                for layout in self._placed(num_shards, bits):
                    yield layout
                    if self.target.usual.joint_norm and num_shards > 1:
                        yield replace(layout, replicates_norm=True)

    def _placed(self, num_shards: int, bits: int) -> Iterator[Layout]:
        shards = tuple(self.by_speed[:num_shards])
        yield Layout(shards, bits, "none")
        if self.wish.draft != "none":
            yield Layout(shards, bits, "inline")
        if self.draft is None:
            return
        if num_shards > 1:
            yield Layout(shards, bits, "gaps", self._roomiest(shards, bits))
        for drafter in self._kinds():
            others = tuple(index for index in self.by_speed if index != drafter)[:num_shards]
            if len(others) == num_shards:
                yield Layout(others, bits, "dedicated", drafter)

    def _kinds(self) -> list[int]:
        """One card of each kind, the last of it: any of them may be the one that drafts."""
        return list({self.wish.gpus[index].name: index for index in self.by_speed}.values())

    def _roomiest(self, shards: tuple[int, ...], bits: int) -> int:
        """The card with most memory left for a drafter beside its shard; of equals the last, not the lead."""
        alone = Layout(shards, bits, "none")
        held = self._shard_memory(alone, self._weights(alone))
        left = {index: self.wish.gpus[index].usable_bytes - own for index, own in zip(shards, held, strict=True)}
        return max(reversed(shards), key=left.__getitem__)

    def judge(self, layout: Layout) -> Plan | Refusal:
        memory = self._memory(layout)
        over = [own - self.wish.gpus[index].usable_bytes for index, own in zip(layout.cards, memory, strict=True)]
        if max(over) > 0:
            return Refusal(layout, max(over), self.wish.gpus[layout.cards[over.index(max(over))]])
        step, thin = self._step(layout, self._target(layout)), self._thin_step(layout)
        draft_s = self._draft_s(layout) if thin is None else thin.seconds(1)
        lengths = [0] if layout.placement == "none" else range(1, MOST_DRAFTED + 1)
        predicted = {length: self._predict(layout, step, draft_s, length, thin) for length in lengths}
        best = max(predicted, key=lambda length: predicted[length].tokens_per_s)
        weights = self._weights(layout)
        return Plan(layout, weights, best, predicted[best], step, draft_s, memory, self._dtype(layout))

    def _predict(
        self, layout: Layout, step: StepCost, draft_s: float, num_drafted: int, thin: StepCost | None
    ) -> Prediction:
        step_s, drafting_s = step.seconds(num_drafted + 1), num_drafted * draft_s
        match layout.placement:
            case "dedicated":
                round_s = overlapped_round_s(step_s, drafting_s, HIT_RATE)
            case "gaps":
                round_s = gaps_round_s(step_s, drafting_s, HIT_RATE, step.waiting_s(num_drafted + 1))
            case _:
                round_s = sequential_round_s(step_s, drafting_s)
        return predict(step, num_drafted, tokens_per_round(self.wish.acceptance, num_drafted), round_s, thin)

    def _step(self, layout: Layout, shape: ModelShape) -> StepCost:
        on = [self.wish.gpus[index] for index in layout.shards]
        dtype = self._dtype(layout)
        loads = [self._load(shape, shard, layout.bits, dtype) for shard in self._split(layout)]
        row_bytes = DTYPE_BYTES[dtype] * shape.summed
        link = self.wish.link_for(len(on))
        return step_cost(loads, on, shape, row_bytes, link)

    def _thin_step(self, layout: Layout) -> StepCost | None:
        """A step of the target without what it leaves out when it drafts."""
        if self.left_out is None or layout.placement == "none":
            return None
        return thin_step(partial(self._step, layout), self._target(layout), self.left_out)

    def _draft_s(self, layout: Layout) -> float:
        """Seconds of one drafted token by a model, on the card that drafts it. Looking it up in the text is free."""
        if self.draft is None or layout.placement == "none":
            return 0.0
        load = self._load(self.draft, whole_shard(self.draft), 16, self._dtype(layout))
        load = replace(load, weights=self._draft_weights(layout))
        on = [self.wish.gpus[layout.drafts_at]]
        return step_cost([load], on, self.draft, 0, None).seconds(1)

    def _draft_weights(self, layout: Layout) -> int:
        """Bytes of what drafts with weights of its own, in 16 bits or more."""
        assert self.draft is not None, "of what is looked up there are none"
        dtype = self._dtype(layout)
        if self.wish.behind:
            return layer_bytes(self.target, dtype)
        return weight_bytes(self.draft, whole_shard(self.draft), dtype)

    def _dtype(self, layout: Layout) -> str:
        """As the cards have 16 bits; float32 where a model's numbers are too large for theirs."""
        if all(self.wish.gpus[index].dtype == "bfloat16" for index in layout.cards):
            return "bfloat16"
        models = [self.target] if self.draft is None or layout.placement == "none" else [self.target, self.draft]
        return "float16" if all(shape.usual.float16 for shape in models) else "float32"

    def _load(self, shape: ModelShape, shard: Shard, bits: int, dtype: str) -> Load:
        quantize = widths(shape).get(bits)
        return Load(
            weights=weight_bytes(shape, shard, dtype, quantize),
            params=num_params(shape, shard) + num_attended(shape, shard, self.wish.context),
            kv=kv_bytes_read(shape, shard, dtype, self.wish.context),
            bits=bits,
            expert_weights=expert_bytes(shape, shard, dtype, quantize),
            experts=shape.experts,
        )

    def _target(self, layout: Layout) -> ModelShape:
        return replace(self.target, replicates_norm=layout.replicates_norm)

    def _split(self, layout: Layout) -> tuple[Shard, ...]:
        return split(self.target, self._weights(layout))

    def _weights(self, layout: Layout) -> tuple[float, ...]:
        """How much each card should hold: in proportion to its bandwidth, for decoding waits for memory, as far as it
        has room for that. What is split at whole heads, or held by all, is in no proportion to what a card is given:
        one that holds too much is given less."""
        if layout in self._known:
            return self._known[layout]
        on = [self.wish.gpus[index] for index in layout.shards]
        rooms = [float(card.usable_bytes) for card in on]
        if (drafts_on := layout.rank_of_drafter or 0) < len(on):
            rooms[drafts_on] -= self._drafter_memory(layout)
        speeds = tuple(card.gbytes_per_s for card in on)
        weights, (whole,) = speeds, self._shard_memory(layout, (1.0,))
        for _ in range(TRIES):
            held = self._shard_memory(layout, weights)
            over = [max(0.0, size - room) for size, room in zip(held, rooms, strict=True)]
            if not any(over):
                break
            rooms = [room - more for room, more in zip(rooms, over, strict=True)]
            if sum(rooms) < whole or min(rooms) < 0:
                weights = speeds
                break
            parts = balanced(whole, [Capacity(*each) for each in zip(rooms, speeds, strict=True)])
            weights = tuple(round(part / max(parts), 3) for part in parts)
        self._known[layout] = weights
        return weights

    def _memory(self, layout: Layout) -> tuple[int, ...]:
        """Bytes of each rank, the drafter's own model where it runs."""
        held, own = self._shard_memory(layout, self._weights(layout)), self._drafter_memory(layout)
        if layout.placement == "dedicated":
            return (*held, own)
        return tuple(size + own * (layout.drafts_at == index) for index, size in zip(layout.shards, held, strict=True))

    def _drafter_memory(self, layout: Layout) -> int:
        """Bytes of what drafts with a model of its own."""
        if self.draft is None or layout.placement == "none":
            return 0
        states, dtype = draft_states(ServeConfig(), self.draft), self._dtype(layout)
        own = self._draft_weights(layout) + self._cached(self.draft, whole_shard(self.draft), dtype, states)
        if self.wish.behind:
            own += DTYPE_BYTES[dtype] * self.draft.hidden * num_told(ServeConfig(), self.wish.page_context)
        return own

    def _shard_memory(self, layout: Layout, weights: Sequence[float]) -> tuple[int, ...]:
        """Bytes of each part of the target, in these proportions."""
        target, dtype, quantize = self._target(layout), self._dtype(layout), widths(self.target).get(layout.bits)
        sections = CacheConfig(tokens=self.wish.page_context), ServeConfig(), EngineConfig()
        held = states_of(target, *sections), recent_of(target, *sections)
        return tuple(
            weight_bytes(target, shard, dtype, quantize) + self._cached(target, shard, dtype, *held)
            for shard in split(self.target, weights)
        )

    def _cached(self, shape: ModelShape, shard: Shard, dtype: str, states: States, num_recent: int = 0) -> int:
        """Bytes of the context, and of states."""
        held = kv_bytes(shape, shard, dtype, self.wish.page_context, num_recent)
        return held + state_bytes(shape, shard, dtype, states)


def widths(shape: ModelShape) -> dict[int, str | None]:
    """The bits its weights can have, and what a topology calls them; a quantized checkpoint has those it is held in, or
    fewer where it can be rounded."""
    bits = None if shape.stored is None else shape.stored.small_bits
    if shape.stored is None or bits is None:
        return QUANTIZED
    fewer = {} if shape.stored.widths else {own: name for own, name in QUANTIZED.items() if own < bits}
    return {bits: None} | fewer
