"""`--sources`: which draft sources are to be compared, and the topology of each.

Knows names and topologies; must not know how a source is made or measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.topology.faults import suggestion
from tpspec.topology.sources import SOURCES

if TYPE_CHECKING:
    from tpspec.topology.config import Topology

ALL, PLAIN = "all", "none"


@dataclass(frozen=True, slots=True)
class Named:
    """One source, or several that are tried in order, and what the user names for it to load."""

    names: tuple[str, ...]
    file: str | None = None

    @property
    def label(self) -> str:
        return "+".join(self.names) + (f" ({Path(self.file).name})" if self.file else "")


OWN = Named(())  # what the topology drafts from


@dataclass(frozen=True, slots=True)
class Contender:
    """own: whether it is what the topology itself drafts from."""

    label: str
    topology: Topology
    own: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A source that cannot be measured, and why."""

    label: str
    reason: str


def parsed(text: str) -> tuple[Named, ...]:
    """`all`, or a list as in ngram,ngram+model=FOLDER. Raises UserError for what is no source."""
    named = (_named(item.strip()) for item in text.split(","))
    return tuple(dict.fromkeys(one for item in named for one in item))


def _named(item: str) -> list[Named]:
    if item == ALL:
        return [Named((name,)) for name in SOURCES if name != PLAIN and SOURCES[name].loads == "nothing"] + [OWN]
    name, _, file = item.partition("=")
    names = tuple(name.split("+"))
    for one in names:
        if one not in SOURCES:
            raise UserError(f"--sources {item}: no draft source is called {one!r}; {suggestion(one, (*SOURCES, ALL))}")
    if len(set(names)) < len(names):
        raise UserError(f"--sources {item}: names a source twice; should name each once")
    if PLAIN in names:
        raise UserError(f"--sources {item}: plain decoding is in every comparison; should be left out")
    if file and all(SOURCES[one].loads == "nothing" for one in names):
        raise UserError(f"--sources {item}: {name} loads nothing; should be {name} alone")
    return [Named(names, file or None)]


def contenders(named: Sequence[Named], topology: Topology) -> Iterator[Contender | LeftOut]:
    """A source without a file that is the topology's own is what the topology makes of it."""
    own = Named(topology.draft.sources)
    for one in dict.fromkeys(own if one == OWN else one for one in named):
        if one.names == (PLAIN,):
            continue
        if one == own:
            placement = topology.draft.placement.kind
            yield Contender(one.label + ("" if placement == "inline" else f" ({placement})"), topology, own=True)
        else:
            yield _beside(one, topology)


def _beside(one: Named, topology: Topology) -> Contender | LeftOut:
    try:
        return Contender(one.label, topology.drafting_from(one.names if one.names[1:] else one.names[0], one.file))
    except UserError as error:
        return LeftOut(one.label, str(error))
