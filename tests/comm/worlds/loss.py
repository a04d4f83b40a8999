"""Two ranks over argv[2]; rank 1 leaves (argv[1] is `dies`), or hangs until its input ends. Rank 0 prints when it was
told what."""

from __future__ import annotations

import os
import sys
import time

import torch

from tpspec.comm.communicator import Purpose
from tpspec.comm.distributed import Place, join_world
from tpspec.errors import WorldFailure

TIMEOUT_S = 3.0


def main() -> None:
    place = Place.from_env(os.environ)
    try:
        with join_world(place, torch.device("cpu"), TIMEOUT_S) as world:
            comm = world.group([0, 1], transport=sys.argv[2])  # type: ignore[arg-type]
            assert comm is not None
            comm.all_reduce(torch.ones(8), Purpose.mlp)
            if place.rank == 1 and sys.argv[1] == "dies":
                os._exit(9)
            if place.rank == 1:
                sys.stdin.read()
                os._exit(9)
            begin = time.monotonic()
            comm.all_reduce(torch.ones(8), Purpose.mlp)
    except WorldFailure as failure:
        sys.stdout.write(f"{time.monotonic() - begin:.1f} {failure}\n")
        sys.exit(failure.exit_code)


if __name__ == "__main__":
    main()
