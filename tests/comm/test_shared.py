"""Collectives through shared memory: gloo's and the threads' bits, nothing left behind, no hang, no silent fallback.

Most ranks here are threads, each with a mapping of its own; the compiled calls run side by side, for they free the
interpreter. What needs processes (a death, a whole world) starts some.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.serving import free_port
from tests.comm.test_distributed import ENV, WORLDS, torchrun
from tests.slow import slowly
from tpspec.comm import shared
from tpspec.comm.communicator import Communicator, Purpose, sum_in_order
from tpspec.comm.ledger import Ledger, counted
from tpspec.comm.messages import Tally
from tpspec.comm.shared import SLOT_BYTES, SUMS, SharedMemory, Unavailable, share_memory
from tpspec.comm.threads import ThreadWorld
from tpspec.errors import WorldFailure

pytestmark = pytest.mark.alone

SEGMENTS = Path("/dev/shm")
LONG = SLOT_BYTES // 2 + 77  # two-byte numbers: more than a slot

try:
    shared.load_library()
except OSError as error:
    pytest.skip(f"no shared-memory library: {error}", allow_module_level=True)


def among(size: int, rank_main: Callable[[SharedMemory, Communicator], object], timeout_s: float = 20.0) -> list:
    """What each of `size` ranks returned that share memory, and meet as threads."""

    def rank(over: Communicator) -> object:
        group = share_memory(over, timeout_s)
        try:
            return rank_main(group, over)
        finally:
            group.close()

    return ThreadWorld(size).run(rank)


def part(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 3).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [*SUMS, torch.float64, torch.int32], ids=str)
def test_sums_have_the_bits_of_a_sum_in_rank_order(size: int, dtype: torch.dtype) -> None:
    """Also on two ranks' sums of -0.0, at the end of a block, and over more than one slot."""
    counts = [1, 3, 511, 512, 513, 6 * 576, LONG, 2 * LONG]

    def rank_main(group: SharedMemory, over: Communicator) -> list[torch.Tensor]:
        return [group.all_reduce(part(group.rank, count, dtype), Purpose.mlp) for count in counts]

    for found in among(size, rank_main):
        for count, total in zip(counts, found, strict=True):
            parts = [part(rank, count, dtype) for rank in range(size)]
            assert torch.equal(bits(total), bits(sum_in_order(parts, torch.empty_like(parts[0])))), count


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_two_bytes_passes(dtype: torch.dtype) -> None:
    """Zeros with a sign, subnormals, infinities: x + -0.0 is x, to the bit; and x + x rounds as torch rounds."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    nothing = torch.full_like(every, -0.0)

    def rank_main(group: SharedMemory, over: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        alone = group.all_reduce(every.clone() if group.rank else nothing.clone(), Purpose.mlp)
        third = every if group.rank else (every.float() / 3).to(dtype)
        return alone, group.all_reduce(third.clone(), Purpose.mlp)

    (alone, mixed), _ = among(2, rank_main)
    number = ~every.isnan()
    assert torch.equal(bits(alone[number]), bits(every[number]))
    assert torch.equal(bits(mixed[number]), bits(((every.float() / 3).to(dtype) + every)[number]))
    assert alone[~number].isnan().all()
    assert mixed[~number].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64], ids=str)
def test_gathers_any_dtype_and_shape(dtype: torch.dtype) -> None:
    def rank_main(group: SharedMemory, over: Communicator) -> bool:
        shapes: list[tuple[int, ...]] = [(), (1,), (3, 5), (0, 4), (LONG,)]
        xs = [torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()] for shape in shapes]
        xs = [(x + group.rank).to(dtype).view(shape) for x, shape in zip(xs, shapes, strict=True)]
        return all(torch.equal(group.all_gather(x, Purpose.pick), over.all_gather(x, Purpose.pick)) for x in xs)

    assert among(3, rank_main) == [True] * 3


def test_strided_tensors() -> None:
    def rank_main(group: SharedMemory, over: Communicator) -> bool:
        x = part(group.rank, 48, torch.bfloat16).view(6, 8)[:, ::2]
        expected = over.all_reduce(x.clone(), Purpose.mlp)
        gathered = torch.equal(group.all_gather(x, Purpose.pick), over.all_gather(x, Purpose.pick))
        return gathered and torch.equal(group.all_reduce(x, Purpose.mlp), expected)

    assert among(2, rank_main) == [True] * 2


def test_many_in_a_row_never_mix() -> None:
    """Against a slot that is written again before the slowest has read it: ranks dawdle in turn."""

    def rank_main(group: SharedMemory, over: Communicator) -> bool:
        for turn in range(600):
            if turn % 97 == group.rank:
                time.sleep(0.002)
            x = torch.full((1 + turn % 5,), float(group.rank + turn))
            if group.all_reduce(x, Purpose.mlp)[-1] != 3 * turn + 3:
                return False
        return True

    assert among(3, rank_main) == [True] * 3


def test_it_is_counted_like_any_other() -> None:
    def rank_main(group: SharedMemory, over: Communicator) -> dict[Purpose, Tally]:
        ledger = Ledger()
        comm = counted(group, ledger)
        comm.all_reduce(torch.ones(6, 8).bfloat16(), Purpose.attention)
        comm.all_reduce(torch.ones(LONG).bfloat16(), Purpose.mlp)  # two pieces, one collective
        comm.all_gather(torch.ones(3), Purpose.pick)
        return ledger.totals()

    for totals in among(2, rank_main):
        counts = {purpose: (tally.count, tally.bytes) for purpose, tally in totals.items()}
        assert counts == {Purpose.attention: (1, 96), Purpose.mlp: (1, LONG * 2), Purpose.pick: (1, 12)}


def test_diverging_calls_are_noticed() -> None:
    with pytest.raises(WorldFailure, match="collective for pick: the ranks diverged"):
        among(2, lambda group, over: group.all_gather(torch.ones(group.rank + 1), Purpose.pick))


def test_a_rank_that_stops_calling_is_noticed() -> None:
    def rank_main(group: SharedMemory, over: Communicator) -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(2), Purpose.mlp)
        else:
            time.sleep(0.8)

    line = "rank 0 of 2, collective for mlp: another rank is gone or late .rank 1: nothing came for 0.3 s"
    with pytest.raises(WorldFailure, match=line):
        among(2, rank_main, timeout_s=0.3)


def test_a_late_rank_is_waited_for() -> None:
    """A call that came back because it had waited long is repeated, not begun anew."""

    def rank_main(group: SharedMemory, over: Communicator) -> float:
        if group.rank == 1:
            time.sleep(0.35)
        return float(group.all_reduce(torch.ones(2 * LONG).bfloat16(), Purpose.mlp).float().sum())

    assert among(2, rank_main) == [4.0 * LONG] * 2


def test_others_run_while_a_rank_waits() -> None:
    """A drafter's thread or the signal handler that ends this rank must not wait for a collective to end."""
    steps = 0
    done = threading.Event()

    def work() -> None:
        nonlocal steps
        while not done.is_set():
            steps += 1
            time.sleep(0.001)

    def rank_main(group: SharedMemory, over: Communicator) -> None:
        if group.rank == 1:
            time.sleep(0.3)
        group.all_reduce(torch.ones(2), Purpose.mlp)
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    among(2, rank_main)
    worker.join()
    assert steps > 30


