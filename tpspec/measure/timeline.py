"""Who spent which time on what, by clocks that stand still unless somebody spends: kept, summed, drawn as a trace.

The drawing is Chrome's trace format (chrome://tracing, Perfetto). Must not know why time is spent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpspec.comm.emulate import VirtualClock


@dataclass(frozen=True, slots=True)
class Event:
    """From begin to end, in seconds, on one track."""

    track: str
    name: str
    begin: float
    end: float
    notes: dict[str, int]


class Timeline:
    """Events in the order in which they were spent; a clock that spends may stand on several tracks."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def spend(self, clock: VirtualClock, track: str, name: str, seconds: float, **notes: int) -> None:
        """`clock` moves on by that much."""
        begin = clock.now()
        clock.advance(seconds)
        self.add(track, name, begin, clock.now(), **notes)

    def add(self, track: str, name: str, begin: float, end: float, **notes: int) -> None:
        """What took no time is no event."""
        if end > begin:
            self.events.append(Event(track, name, begin, end, notes))


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """One process for each timeline, one thread for each of its tracks."""
    drawn: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        tracks = list(dict.fromkeys(event.track for event in timeline.events))
        drawn.append(_label("process_name", process, 0, name))
        drawn += [_label("thread_name", process, number, track) for number, track in enumerate(tracks, start=1)]
        drawn += [_drawn(event, process, 1 + tracks.index(event.track)) for event in timeline.events]
    return {"traceEvents": drawn, "displayTimeUnit": "ms"}


def _label(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _drawn(event: Event, process: int, track: int) -> dict[str, Any]:
    """Both ends rounded to the nanosecond, so that an event begins where the one before ends, and never earlier."""
    begin, end = round(event.begin * 1e9), round(event.end * 1e9)
    return {
        "ph": "X",
        "name": event.name,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "pid": process,
        "tid": track,
        "args": event.notes,
    }
