"""What a drafter beside a rank costs it: counted from outside, of real processes, and told to them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tpspec.comm.communicator import Purpose
from tpspec.comm.gap import Filled, Gap, Share, cpu_s, open_gap
from tpspec.comm.process import keep_to_own_cores

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process sees another's clock"),
]

WAIT_S, BURN_S = 0.3, 0.2
X = torch.ones(2)
WORKER = """
import sys, time
from tpspec.comm.gap import GapReader
reader = GapReader(sys.argv[1])
for line in sys.stdin:
    until = time.perf_counter() + float(line)
    while time.perf_counter() < until:
        pass
    print(*reader.share(), flush=True)
"""


class Sleeping:
    """A group of two whose collectives take a while and no core."""

    rank, size = 0, 2

    def all_reduce(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        time.sleep(WAIT_S)
        return x

    def all_gather(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        return self.all_reduce(x, purpose).unsqueeze(0)


class Worker:
    """In a drafter's place: a process that works when it is told to."""

    def __init__(self, gap: Gap) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", WORKER, gap.path], stdin=pipe, stdout=pipe, text=True)
        self.work(0)
        self.share()

    def work(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def share(self) -> Share:
        assert self.process.stdout is not None
        return Share(*map(float, self.process.stdout.readline().split()))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Beside:
    """A rank and whoever works beside it."""

    def __init__(self) -> None:
        gap = open_gap()
        assert gap is not None
        self.gap, self.worker = gap, Worker(gap)
        self.comm = Filled(Sleeping(), gap, lambda: cpu_s(self.worker.process.pid))

    def restart(self) -> None:
        self.worker.end()
        self.worker = Worker(self.gap)


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.worker.end()


def test_work_in_a_collective_is_inside_and_work_between_two_is_not(beside: Beside) -> None:
    """Stands against a clock that is read on one side of a collective only, or that is the rank's own."""
    beside.worker.work(BURN_S)
    assert torch.equal(beside.comm.all_reduce(X, Purpose.mlp), X)
    beside.worker.share()
    beside.worker.work(BURN_S)
    between = beside.worker.share()
    assert 0 < between.inside_s < 0.75 * between.work_s
    beside.worker.work(BURN_S)
    assert beside.comm.all_gather(X, Purpose.pick).shape == (1, 2)
    beside.worker.work(0)
    beside.worker.share()
    after = beside.worker.share()
    assert after.inside_s - between.inside_s > 0.75 * (after.work_s - between.work_s)


def test_a_drafter_that_was_started_again_counts_from_its_own_start(beside: Beside) -> None:
    """Stands against the waits of the one before it, which would be counted twice; and against a pid that is gone."""
    beside.worker.work(BURN_S)
    beside.comm.all_reduce(X, Purpose.mlp)
    assert beside.worker.share().work_s > 0
    beside.worker.end()
    beside.comm.all_reduce(X, Purpose.mlp)  # nobody is there
    beside.restart()
    beside.worker.work(0)
    assert beside.worker.share().inside_s == 0
    beside.worker.work(BURN_S)
    beside.comm.all_reduce(X, Purpose.mlp)
    beside.worker.work(0)
    beside.worker.share()
    share = beside.worker.share()
    assert 0.5 * share.work_s < share.inside_s <= share.work_s


def test_a_rank_that_has_to_share_its_core_is_delayed(beside: Beside) -> None:
    """Stands against a column of the scheduler's that is not the wait for a core."""
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    os.sched_setaffinity(0, one)
    os.sched_setaffinity(beside.worker.process.pid, one)
    try:
        beside.comm.all_reduce(X, Purpose.mlp)
        beside.worker.work(BURN_S)
        until = time.perf_counter() + BURN_S
        while time.perf_counter() < until:
            pass
        beside.comm.all_reduce(X, Purpose.mlp)
    finally:
        os.sched_setaffinity(0, cores)
    beside.worker.share()
    beside.worker.work(0)
    assert beside.worker.share().delayed_s > 0.1 * BURN_S


def alone(work: Callable[[], object]) -> set[int]:
    """The cores of a thread that has done this."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: (work(), os.sched_getaffinity(0))[1]).result()


def test_ranks_of_a_host_keep_to_cores_of_their_own_where_there_are_enough() -> None:
    """Stands against a drafter that fills the gaps of a rank with the time of another."""
    cores = os.sched_getaffinity(0)
    parts = [alone(lambda i=i: keep_to_own_cores(i, len(cores))) for i in range(len(cores))]  # type: ignore[misc]
    assert sorted(core for part in parts for core in part) == sorted(cores)
    assert alone(lambda: keep_to_own_cores(0, len(cores) + 1)) == cores
