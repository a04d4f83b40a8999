"""The file format of link tables: the tables shipped here, and what a probe of the box at hand writes.

A schema and its reader. Every number says whether it was measured, fitted or estimated, and from what; a file that does
not is refused. Must not know what a table is used for.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tpspec.topology.document import Document, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic_core import ErrorDetails

# Neighbouring sizes further apart than this hide what happens between them: NCCL changes its protocol there.
WIDEST_GAP = 32
Kind = Literal["measured", "fitted", "estimated"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _ascending(points: dict[int, float]) -> dict[int, float]:
    for smaller, larger in pairwise(points):
        if larger <= smaller:
            raise ValueError(f"{larger} bytes stand after {smaller}; sizes should ascend")
    return points


Points = Annotated[dict[Annotated[int, Field(gt=0)], Positive], AfterValidator(_ascending)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LineData(_Part):
    """alpha_us: of an empty message. gbytes_per_s: bytes of the message per time, beyond the last point."""

    alpha_us: float = Field(ge=0, allow_inf_nan=False)
    gbytes_per_s: Positive
    kind: Kind
    how: str | None = None

    @model_validator(mode="after")
    def _explained(self) -> LineData:
        if self.kind != "measured" and not self.how:
            raise ValueError(f"is {self.kind}; should say how")
        return self


class CurveData(_Part):
    """One algorithm's microseconds by bytes that each rank brings (all-gather: bytes that each rank ends up with)."""

    measured_us: Points = Field(default_factory=dict)
    fitted_us: Points = Field(default_factory=dict)
    estimated_us: Points = Field(default_factory=dict)
    p90_us: Points = Field(default_factory=dict)
    how: str | None = None
    line: LineData
    mode: str | None = None
    confidence: Literal["high", "medium", "low"] | None = None
    note: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> CurveData:
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        sizes = sorted([*self.measured_us, *self.fitted_us, *self.estimated_us])
        if not sizes:
            yield "has no points; should have measured_us, fitted_us or estimated_us"
        for smaller, larger in pairwise(sizes):
            if larger == smaller:
                yield f"gives {larger} bytes twice, as two kinds of number"
            if larger > WIDEST_GAP * smaller:
                yield f"has a hole: no point between {smaller} and {larger} bytes; should have one every {WIDEST_GAP} x"
        if (self.fitted_us or self.estimated_us) and not self.how:
            yield "has fitted or estimated points; should say how"

    @property
    def points_us(self) -> dict[int, float]:
        """All points, of whatever kind, smallest first."""
        return dict(sorted({**self.measured_us, **self.fitted_us, **self.estimated_us}.items()))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of number among the points."""
        own: dict[Kind, dict[int, float]] = {
            "measured": self.measured_us,
            "fitted": self.fitted_us,
            "estimated": self.estimated_us,
        }
        return tuple(kind for kind, points in own.items() if points)


class SkewData(_Part):
    """Microseconds that ranks wait for the last to arrive, in a running model, beyond the table's time."""

    us: float = Field(ge=0, allow_inf_nan=False)
    kind: Kind
    how: str | None = None


class BoxData(_Part):
    gpu: str
    ranks: int = Field(ge=2)
    fabric: str | None = None
    source: tuple[str, ...] = ()
    skew_us: SkewData | None = None
    all_reduce: dict[str, CurveData] = Field(min_length=1)
    all_gather: dict[str, CurveData] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sourced(self) -> BoxData:
        measured = any("measured" in curve.kinds for curve in [*self.all_reduce.values(), *self.all_gather.values()])
        if measured and not self.source:
            raise ValueError("has measured points; should name their source")
        return self


class LinksFile(_Part):
    """boxes by name. families: names for a slot, each with a box by number of ranks."""

    boxes: dict[str, BoxData] = Field(min_length=1)
    families: dict[str, dict[int, str]] = Field(default_factory=dict)
    skew_us_per_rank: SkewData = SkewData(us=0, kind="estimated")

    @model_validator(mode="after")
    def _families_are_of_boxes(self) -> LinksFile:
        for family, members in self.families.items():
            for ranks, box in members.items():
                if box not in self.boxes or self.boxes[box].ranks != ranks:
                    raise ValueError(f"family {family} names {box!r} for {ranks} ranks; should be such a box here")
        return self


def read_links(path: str | Path) -> LinksFile:
    """The file's tables. TopologyError with every fault, each with its line and what would be right."""
    document = read(path, "`boxes:`, as `-m tpspec.measure links` writes it")
    try:
        links = LinksFile.model_validate(document.values)
    except ValidationError as error:
        _blame(document, error.errors())
        document.raise_faults()
        raise AssertionError("faults raise") from error
    document.raise_faults()
    return links


def dump_links(links: LinksFile) -> str:
    """YAML that `read_links` reads back to the same tables."""
    # Not mode="json": there the keys of an object are strings, and sizes would stand in quotes.
    plain = links.model_dump(exclude_defaults=True)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _blame(document: Document, errors: Sequence[ErrorDetails]) -> None:
    for error in errors:
        path = tuple(str(step) for step in error["loc"] if step != "[key]")
        document.fault(path, _words(error))


def _words(error: ErrorDetails) -> str:
    match error["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return "unknown key"
        case "too_short":
            return "is empty; should hold at least one"
        case "value_error":
            return error["msg"].removeprefix("Value error, ")
        case _:
            return f"is {error['input']!r}; {error['msg'][0].lower()}{error['msg'][1:]}"
