"""What keys of a topology must be together: one small function for each rule, and the table that binds them to keys.

Knows values, not models or files. Each function returns the fault (`what; what would be right`) or None.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.topology.faults import Rule, suggestion
from tpspec.topology.links import link
from tpspec.topology.sources import OF_ANY_SOURCE, SOURCES, Kind

if TYPE_CHECKING:
    from tpspec.topology.placement import Placement

MOST_SHOWN = 8  # ranks in a message


def _one_weight_per_rank(weights: tuple[float, ...] | str, ranks: tuple[int, ...]) -> str | None:
    if isinstance(weights, str) or len(weights) == len(ranks):
        return None
    return f"has {len(weights)} weights for {len(ranks)} target ranks; should have one for each"


def _kinds(source: str | tuple[str, ...]) -> dict[str, Kind]:
    return {name: SOURCES[name] for name in ((source,) if isinstance(source, str) else source)}


def _a_source_that_drafts(source: str | tuple[str, ...]) -> str | None:
    if isinstance(source, str) or "none" not in source:
        return None
    return "has none among others; should be none alone, or the others without it"


def _model_for_source(model: str | None, source: str | tuple[str, ...]) -> str | None:
    loading = [name for name, kind in _kinds(source).items() if kind.loads != "nothing"]
    if len(loading) > 1:
        return f"cannot serve {' and '.join(loading)} both; should be for one source that loads something"
    if model is not None or not loading:
        return None
    what = "drafter's model" if SOURCES[loading[0]].loads == "model" else f"{loading[0]} head"
    return f"is missing; source {loading[0]!r} needs the folder or hub id of the {what}"


def _matrices_to_quantize(quantize: str | None, source: str | tuple[str, ...]) -> str | None:
    if quantize is None or any(kind.quantizes for kind in _kinds(source).values()):
        return None
    able = " or ".join(name for name, kind in SOURCES.items() if kind.quantizes)
    return f"is {quantize}, but the source has no layers of its own; should be null, or source {able}"


def _options_of_the_source(options: dict[str, object], source: str | tuple[str, ...]) -> str | None:
    kinds = _kinds(source)
    own = {name: option for kind in kinds.values() for name, option in kind.options.items()}
    known = {**own, **OF_ANY_SOURCE}
    for name, given in options.items():
        if name not in known:
            return f"{name} is none of source {' or '.join(kinds)}; {suggestion(name, [*known])}"
        if not known[name].takes(given):
            return f"{name} is {given!r}; should be {known[name].right}"
    return None


def _shape_of_a_fixed_tree(options: dict[str, object], tree: str) -> str | None:
    given = [name for name in OF_ANY_SOURCE if name in options]
    if tree == "static" or not given:
        return None
    return f"{given[0]} is the shape of a fixed tree; should stand beside draft.tree: static"


def _trees_to_shape(tree: str, source: str | tuple[str, ...], accept: str) -> str | None:
    kinds = _kinds(source)
    if tree != "static" or any(accept in kind.shaped for kind in kinds.values()):
        return None
    able = " or ".join(name for name, kind in SOURCES.items() if accept in kind.shaped)
    return (
        f"is static, but with accept: {accept} no tree of source {' or '.join(kinds)} has a fixed shape; "
        f"should be auto, or source {able}"
    )


def _rule_tells_enough(accept: str, source: str | tuple[str, ...]) -> str | None:
    learning = [name for name, kind in _kinds(source).items() if kind.learns]
    if accept == "match" or not learning:
        return None
    return f"is {accept}, which does not tell {learning[0]} what the target says at every row; should be match"


def _drafter_has_its_place(placement: Placement, ranks: tuple[int, ...]) -> str | None:
    shown = ", ".join(map(str, ranks))
    if placement.kind == "dedicated" and placement.rank in ranks:
        return f"rank {placement.rank} already holds a shard; should be a rank outside target.ranks ({shown})"
    if placement.kind == "gaps" and placement.rank not in ranks:
        return f"rank {placement.rank} holds no shard, so it has no gaps; should be one of target.ranks ({shown})"
    return None


def _drafter_of_its_own_runs_a_model(placement: Placement, source: str | tuple[str, ...]) -> str | None:
    if placement.kind == "inline" or (isinstance(source, str) and SOURCES[source].moves):
        return None
    able = " or ".join(sorted(name for name, kind in SOURCES.items() if kind.moves))
    what = f"source {source!r} runs" if isinstance(source, str) else "several sources run"
    return f"is {placement.kind}, but {what} no model of its own; should be inline, or source {able}"


def _static_where_the_target_is(tree: str, placement: Placement) -> str | None:
    if tree != "static" or placement.kind == "inline":
        return None
    return f"is static, but a drafter elsewhere ({placement.kind}) plans by odds; should be dynamic, or draft inline"


def _ahead_of_what_is_verified(policy: str, placement: Placement) -> str | None:
    if policy == "serial" or placement.kind != "inline":
        return None
    return f"is {policy}, but an inline drafter runs when the target does not; should be serial, or draft elsewhere"


def _no_idle_rank(ranks: tuple[int, ...], placement: Placement) -> str | None:
    used = {*ranks} if placement.rank is None else {*ranks, placement.rank}
    idle = list(islice((rank for rank in range(max(used)) if rank not in used), MOST_SHOWN + 1))
    if not idle:
        return None
    shown = ", ".join(map(str, idle[:MOST_SHOWN])) + (" and more" if len(idle) > MOST_SHOWN else "")
    return f"leaves rank {shown} idle; should number ranks without a hole (CUDA_VISIBLE_DEVICES chooses the cards)"


def _draft_fits_round(tokens: int | str, deterministic: bool, fixed_rows: int, max_rows: int) -> str | None:
    rows, name = (fixed_rows, "fixed_rows") if deterministic else (max_rows, "max_rows")
    if isinstance(tokens, str) or tokens + 1 <= rows:
        return None
    return f"{tokens} draft tokens and the root are {tokens + 1} rows; should fit engine.{name} ({rows})"


def _fixed_rows_fit(fixed_rows: int, max_rows: int, deterministic: bool) -> str | None:
    if not deterministic or fixed_rows <= max_rows:
        return None
    return f"is {fixed_rows}; should be at most engine.max_rows ({max_rows})"


def _cache_holds_a_page(tokens: int | str, page: int) -> str | None:
    return None if isinstance(tokens, str) or tokens >= page else f"is {tokens}; should be at least cache.page ({page})"


def _one_link_cost(table: str | None, latency_us: float | None, gbytes_per_s: float | None) -> str | None:
    if table is None or (latency_us is None and gbytes_per_s is None):
        return None
    return "is given beside latency_us or gbytes_per_s; should be a table or numbers, not both"


def _something_to_emulate(emulate: bool, *costs: str | float | None) -> str | None:
    if not emulate or any(cost is not None for cost in costs):
        return None
    return "has nothing to emulate; should stand beside link.table, or latency_us and gbytes_per_s"


def _emulated_where_the_host_waits(emulate: bool, device: str, transport: str) -> str | None:
    if not emulate or device != "cuda" or transport == "host":
        return None
    return "works where the host waits; should be false with device: cuda, or stand beside link.transport: host"


def _known_table(table: str | None) -> str | None:
    try:
        if table is not None:
            link(table)
    except UserError as error:
        return str(error)
    return None


_COSTS = ("link.table", "link.latency_us", "link.gbytes_per_s")
RULES = (
    Rule(("target.weights", "target.ranks"), _one_weight_per_rank),
    Rule(("draft.source",), _a_source_that_drafts),
    Rule(("draft.model", "draft.source"), _model_for_source),
    Rule(("draft.quantize", "draft.source"), _matrices_to_quantize),
    Rule(("draft.options", "draft.source"), _options_of_the_source),
    Rule(("draft.options", "draft.tree"), _shape_of_a_fixed_tree),
    Rule(("draft.tree", "draft.source", "accept"), _trees_to_shape),
    Rule(("accept", "draft.source"), _rule_tells_enough),
    Rule(("draft.placement", "target.ranks"), _drafter_has_its_place),
    Rule(("draft.placement", "draft.source"), _drafter_of_its_own_runs_a_model),
    Rule(("draft.tree", "draft.placement"), _static_where_the_target_is),
    Rule(("pipeline.policy", "draft.placement"), _ahead_of_what_is_verified),
    Rule(("target.ranks", "draft.placement"), _no_idle_rank),
    Rule(("draft.tokens", "deterministic", "engine.fixed_rows", "engine.max_rows"), _draft_fits_round),
    Rule(("engine.fixed_rows", "engine.max_rows", "deterministic"), _fixed_rows_fit),
    Rule(("cache.tokens", "cache.page"), _cache_holds_a_page),
    Rule(_COSTS, _one_link_cost),
    Rule(("link.table",), _known_table),
    Rule(("link.emulate", *_COSTS), _something_to_emulate),
    Rule(("link.emulate", "device", "link.transport"), _emulated_where_the_host_waits),
)
