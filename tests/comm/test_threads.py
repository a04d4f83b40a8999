"""Ranks as threads: exact sums, copies, and no hang when one fails."""

from __future__ import annotations

import time

import pytest
import torch

from tpspec.comm.communicator import Communicator, Purpose
from tpspec.comm.threads import ThreadWorld
from tpspec.errors import WorldFailure


def test_sums_and_gathers_many_times() -> None:
    """With a single set of places and a single barrier, a fast rank overwrites what a slow one has not read."""

    def rank_main(comm: Communicator) -> bool:
        for turn in range(300):
            x = torch.full((3,), float(comm.rank + turn))
            parts = comm.all_gather(x, Purpose.pick)
            x.fill_(-1)
            y = comm.all_reduce(torch.full((3,), float(comm.rank + turn)), Purpose.mlp)
            if parts[:, 0].tolist() != [turn, turn + 1, turn + 2] or y[0] != 3 * turn + 3:
                return False
        return True

    assert ThreadWorld(3).run(rank_main) == [True] * 3


def test_sums_are_bitwise_the_same_on_each_rank() -> None:
    def rank_main(comm: Communicator) -> torch.Tensor:
        generator = torch.Generator().manual_seed(comm.rank)
        return comm.all_reduce(torch.randn(64, 33, generator=generator).bfloat16(), Purpose.mlp)

    first, *others = ThreadWorld(5).run(rank_main)
    assert all(torch.equal(first, other) for other in others)


def test_a_raising_thread_does_not_hang_the_others() -> None:
    def rank_main(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(2), Purpose.mlp)
        if comm.rank == 1:
            raise KeyError("mine")
        comm.all_reduce(torch.ones(2), Purpose.mlp)

    begin = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        ThreadWorld(3).run(rank_main)
    assert time.monotonic() - begin < 5


def test_a_rank_that_stops_calling_is_noticed() -> None:
    def rank_main(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(torch.ones(2), Purpose.mlp)

    with pytest.raises(WorldFailure, match="rank 0, all_reduce for mlp: another rank is gone or late"):
        ThreadWorld(2, timeout_s=0.2).run(rank_main)


def test_diverging_calls_are_named() -> None:
    with pytest.raises(WorldFailure, match=r"diverged: all_gather for pick .* \[1\]; .* \[2\]"):
        ThreadWorld(2).run(lambda comm: comm.all_gather(torch.ones(comm.rank + 1), Purpose.pick))
