"""The topology file as frozen models, and its ways in and out: YAML with overrides, JSON between processes.

A field's description says what would be right: it is the second half of its error message. Knows no model's shape, no
device and no torch; what a draft source is called matters in this room and in `draft/`, nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from tpspec.topology.document import Document, TopologyError, parse, read
from tpspec.topology.faults import examine
from tpspec.topology.links import LinkTable, link, link_for, straight
from tpspec.topology.placement import Placement
from tpspec.topology.rules import RULES
from tpspec.topology.sources import SOURCES, Kind

__all__ = [
    "Topology",
    "TopologyError",
    "automatic",
    "dump",
    "from_json",
    "load",
    "to_json",
]

Dtype = Literal["float32", "bfloat16", "float16"]
Quantize = Literal["int8", "int4"]
Role = Literal["target", "drafter"]
USUAL_TOKENS = 8192  # that a cache holds
MOST_ROWS = 1 << 16  # of a round
DAY_S = 86400


def _source(value: object) -> str | tuple[str, ...]:
    names: list[object] = list(value) if isinstance(value, list | tuple) else [value]
    if not names or not all(isinstance(name, str) and name in SOURCES for name in names):
        raise ValueError("no such source")
    if len(set(names)) < len(names):
        raise ValueError("no such source")
    return str(names[0]) if len(names) == 1 else tuple(map(str, names))


def _plain(source: str | tuple[str, ...]) -> str | list[str]:
    return source if isinstance(source, str) else list(source)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _distinct(ranks: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(ranks)) < len(ranks):
        raise ValueError("ranks repeat")
    return ranks


def _power_of_two(page: int) -> int:
    if page & (page - 1):
        raise ValueError("no power of two")
    return page


Text = Annotated[str, Field(min_length=1)]
RankList = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), BeforeValidator(_as_tuple), AfterValidator(_distinct)
]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
WeightList = Annotated[tuple[Positive, ...], BeforeValidator(_as_tuple)]
SourceField = Annotated[str | tuple[str, ...], PlainValidator(_source), PlainSerializer(_plain)]
PlacementField = Annotated[Placement, PlainValidator(Placement.parse), PlainSerializer(Placement.plain)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TargetConfig(Section):
    model: Text = Field(description="a folder, a demo model's name or a hub id such as org/name")
    ranks: RankList = Field(description="a list of distinct rank numbers from 0, the lead first")
    dtype: Dtype = Field(default="bfloat16", description="float32, bfloat16 or float16")
    weights: WeightList | Literal["equal", "auto"] = Field(
        default="equal", description="equal, auto, or a list of numbers above 0, one for each target rank"
    )
    quantize: Quantize | None = Field(default=None, description="null, int8 or int4")
    qk_norm: Literal["reduce", "replicate"] = Field(default="reduce", description="reduce or replicate")

    @property
    def fixed_weights(self) -> tuple[float, ...] | None:
        """One weight for each rank, or None when the cards decide (auto)."""
        if self.weights == "auto":
            return None
        return (1.0,) * len(self.ranks) if isinstance(self.weights, str) else self.weights


class DraftConfig(Section):
    source: SourceField = Field(
        default="none", description=f"one of {', '.join(SOURCES)}, or a list of them to be asked in order"
    )
    model: Text | None = Field(
        default=None, description="null, or a folder, a demo model's name or a hub id such as org/name"
    )
    options: dict[str, int | float | str] = Field(default={}, description="a section with options of the source")
    placement: PlacementField = Field(
        default=Placement(), description="inline, {dedicated: RANK} or {gaps: RANK}, with RANK a number from 0"
    )
    tokens: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        default="auto", description="auto, or a whole number from 1 to 64"
    )
    tree: Literal["auto", "chain", "dynamic", "static"] = Field(
        default="auto", description="auto, chain, dynamic or static"
    )
    dtype: Dtype | None = Field(default=None, description="null (as the target), float32, bfloat16 or float16")
    quantize: Quantize | None = Field(default=None, description="null, int8 or int4, whatever the target has")

    @property
    def sources(self) -> tuple[str, ...]:
        """In the order in which they are tried."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(SOURCES[name] for name in self.sources)

    @property
    def own_model(self) -> str | None:
        """The whole model that the drafter loads; None when its source has no use for one."""
        return self.model if any(kind.loads == "model" for kind in self.kinds) else None

    @property
    def has_own_layer(self) -> bool:
        """Whether the drafter loads a layer out of the target's files."""
        return any(kind.behind for kind in self.kinds)

    @property
    def head(self) -> str | None:
        """The head that the drafter puts on the target's layers; None when its source has no use for one."""
        return self.model if any(kind.loads == "head" for kind in self.kinds) else None


