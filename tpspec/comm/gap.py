"""A drafter beside a shard: how much of its work runs inside the shard's waits, how long the shard is kept from a core.

The rank that waits counts; a drafter in a process of its own reads the sums from shared memory. Knows clocks of
processes; must not know what is drafted. Linux alone tells one process of another's clock.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from time import clock_gettime, process_time
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpspec.comm.communicator import InTurn
from tpspec.switches import switch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpspec.comm.communicator import Communicator, Purpose

SWITCH = "TPSPEC_GAPS"  # variable: what a drafter in gaps is
THREAD, PROCESS = "thread", "process"
SUMS = struct.Struct("2d")
CPUCLOCK_SCHED = 2  # linux/posix-timers.h
SCHEDSTAT_BYTES = 128


class Sums(NamedTuple):
    """inside_s: CPU time of the drafter while the rank was in a collective. delayed_s: the rank waited for a core."""

    inside_s: float = 0.0
    delayed_s: float = 0.0


class Gap:
    """The rank's end: sums since start, whatever becomes of the drafter. path: where others of this host read them."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("tpspec-gap")  # in no folder, so nobody has to clean up
        os.ftruncate(self._fd, SUMS.size)
        self._memory = mmap.mmap(self._fd, SUMS.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, sums: Sums) -> None:
        SUMS.pack_into(self._memory, 0, *sums)


class Share(NamedTuple):
    """What a drafter has done since it was ready. work_s: its CPU time; the rest as in Sums."""

    work_s: float = 0.0
    inside_s: float = 0.0
    delayed_s: float = 0.0


class GapReader:
    """The drafter's end, made when it is ready."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self._memory = mmap.mmap(file.fileno(), SUMS.size, access=mmap.ACCESS_READ)
        self._begun, self._at_begin = process_time(), self._sums()

    def share(self) -> Share:
        work_s = process_time() - self._begun
        now, before = self._sums(), self._at_begin
        # A collective that had begun before the drafter was ready holds some of its loading too.
        inside_s = min(work_s, now.inside_s - before.inside_s)
        return Share(work_s, inside_s, now.delayed_s - before.delayed_s)

    def _sums(self) -> Sums:
        return Sums(*SUMS.unpack_from(self._memory))


class Filled(InTurn):
    """A communicator that counts what a drafter works meanwhile. For the thread that runs the rounds alone.

    work_s: the drafter's CPU time so far; 0 if it is gone.
    """

    is_queued = False  # the host counts while it waits

    def __init__(self, inner: Communicator, gap: Gap, work_s: Callable[[], float]) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._gap, self._work_s = inner, gap, work_s
        self._inside_s = 0.0
        self._delay: Delay | None = None

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        return self._watched(self._inner.all_reduce, x, purpose)

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        return self._watched(self._inner.all_gather, x, purpose)

    def _watched(self, verb: Callable[[Tensor, Purpose], Tensor], x: Tensor, purpose: Purpose) -> Tensor:
        if self._delay is None:
            self._delay = Delay()
        before = self._work_s()
        result = verb(x, purpose)
        self._inside_s += max(0.0, self._work_s() - before)  # less than before: it has died
        self._gap.write(Sums(self._inside_s, self._delay.seconds()))
        return result


class Delay:
    """How long this thread has wanted a core and had none, since this was made."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._before = self._read()

    def seconds(self) -> float:
        return self._read() - self._before

    def _read(self) -> float:
        """Of "ran, waited, turns": Linux, Documentation/scheduler/sched-stats.rst."""
        return int(os.pread(self._fd, SCHEDSTAT_BYTES, 0).split()[1]) / 1e9


def in_a_thread(device: torch.device) -> bool:
    """Whether a drafter in gaps is a thread of its rank's there. On the CPU, where the OS shares cores out by process,
    it is a process of its own."""
    return switch(SWITCH, THREAD if device.type == "cuda" else PROCESS, (THREAD, PROCESS)) == THREAD


def go_first(device: torch.device) -> None:
    """From now on what this thread asks of a card goes before what a drafter beside it asks of it (`go_last`). Between
    processes CUDA's multi-process service alone heeds that."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]


def go_last(device: torch.device) -> None:
    """The same of a drafter's thread: in a stream of its own, of the lowest priority."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=0))  # type: ignore[no-untyped-call]


def open_gap() -> Gap | None:
    """None where the OS does not tell."""
    return Gap() if sys.platform == "linux" and os.path.exists("/proc/thread-self/schedstat") else None


def cpu_s(pid: int) -> float:
    """CPU time of a process of this host; 0 of one that is gone."""
    try:
        return clock_gettime((~pid << 3) | CPUCLOCK_SCHED)
    except OSError:
        return 0.0
