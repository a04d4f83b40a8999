"""What a collective between cards costs: seconds by bytes, from a table shipped here, a probe's file, or two numbers.

Knows messages and ranks as numbers; must not import torch, wait, or know why anything is sent.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.topology.faults import suggestion
from tpspec.topology.link_file import CurveData, LinksFile, read_links

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.topology.link_file import BoxData

SHIPPED = Path(__file__).with_name("links.yaml")
# What does not grow with the ranks in NCCL's own model of a ring (src/graph/tuning.cc, protocol LL); measured by it.
RANKLESS_S = 6.6e-6


@dataclass(frozen=True, slots=True)
class Curve:
    """One collective. points: (bytes, seconds), smallest first. The line holds where there are none.

    Between two points the logarithm of the time is linear in the logarithm of the size. Time itself linear in that
    logarithm is further off: 16 KiB between 9.2 us at 8 KiB and 16.5 us at 32 KiB is 12.3 us here and 12.9 there, 11.6
    on the kernel's own line. Below the first point the time falls to alpha_s in proportion to the bytes; above the last
    it grows by bytes_per_s. Both join without a step. floors: curves below which it is never; ceilings: above which,
    whatever its floors.
    """

    points: tuple[tuple[int, float], ...]
    alpha_s: float
    bytes_per_s: float = math.inf
    floors: tuple[Curve, ...] = ()
    ceilings: tuple[Curve, ...] = ()

    def seconds(self, num_bytes: float) -> float:
        raised = max((self._own(num_bytes), *(floor.seconds(num_bytes) for floor in self.floors)))
        return min((raised, *(ceiling.seconds(num_bytes) for ceiling in self.ceilings)))

    def _own(self, num_bytes: float) -> float:
        if not self.points:
            return self.alpha_s + num_bytes / self.bytes_per_s
        above = bisect_right(self.points, num_bytes, key=lambda point: point[0])
        if above == 0:
            first_bytes, first_s = self.points[0]
            return self.alpha_s + (first_s - self.alpha_s) * num_bytes / first_bytes
        if above == len(self.points):
            last_bytes, last_s = self.points[-1]
            return last_s + (num_bytes - last_bytes) / self.bytes_per_s
        return _between(self.points[above - 1], self.points[above], num_bytes)

    def for_ranks(self, num_ranks: int, measured_with: int) -> Curve:
        """What the same fabric should take with other ranks: an estimate.

        Latency but for its constant part grows with the N - 1 hops; what the bytes cost grows as in a ring
        ((N - 1) / N) or in one shot (N - 1), whichever is dearer.
        """
        hops = (num_ranks - 1) / (measured_with - 1)
        carried = max(hops, hops * measured_with / num_ranks)
        constant = min(self.alpha_s, RANKLESS_S)
        alpha = constant + (self.alpha_s - constant) * hops

        def scaled(seconds: float) -> float:
            return max(alpha, alpha + (seconds - self.alpha_s) * carried)

        return Curve(tuple((size, scaled(s)) for size, s in self.points), alpha, self.bytes_per_s / carried)


def _between(low: tuple[int, float], high: tuple[int, float], num_bytes: float) -> float:
    part = math.log(num_bytes / low[0]) / math.log(high[0] / low[0])
    return low[1] * math.exp(part * math.log(high[1] / low[1]))


@dataclass(frozen=True, slots=True)
class LinkTable:
    """The collectives of one box. num_ranks: with how many it was measured; None: holds for any number.

    skew_s: what waiting for the last rank adds to each collective of a running model; not part of the curves.
    provenance: kinds of the numbers and their source, in words.
    """

    name: str
    reduce: Curve
    gather: Curve | None = None
    num_ranks: int | None = None
    skew_s: float = 0.0
    provenance: str = ""

    def seconds(self, num_bytes: float, num_ranks: int | None = None) -> float:
        """Of an all-reduce of num_bytes on each rank, without skew; as measured, or estimated for other ranks."""
        table = self if num_ranks is None else self.for_ranks(num_ranks)
        return table.reduce.seconds(num_bytes)

    def gather_seconds(self, gathered_bytes: float) -> float:
        """Of an all-gather that leaves gathered_bytes on each rank: its own curve, else the all-reduce's."""
        return (self.gather or self.reduce).seconds(gathered_bytes)

    def for_ranks(self, num_ranks: int) -> LinkTable:
        if self.num_ranks is None or num_ranks == self.num_ranks:
            return self
        return replace(
            self,
            reduce=self.reduce.for_ranks(num_ranks, self.num_ranks),
            gather=self.gather and self.gather.for_ranks(num_ranks, self.num_ranks),
            num_ranks=num_ranks,
            skew_s=self.skew_s * num_ranks / self.num_ranks,
            provenance=f"estimated for {num_ranks} ranks from {self.num_ranks}: {self.provenance}",
        )

    def between(self, smaller: Sequence[LinkTable], larger: Sequence[LinkTable]) -> LinkTable:
        """No faster than smaller boxes, and whatever they say no slower than larger ones, in skew either.

        Their gathers are not looked at.
        """
        raised = max((self.skew_s, *(other.skew_s for other in smaller)))
        reduce = replace(
            self.reduce,
            floors=tuple(other.reduce for other in smaller),
            ceilings=tuple(other.reduce for other in larger),
        )
        return replace(
            self,
            reduce=reduce,
            skew_s=min((raised, *(other.skew_s for other in larger))),
            provenance=self.provenance + self._bound("below", smaller) + self._bound("above", larger),
        )

    def _bound(self, side: str, others: Sequence[LinkTable]) -> str:
        names = ", ".join(other.name for other in others if other.name != self.name)
        return f"; never {side} {names}" if names else ""