class PipelineConfig(Section):
    policy: Literal["serial", "optimistic", "fan_out", "alternate", "auto"] = Field(
        default="serial", description="serial, optimistic, fan_out, alternate or auto"
    )
    fan_out: int = Field(default=3, ge=1, le=64, description="a whole number of outcomes from 1 to 64")


class LinkConfig(Section):
    table: Text | None = Field(default=None, description="null, the name of a link table, or a probe's YAML file")
    latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="null, or microseconds per collective, 0 or more"
    )
    gbytes_per_s: Positive | None = Field(default=None, description="null, or gigabytes per second, above 0")
    emulate: bool = Field(default=False, description="true or false")
    dilation: Positive = Field(default=1.0, description="a number above 0")
    transport: Literal["auto", "gloo", "shared", "host", "peer"] = Field(
        default="auto", description="auto, gloo, shared, host or peer"
    )

    @property
    def cost(self) -> LinkTable | None:
        """The table or the line that is named here, as measured; None when nothing is."""
        if self.table is not None:
            return link(self.table)
        if self.latency_us is None and self.gbytes_per_s is None:
            return None
        return straight(self.latency_us or 0.0, self.gbytes_per_s)

    def cost_for(self, num_ranks: int) -> LinkTable | None:
        """The same between so many ranks, as cards have it: a slot's box of as many, or another scaled."""
        return self.cost if self.table is None else link_for(self.table, num_ranks)


class CacheConfig(Section):
    tokens: Annotated[int, Field(ge=1, lt=1 << 48)] | Literal["auto"] = Field(
        default="auto", description="auto, or a whole number of tokens, 1 or more"
    )
    # What `auto` is on the CPU is whole pages.
    page: Annotated[int, AfterValidator(_power_of_two)] = Field(
        default=16, ge=1, le=USUAL_TOKENS, description=f"a power of two, 1 to {USUAL_TOKENS}"
    )
    prefix: bool = Field(default=True, description="true or false")
    states: int = Field(default=16, ge=0, lt=1 << 16, description="a whole number of states from 0 to 65535")
    dtype: Literal["int8"] | None = Field(default=None, description="null (as the target) or int8")

    @property
    def num_tokens(self) -> int:
        """The number given, or what auto is where no card has decided it."""
        return USUAL_TOKENS if self.tokens == "auto" else self.tokens


