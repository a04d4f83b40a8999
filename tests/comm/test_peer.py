"""Collectives by plain stores into each other's memory. Cards are files that processes share, and the kernel runs in
Triton's interpreter: the protocol is the real one, the speed is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm.test_distributed import torchrun

pytest.importorskip("triton")
from tpspec.comm.peer_cards import SIZES, largest_won
from tpspec.comm.peer_kernel import CAPACITY


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_and_gathers_are_those_of_gloo(num_ranks: int, tmp_path: Path) -> None:
    """Any number of ranks, messages of several chunks, one after another. Stands against a message that is overwritten
    before a slow rank has read it, a flag of the epoch before, and an epoch that wraps."""
    ended = torchrun(num_ranks, "peer.py", str(tmp_path), "agree")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["same"] * num_ranks


def test_memory_that_is_not_the_peers_is_found_out_in_time(tmp_path: Path) -> None:
    """As where a driver maps something, but not the other card: nobody hangs, and no rank goes on."""
    ended = torchrun(2, "peer.py", str(tmp_path), "wrong")
    assert ended.returncode == 0, ended.stderr
    told = sorted(ended.stdout.splitlines())
    assert [line.partition(":")[0] for line in told] == ["rank 0", "rank 1"]
    assert told[0] == "rank 0: a message of 8 bytes from another card did not come"


def test_peer_memory_takes_the_sizes_up_to_the_first_at_which_it_loses() -> None:
    """Stands against a size in the middle that is better left to NCCL, and messages beyond it that come back; and
    against one leg that is taken for sizes at which it was not timed."""
    num, num_once = len(SIZES), SIZES.index(CAPACITY) + 1
    once, twice, other = [9.0] * num_once, [9.5] * num, [10.0] * num
    assert largest_won(once, twice, other) == (CAPACITY, SIZES[-1])
    assert largest_won([9.0, 9.0, *[9.9] * (num_once - 2)], twice, other) == (SIZES[1], SIZES[-1])
    assert largest_won(once, [11.0] * num, other) == (CAPACITY, CAPACITY)
    assert largest_won([11.0] * num_once, twice, other) == (0, SIZES[-1])
    assert largest_won(once, twice, [10.0, 10.0, 8.0, *[10.0] * (num - 3)]) == (SIZES[1], SIZES[1])
    assert largest_won(once, twice, [8.0, *[10.0] * (num - 1)]) == (0, 0)