def straight(latency_us: float, gbytes_per_s: float | None = None, name: str = "straight line") -> LinkTable:
    """A link by its two numbers, for any number of ranks. No gbytes_per_s: bytes are free."""
    bytes_per_s = math.inf if gbytes_per_s is None else gbytes_per_s * 1e9
    return LinkTable(name, Curve((), latency_us * 1e-6, bytes_per_s), provenance="given")


def link(name: str) -> LinkTable:
    """A table as it was measured: BOX, BOX/ALGORITHM, a family's largest box, or a probe's YAML file by its path."""
    if name.endswith((".yaml", ".yml")):
        return _only_table(read_links(name), name)
    family = shipped().families.get(name)
    return _table(shipped(), family[max(family)] if family else name)


def link_for(name: str, num_ranks: int) -> LinkTable:
    """A table for num_ranks cards: of a family, the smallest box that has as many; scaled where none has just that.

    More cards never take less time than fewer. But boxes of a family are of different cards, and some that have more
    were measured to be faster: what they do, fewer can, whatever slower cards took for it.
    """
    family = shipped().families.get(name, {})
    boxes = [(ranks, link(family[ranks])) for ranks in sorted(family)]
    smaller = [table for ranks, table in boxes if ranks < num_ranks]
    larger = [table for ranks, table in boxes if ranks >= num_ranks]
    nearest = (larger or smaller[-1:] or [link(name)])[0]
    return nearest.for_ranks(num_ranks).between(smaller[-1:], larger)


@cache
def shipped() -> LinksFile:
    return read_links(SHIPPED)


def _table(links: LinksFile, name: str) -> LinkTable:
    box_name, _, algorithm = name.partition("/")
    if box_name not in links.boxes:
        raise UserError(f"no link table {name!r}; {suggestion(box_name, [*links.boxes, *links.families])}")
    box = links.boxes[box_name]
    algorithm = algorithm or next(iter(box.all_reduce))
    if algorithm not in box.all_reduce:
        raise UserError(f"link table {box_name} has no {algorithm!r}; {suggestion(algorithm, box.all_reduce)}")
    return _made(links, box_name, box, algorithm)


def _only_table(links: LinksFile, path: str) -> LinkTable:
    if len(links.boxes) > 1:
        raise UserError(f"{path} holds {len(links.boxes)} boxes; should hold one to be named as a link")
    return replace(_table(links, next(iter(links.boxes))), name=path)


def _made(links: LinksFile, name: str, box: BoxData, algorithm: str) -> LinkTable:
    data = box.all_reduce[algorithm]
    gather = box.all_gather.get(algorithm) or next(iter(box.all_gather.values()), None)
    skew_us = box.skew_us.us if box.skew_us else links.skew_us_per_rank.us * box.ranks
    return LinkTable(
        name=f"{name}/{algorithm}",
        reduce=_curve(data),
        gather=_curve(gather) if gather else None,
        num_ranks=box.ranks,
        skew_s=skew_us * 1e-6,
        provenance=" and ".join(data.kinds) + "".join(f", {source}" for source in box.source),
    )


def _curve(data: CurveData) -> Curve:
    points = tuple((size, us * 1e-6) for size, us in data.points_us.items())
    return Curve(points, data.line.alpha_us * 1e-6, data.line.gbytes_per_s * 1e9)
