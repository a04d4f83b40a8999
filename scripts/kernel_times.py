"""Which kernels of a replay take a card's time, as torch's profiler sees them. Where kernels overlap, how long each is
there says little: what counts is how long after the one before it ends."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

CALLS = 5


def kernel_times(work: Callable[[], object]) -> dict[str, float]:
    """See `behind_the_last`: of CALLS calls on the current card."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(CALLS):
            work()
        torch.cuda.synchronize()
    on_card = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return behind_the_last([(event.time_range.end, event.name) for event in on_card if event.time_range.elapsed_us()])


def behind_the_last(ended: Sequence[tuple[float, str]]) -> dict[str, float]:
    """ended: when (us), and the name, of every kernel. For each that stands between the same two: how often a call has
    it, and the median of how long after the one before it has ended."""
    inner = sorted(ended)
    found = defaultdict[tuple[str, str, str], list[float]](list)
    for (before, one, behind), (first, last) in zip(
        zip(*(map(_name, inner[i:]) for i in range(3)), strict=False), pairwise(end for end, _ in inner), strict=False
    ):
        found[before, one, behind].append(last - first)
    often = {key: len(times) / CALLS for key, times in found.items() if len(times) >= CALLS}
    return {
        f"{one}, between {before} and {behind}, {often[before, one, behind]:.0f} x, us": statistics.median(times)
        for (before, one, behind), times in found.items()
        if (before, one, behind) in often
    }


def _name(ended: tuple[float, str]) -> str:
    return ended[1].split("<")[0].split("(")[0][:40].strip()
