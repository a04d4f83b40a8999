"""What worlds whose ranks share a card have it launch (test_rounds.py's that run alone), compiled for one that is not
here: each rank's part by itself, in one process. Run by scripts/test-gpu. argv: compute capability.

Otherwise all ranks compile it there at once, within the time that such a world may take.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

from tests.checkpoints import tiny
from tests.compiling_card import compiling_card, refused
from tests.gpu.worlds.recorded import CARD, norms_are_right, sums_are_right, text
from tpspec.comm.communicator import Communicator, InTurn, OneRank, Purpose
from tpspec.comm.peer import PeerMemory, warm_up

SIZES = 2, 3


class OneOf(InTurn):
    """So many ranks, whose others bring nothing."""

    is_queued = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        out = x.new_zeros((self.size, *x.shape))
        out[self.rank] = x
        return out


def compile_rank(folder: Path, rank: int, size: int) -> None:
    host = OneOf(rank, size)
    peers = PeerMemory(host, [0] * size, CARD)  # addresses that nobody goes to
    warm_up(peers, CARD)
    sums_are_right(peers, host)
    norms_are_right(peers)
    peers.is_queued = True
    ways: tuple[Communicator, ...] = host, peers
    for comm, source in product(ways, ("none", "ngram")):
        text(folder, comm, "float32", source)
    text(folder, peers, "bfloat16")


def main() -> None:
    major, _, minor = sys.argv[1].partition(".")
    with tempfile.TemporaryDirectory() as temporary:
        folder = tiny("smollm2", Path(temporary))
        with compiling_card((int(major), int(minor))) as names:
            text(folder, OneRank(), "float32")
            for size in SIZES:
                for rank in range(size):
                    compile_rank(folder, rank, size)
            sys.stdout.write(f"{len(names)} kernels of worlds that share a card\n")
    if refused:
        sys.exit("not compiled: " + "; ".join(dict.fromkeys(refused)))


if __name__ == "__main__":
    main()