def test_a_closed_group_refuses() -> None:
    def rank_main(group: SharedMemory, over: Communicator) -> None:
        group.close()
        group.all_reduce(torch.ones(2), Purpose.mlp)

    with pytest.raises(WorldFailure, match="the group is closed"):
        among(2, rank_main)


def test_nothing_keeps_a_name() -> None:
    """Also when a rank fails while they meet."""
    before = segments()
    assert among(3, lambda group, over: segments()) == [before] * 3
    assert segments() == before


def test_all_ranks_give_up_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that falls back alone would wait in gloo for ranks that wait in memory."""
    before = segments()

    def trial(group: SharedMemory) -> None:
        if group.rank == 1:
            raise WorldFailure("wrong sum")

    monkeypatch.setattr(shared, "_try", trial)

    def rank_main(over: Communicator) -> str:
        with pytest.raises(Unavailable) as caught:
            share_memory(over, 5.0)
        return str(caught.value)

    assert ThreadWorld(3).run(rank_main) == ["rank 1: wrong sum"] * 3
    assert segments() == before


def test_several_hosts_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_host", lambda: threading.current_thread().name)

    def rank_main(over: Communicator) -> bool:
        with pytest.raises(Unavailable, match="one host") as caught:
            share_memory(over, 5.0)
        return caught.value.expected

    assert ThreadWorld(2).run(rank_main) == [True] * 2


# ---- processes ----


@pytest.mark.parametrize("num_ranks", [2, *slowly(4)])
def test_a_world_gets_the_bits_of_gloo(num_ranks: int) -> None:
    before = segments()
    ended = torchrun(num_ranks, "shared.py", "compare")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["same"] * num_ranks
    assert segments() == before


@pytest.mark.parametrize(
    ("transport", "told"), [("auto", "fell back"), *slowly(("shared", "refused"), ("gloo", "silent"))]
)
def test_a_missing_library_is_told_once(transport: str, told: str) -> None:
    ended = torchrun(2, "shared.py", "missing", transport)
    why = "shared.c was not compiled: install a C compiler, then tpspec again"
    assert ended.returncode == 0, ended.stderr
    if told == "fell back":
        assert ended.stdout.split() == ["Distributed"] * 2
        line = f"collectives go through gloo, which is slower than shared memory: rank 0: {why}"
        assert ended.stderr.count(line) == 1
    elif told == "refused":
        assert ended.stdout.count(f"link.transport: shared cannot be: rank 0: {why}") == 2
    else:
        assert ended.stdout.split() == ["Distributed"] * 2
        assert "shared" not in ended.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_rank_is_noticed_in_no_time(how: signal.Signals) -> None:
    """Whoever started the dead rank has not asked for its exit code yet: a signal would still reach it."""
    before = segments()
    env = {**ENV, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    command = [sys.executable, str(WORLDS / "shared.py"), "endless"]
    ranks = [
        subprocess.Popen(
            command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    outputs = [rank.stdout for rank in ranks if rank.stdout is not None]
    assert [out.readline() for out in outputs] == ["ready\n"] * 3
    begin = time.monotonic()
    os.kill(ranks[1].pid, how)
    lines = [outputs[rank].readline() for rank in (0, 2)]
    seconds = time.monotonic() - begin
    assert [rank.wait(30) for rank in ranks] == [4, -how, 4]
    for out in outputs:
        out.close()
    assert seconds < 2
    for line in lines:
        assert "collective for mlp: another rank is gone or late (rank " in line
        assert line.endswith(": its process has ended)\n")
    assert segments() == before


def segments() -> list[str]:
    """The segments of this project that have a name, this process's own or another's."""
    return sorted(path.name for path in SEGMENTS.glob("tpspec-*"))
