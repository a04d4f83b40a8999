"""Collectives by plain stores into each other's memory. Cards are files that processes share, and the kernel runs in
Triton's interpreter: the protocol is the real one, the speed is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch

from tests.comm.test_distributed import torchrun
from tpspec.comm.communicator import OneRank, Purpose
from tpspec.comm.shared import Unavailable, agreed

pytest.importorskip("triton")
from triton.runtime.errors import PTXASError

from tpspec.comm import peer
from tpspec.comm.peer_cards import SIZES, _built, largest_won
from tpspec.comm.peer_kernel import CAPACITY

pytestmark = pytest.mark.alone


def test_sums_and_gathers_are_those_of_gloo(tmp_path: Path) -> None:
    """Messages of several chunks, one after another; of two ranks see below. Stands against a message that is
    overwritten before a slow rank has read it, a flag of the epoch before, and an epoch that wraps."""
    ended = torchrun(3, "peer.py", str(tmp_path), "agree")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["same"] * 3


def test_a_sum_with_a_norm_behind_it_is_the_same_in_one_kernel_and_in_two(tmp_path: Path) -> None:
    """To the bit: rounds of few rows take the one, those of more the other, and a text is not to depend on that.
    Stands against rows of one width that lie where another's were, and are overwritten before a slow rank has read."""
    ended = torchrun(3, "peer.py", str(tmp_path), "rows")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["same"] * 3


def test_memory_that_is_not_the_peers_is_found_out_in_time(tmp_path: Path) -> None:
    """As where a driver maps something, but not the other card: nobody hangs, and no rank goes on."""
    ended = torchrun(2, "peer.py", str(tmp_path), "wrong")
    assert ended.returncode == 0, ended.stderr
    told = sorted(ended.stdout.splitlines())
    assert [line.partition(":")[0] for line in told] == ["rank 0", "rank 1"]
    assert told[0] == "rank 0: a message of 8 bytes from another card did not come"


def test_a_rank_that_compiles_late_is_not_lost(tmp_path: Path) -> None:
    """Stands against a trial that is given up because a neighbour still compiles, and against flags of the warm-up, in
    which nobody waits, that are taken for a message's."""
    ended = torchrun(2, "peer.py", str(tmp_path), "late")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["nothing lost"] * 2 + ["same"] * 2


@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        RuntimeError("Cannot find ptxas"),
        CalledProcessError(1, ["gcc", "main.c"]),
        PTXASError("no ptxas " + "é" * 3000),
    ],
    ids=["no C compiler", "no assembler", "no headers", "a log of its own"],
)
def test_without_a_compiler_the_ranks_go_another_way(fault: Exception) -> None:
    """Stands against a world that ends on a machine without a C compiler or Python's headers: what Triton raises there
    is no OSError; and against what is longer than a note, at which one rank alone would end. A fault of the card's is
    none of these."""

    def fails() -> None:
        raise fault

    with pytest.raises(Unavailable, match="rank 0: Triton cannot build its kernels"):
        agreed(OneRank(), lambda: _built(fails))


def test_nothing_is_compiled_in_the_trial_that_was_not_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a size, a type or a leg of the trial for which Triton makes one kernel more, while others look."""
    made = set()

    def grid(name: str) -> defaultdict[object, Callable[..., None]]:
        def launch(*given: Any, **constants: Any) -> None:
            kinds = [x.dtype if isinstance(x, torch.Tensor) else (x == 1, x % 16 == 0) for x in given]
            made.add((name, *kinds, *sorted(constants.items())))
            if name == "exchange":
                given[1].copy_(given[0])  # the sum of one rank, and what it gathers

        return defaultdict(lambda: launch)

    for name in ("exchange", "sum_by_shares"):
        monkeypatch.setattr(peer, name, grid(name))
    memory = torch.zeros(peer.memory_bytes(1), dtype=torch.uint8)
    peers = peer.PeerMemory(OneRank(), [memory.data_ptr()], torch.device("cpu"))
    peer.warm_up(peers, torch.device("cpu"))
    warm = set(made)
    assert len(warm) == 6
    peer.attempt(peers, torch.device("cpu"))
    assert made == warm


def test_a_rank_that_gives_up_leaves_nobody_in_a_collective_of_another_kind() -> None:
    """Stands against a gather too long for peer memory in the trial of it: who has seen nothing wrong would wait there
    as long as NCCL does, which then ends the world."""
    sizes: dict[str, list[int]] = {"gathered": [], "summed": []}

    class Right:
        """Rank 0 of two, whose neighbour brings 1000 more."""

        rank, size, most_at_once, most_looks, is_lost = 0, 2, CAPACITY, 0, False
        most_bytes = 2 * CAPACITY

        def all_gather(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
            sizes["gathered"].append(x.nbytes)
            return torch.stack([x, x + 1000])

        def all_reduce(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
            sizes["summed"].append(x.nbytes)
            return 2 * x + 1000

    peers: Any = Right()
    peer.attempt(peers, torch.device("cpu"))
    assert max(sizes["summed"]) == Right.most_bytes
    assert max(sizes["gathered"]) == CAPACITY


def test_a_fault_of_the_card_is_not_taken_for_a_missing_compiler() -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="CUDA error"):
        agreed(OneRank(), lambda: _built(fails))


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