class ServeConfig(Section):
    host: Text = Field(default="127.0.0.1", description="a host name or address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="a port number from 0 (any free one) to 65535")
    max_running: int = Field(
        default=16, ge=1, le=MOST_ROWS, description=f"a whole number of requests, 1 to {MOST_ROWS}"
    )
    max_queued: int = Field(default=256, ge=1, le=1 << 20, description=f"a whole number of requests, 1 to {1 << 20}")


class EngineConfig(Section):
    # A card counts the tiles of a mixture's rows up to 65,535; so many rows, each sent to 15 experts, have fewer.
    max_rows: int = Field(default=256, ge=1, le=MOST_ROWS, description=f"a whole number of rows, 1 to {MOST_ROWS}")
    fixed_rows: int = Field(default=16, ge=1, description="a whole number of rows, 1 or more")
    timeout_s: Positive = Field(default=60.0, le=DAY_S, description=f"a number of seconds above 0, up to {DAY_S}")
    hang_s: Positive = Field(default=10.0, le=DAY_S, description=f"a number of seconds above 0, up to {DAY_S}")


class Topology(Section):
    """Who is what. Made by `load`, `automatic` or `from_json`; anything in it has been checked."""

    name: Text = Field(description="a line of text that says what box this is")
    target: TargetConfig = Field(description="a section with at least model and ranks")
    draft: DraftConfig = DraftConfig()
    pipeline: PipelineConfig = PipelineConfig()
    accept: Literal["match", "rejection"] = Field(default="match", description="match or rejection")
    deterministic: bool = Field(default=False, description="true or false")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto, cpu or cuda")
    link: LinkConfig = LinkConfig()
    cache: CacheConfig = CacheConfig()
    serve: ServeConfig = ServeConfig()
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _keep_rules(self) -> Topology:
        if faults := self._broken_rules():
            raise ValueError("; ".join(faults))
        return self

    def _broken_rules(self) -> list[str]:
        faults = ((rule.keys[0], rule.fault({key: attrgetter(key)(self) for key in rule.keys})) for rule in RULES)
        return [f"{key} {fault}" for key, fault in faults if fault is not None]

    @property
    def num_ranks(self) -> int:
        """The size of the world: target ranks and a dedicated drafter."""
        return 1 + max(*self.target.ranks, self.draft.placement.rank or 0)

    @property
    def cache_dtype(self) -> str:
        """What the target's keys and values are held in."""
        return self.cache.dtype or self.target.dtype

    def role_of(self, rank: int) -> Role:
        if rank in self.target.ranks:
            return "target"
        if self.draft.placement == Placement("dedicated", rank):
            return "drafter"
        raise ValueError(f"rank {rank} is outside this world of {self.num_ranks}")

    @property
    def drafts_at_lead(self) -> bool:
        """Whether the lead alone drafts inline. Else every target rank does: what only looks things up is the same on
        all, and what drafts with the target's shards needs them all."""
        kinds = self.draft.kinds
        is_inline = self.draft.placement.kind == "inline"
        return is_inline and any(kind.computes for kind in kinds) and not any(kind.thins for kind in kinds)

    def drafts_on(self, rank: int) -> bool:
        """Whether the drafter runs at this rank: inline at the lead or at every target rank, else at its own."""
        at, ranks = self.draft.placement.rank, self.target.ranks
        if at is None:
            return self.draft.source != "none" and rank in (ranks[:1] if self.drafts_at_lead else ranks)
        return self.draft.source != "none" and at == rank

    def drafting_from(self, source: str | tuple[str, ...], model: str | None) -> Topology:
        """The same target with another source beside it, inline. Raises TopologyError where the two do not go."""
        update: dict[str, object] = {"source": source, "model": model, "options": {}, "placement": Placement()}
        draft = self.draft.model_copy(update=update)
        if not any(kind.quantizes for kind in draft.kinds):
            draft = draft.model_copy(update={"quantize": None})
        if draft.tree == "static" and not any(self.accept in kind.shaped for kind in draft.kinds):
            draft = draft.model_copy(update={"tree": "auto"})
        made = self.model_copy(update={"draft": draft, "pipeline": PipelineConfig()})
        if faults := made._broken_rules():
            raise TopologyError(faults)
        return made


def load(path: str | Path, overrides: Sequence[str] = ()) -> Topology:
    """The topology in a YAML file, with `key.path=value` overrides applied. Raises TopologyError with every fault."""
    return _checked(read(path), overrides)


def automatic(world_size: int, model: str = "smollm2-135m", *, cuda: bool, overrides: Sequence[str] = ()) -> Topology:
    """What runs when no file is given: every rank holds an equal shard, drafts are looked up in the text itself."""
    made = Topology(
        name=f"made automatically: {world_size} x {'CUDA' if cuda else 'CPU'}",
        target=TargetConfig(model=model, ranks=tuple(range(world_size))),
        draft=DraftConfig(source="ngram"),
        device="cuda" if cuda else "cpu",
    )
    return _checked(parse(dump(made), "automatic topology"), overrides)


def _checked(document: Document, overrides: Sequence[str]) -> Topology:
    last_line = 10**9  # overrides are reported after the lines of the file, in their own order
    for index, text in enumerate(overrides):
        document.override(text, last_line + index)
    examine(document, Topology, RULES)
    document.raise_faults()
    return Topology.model_validate(document.values)


def dump(topology: Topology) -> str:
    """YAML text that `load` reads back to an equal topology."""
    return yaml.safe_dump(topology.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def to_json(topology: Topology) -> str:
    return topology.model_dump_json()


def from_json(text: str) -> Topology:
    """The inverse of `to_json`; for text that tpspec wrote, so a fault is a bug of ours."""
    return Topology.model_validate_json(text)
