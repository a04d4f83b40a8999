"""Words for what was planned: the table of the best ways, the reasons, and the topology file of the first of them.

Lines of text; must not print, write or compute a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from tpspec.topology.layout import Layout, Plan, Ranking, Refusal, Wish, boxed
from tpspec.topology.plan import HIT_RATE
from tpspec.topology.planned import topology_of
from tpspec.topology.report import table

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADS = ("tok/s", "shards", "draft", "K", "bits", "tok/round", "round ms", "waiting", "coll/tok", "fullest card", "why")
SHOWN = 10


def propose(wish: Wish, ranking: Ranking) -> list[str]:
    """The best ten as a table, and what did not fit."""
    shown = ranking.plans[:SHOWN]
    lines = [
        f"{wish.model} on {boxed(wish.gpus)}, link {wish.link or 'none'}, "
        f"acceptance {wish.acceptance}, context {wish.context}",
        "all of it predicted; measure before you believe",
        "",
        *table([HEADS, *(_row(wish, one) for one in shown)]),
    ]
    if len(ranking.plans) > SHOWN:
        lines.append(f"... and {len(ranking.plans) - SHOWN} more that fit")
    return [*lines, *_refused(ranking.refusals)]


def _row(wish: Wish, one: Plan) -> tuple[str, ...]:
    predicted = one.prediction
    return (
        f"{predicted.tokens_per_s:.0f}",
        str(len(one.layout.shards)),
        one.layout.placement,
        str(one.num_drafted),
        str(one.layout.bits),
        f"{predicted.tokens_per_round:.2f}",
        f"{predicted.round_s * 1e3:.1f}",
        f"{predicted.waiting_share:.0%}",
        f"{predicted.collectives:.0f}",
        f"{max(one.memory) / 2**30:.1f} GiB",
        why(wish, one),
    )


def why(wish: Wish, one: Plan) -> str:
    """Where the time of a round goes, in a phrase."""
    rows = one.num_drafted + 1
    parts = [f"compute {one.step.compute_s(rows) * 1e3:.1f} ms"]
    if one.step.reduces:
        num = one.step.all_reduces
        parts.append(f"{num} reduces of {one.step.waiting_s(rows) / num * 1e6:.0f} us")
    if one.layout.replicates_norm:
        parts.append("norms replicated")
    return ", ".join([*parts, *_drafting(wish, one)])


def _drafting(wish: Wish, one: Plan) -> list[str]:
    drafting_ms = one.num_drafted * one.draft_s * 1e3
    left_ms = (one.prediction.round_s - one.prediction.step_s) * 1e3
    match one.layout.placement:
        case "none":
            return []
        case "inline" if not one.draft_s:
            return ["drafts looked up"]
        case "inline":
            alone = wish.kind is None or wish.kind.computes
            return [f"drafts {drafting_ms:.1f} ms on {'the first' if alone else 'every'} card"]
        case placement:
            where = "the gaps" if placement == "gaps" else "a card of their own"
            return [f"drafts {drafting_ms:.1f} ms in {where}, {left_ms:.1f} not hidden"]


def _refused(refusals: Sequence[Refusal]) -> list[str]:
    nearest = {(len(one.layout.shards), one.layout.bits, one.layout.placement): one for one in reversed(refusals)}
    lines = [
        f"does not fit: {_named(one.layout)}, {one.short_bytes / 2**30:.1f} GiB short on a {one.card.name}"
        for one in sorted(nearest.values(), key=lambda one: one.short_bytes)
    ]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"... and {len(lines) - SHOWN} more that do not fit"]
    return ["", *lines] if lines else []


def _named(layout: Layout) -> str:
    drafting = "" if layout.placement == "none" else f", drafter {layout.placement}"
    norms = ", norms replicated" if layout.replicates_norm else ""
    return f"{len(layout.shards)} shards of {layout.bits} bits{norms}{drafting}"


def yaml_of(wish: Wish, ranking: Ranking) -> str:
    """The best plan as a topology file, its reasons as comments."""
    best = ranking.plans[0]
    topology = topology_of(wish, best)
    values = topology.model_dump(mode="json", exclude_unset=True)
    sections = [f"{key}: {_flow(value)}" for key, value in values.items()]
    reasons = [*_reasons(wish, ranking), *_ranks(wish, best.layout)]
    return "\n".join([*(f"# {reason}" for reason in reasons), *sections, ""])


def _flow(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("\n...\n").strip()


def _reasons(wish: Wish, ranking: Ranking) -> list[str]:
    best, plain = ranking.plans[0], _plain(ranking)
    predicted = best.prediction
    return [
        f"{boxed(wish.gpus)}, predicted for acceptance {wish.acceptance} and {wish.context} tokens of context.",
        f"{predicted.tokens_per_s:.0f} tokens/s: {predicted.tokens_per_round:.2f} tokens in a round of "
        f"{predicted.round_s * 1e3:.1f} ms; {predicted.collectives:.0f} collectives a token.",
        f"Why: {why(wish, best)}.",
        *([f"Plain decoding at its best here: {plain.prediction.tokens_per_s:.0f} tokens/s."] if plain else []),
        *(f"Next: {_named(one.layout)}, {one.prediction.tokens_per_s:.0f} tokens/s." for one in ranking.plans[1:4]),
        f"Link: {_link(wish, len(best.layout.shards))}.",
        "The cache takes the memory that the fullest card has left.",
        *_recalled(wish),
        *([f"Assumed: drafts are ready in {HIT_RATE:.0%} of rounds."] if best.layout.drafter is not None else []),
    ]


def _recalled(wish: Wish) -> list[str]:
    names = dict.fromkeys(card.name for card in wish.gpus if card.kind == "recalled")
    return [f"Check first: the numbers of {', '.join(names)} are recalled, not looked up."] if names else []


def _plain(ranking: Ranking) -> Plan | None:
    return next((one for one in ranking.plans if one.layout.placement == "none"), None)


def _link(wish: Wish, num_shards: int) -> str:
    link = wish.link_for(num_shards)
    return f"{link.name} ({link.provenance})" if link else "none needed"


def _ranks(wish: Wish, layout: Layout) -> list[str]:
    """Which card each rank should see, where that is not simply the order they were given in."""
    order = layout.cards
    named = ", ".join(f"rank {rank} {wish.gpus[index].name}" for rank, index in enumerate(order))
    if len(order) == len(wish.gpus) and order == tuple(range(len(order))):
        return []
    return [f"CUDA_VISIBLE_DEVICES={','.join(map(str, order))}, cards numbered as asked for: {named}."]
