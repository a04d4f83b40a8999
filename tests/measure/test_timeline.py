"""Time that is spent stands on the timeline, in order, and is drawn as Chrome wants it."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given, strategies as st

from tpspec.comm.emulate import VirtualClock
from tpspec.measure.timeline import Event, Timeline, chrome_trace


def test_who_spends_moves_his_clock_and_nobody_elses() -> None:
    timeline, mine, yours = Timeline(), VirtualClock(), VirtualClock()
    timeline.spend(mine, "target", "verify", 0.5, round=1)
    timeline.spend(yours, "drafter", "draft", 0.25)
    timeline.add("waits", "waiting", yours.now(), mine.now())
    assert (mine.now(), yours.now()) == (0.5, 0.25)
    assert timeline.events == [
        Event("target", "verify", 0.0, 0.5, {"round": 1}),
        Event("drafter", "draft", 0.0, 0.25, {}),
        Event("waits", "waiting", 0.25, 0.5, {}),
    ]


def test_no_time_is_no_event() -> None:
    timeline, clock = Timeline(), VirtualClock(now=3.0)
    timeline.spend(clock, "target", "verify", 0.0)
    timeline.add("waits", "waiting", 3.0, 2.0)
    assert (clock.now(), timeline.events) == (3.0, [])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 0.3)), max_size=60))
def test_events_of_a_track_never_overlap(spent: list[tuple[str, float]]) -> None:
    """Against rounding begins and durations apart: the viewer then nests an event in the one before."""
    timeline, clock = Timeline(), VirtualClock(now=1.1)
    for track, seconds in spent:
        timeline.spend(clock, track, "work", seconds)
    drawn = json.loads(json.dumps(chrome_trace({"run": timeline})))["traceEvents"]
    for thread in (1, 2):
        events = [one for one in drawn if one["ph"] == "X" and one["tid"] == thread]
        for before, after in pairwise(events):
            assert round((before["ts"] + before["dur"]) * 1000) <= round(after["ts"] * 1000)


def test_tracks_and_timelines_have_names() -> None:
    timelines = {}
    for name in ("plain", "speculative"):
        timelines[name] = Timeline()
        timelines[name].spend(VirtualClock(), "target", "verify", 0.001)
    drawn = chrome_trace(timelines)["traceEvents"]
    names = {(one["name"], one["pid"], one["tid"]): one["args"]["name"] for one in drawn if one["ph"] == "M"}
    assert names == {
        ("process_name", 1, 0): "plain",
        ("thread_name", 1, 1): "target",
        ("process_name", 2, 0): "speculative",
        ("thread_name", 2, 1): "target",
    }
    work = [one for one in drawn if one["ph"] == "X"]
    assert [(one["pid"], one["tid"], one["dur"]) for one in work] == [(1, 1, 1000.0), (2, 1, 1000.0)]
