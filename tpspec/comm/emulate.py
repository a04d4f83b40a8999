"""A communicator that takes as long as a named link would: gloo on CPU behaving like cards on a bus. A wrapper.

Knows messages, seconds and a clock; must not know why anything is sent, and is for ranks whose host takes part: other
collectives of a card are not over when the call returns.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Protocol

import torch

from tpspec.comm.communicator import InTurn

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.comm.communicator import Communicator, Purpose
    from tpspec.topology.config import LinkConfig
    from tpspec.topology.links import LinkTable

# Of a wait, at its end: burnt for precision, since a sleep cannot end on the microsecond.
SPIN_S = 50e-6
# By how much earlier than its usual overshoot says a sleep is asked to end: its scatter, most of the time.
MARGIN_S = 10e-6
TRIAL_SLEEPS, TRIAL_S = 20, 100e-6
LEARNING = 0.1


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from some fixed moment."""

    def wait_until(self, moment: float) -> None:
        """Returns at `moment`, or at once when it has passed."""


class VirtualClock:
    """Time that passes only when it is waited for or set forward: exact, and no test waits for it."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


class MonotonicClock:
    """The machine's clock. Waiting sleeps, and spins for the last 50 us at most, so that the core is others' meanwhile.

    Sleeps overshoot by an amount that a machine keeps to (70 us on Linux, 27 us once the thread's timer slack is 1 ns):
    measured when the clock is made and followed from then on. Not for two threads: each makes its own.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._refine()
        self._overshoot = median(self._slept(TRIAL_S) for _ in range(TRIAL_SLEEPS))

    def now(self) -> float:
        return perf_counter()

    def wait_until(self, moment: float) -> None:
        while (left := moment - perf_counter()) > SPIN_S:
            self._sleep_most(left)
        while perf_counter() < moment:
            pass

    def _sleep_most(self, left: float) -> None:
        if threading.get_ident() != self._thread:
            self._refine()
        pause = left - self._overshoot - MARGIN_S
        if pause <= 0:
            sleep(0)  # too short to sleep, too long to spin through: whoever wants the core or the interpreter has it
            return
        late = self._slept(pause)
        # A sleep that somebody else's work prolonged says nothing about the next.
        self._overshoot += LEARNING * (min(late, 2 * self._overshoot) - self._overshoot)

    def _slept(self, pause: float) -> float:
        begin = perf_counter()
        sleep(pause)
        return perf_counter() - begin - pause

    def _refine(self) -> None:
        """Asks Linux to end this thread's sleeps within 1 ns instead of 50 us; elsewhere they stay as they are."""
        self._thread = threading.get_ident()
        try:
            Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text("1", encoding="ascii")
        except OSError:
            return


@dataclass
class Emulation:
    """Sums of what was emulated. link_s: by the table, dilated; skew_s: for late ranks, dilated, not in link_s.

    late_s: calls ended after their time, because the inner communicator or the clock was slower than the link: the
    floor of this machine, over `calls`.
    """

    calls: int = 0
    link_s: float = 0.0
    skew_s: float = 0.0
    late_s: float = 0.0

    @property
    def floor_s(self) -> float:
        """By how much a collective is late on average."""
        return self.late_s / self.calls if self.calls else 0.0

    @property
    def late_share(self) -> float:
        """Of what the link should have taken."""
        wanted = self.link_s + self.skew_s
        return self.late_s / wanted if wanted else 0.0


class Emulated(InTurn):
    """Another communicator, made to take a link's time times `dilation`, counted from when a call begins (on a card,
    from when what it sends has been computed).

    The inner one's own time is part of it. When ranks come at different times each counts from its own call, so the
    last pays in full and the others' lead is at most a collective's time.
    """

    is_queued = False  # the host waits

    def __init__(self, inner: Communicator, link: LinkTable, dilation: float = 1.0, clock: Clock | None = None) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.sums = Emulation()
        self._inner, self._link, self._dilation = inner, link, dilation
        self._clock = clock or MonotonicClock()

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        begin = self._begin(x)
        result = self._inner.all_reduce(x, purpose)
        self._end(begin, self._link.seconds(x.nbytes))
        return result

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        begin = self._begin(x)
        result = self._inner.all_gather(x, purpose)
        self._end(begin, self._link.gather_seconds(result.nbytes))
        return result

    def _begin(self, x: Tensor) -> float:
        """Now; on a card, when what was asked of it before is done, or its computing would pass for the link's time."""
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        return self._clock.now()

    def _end(self, begin: float, link_s: float) -> None:
        """Waits for what is missing, and books it."""
        link_s, skew_s = link_s * self._dilation, self._link.skew_s * self._dilation
        end = begin + link_s + skew_s
        sums = self.sums
        self._clock.wait_until(end)
        sums.late_s += self._clock.now() - end
        sums.calls += 1
        sums.link_s += link_s
        sums.skew_s += skew_s


def emulated(comm: Communicator, config: LinkConfig) -> Communicator:
    """`comm` at the speed of the topology's link if it asks for that; a group of one as it is."""
    cost = config.cost
    if not config.emulate or cost is None or comm.size == 1:
        return comm
    return Emulated(comm, cost, config.dilation)
