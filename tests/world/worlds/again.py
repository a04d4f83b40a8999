"""Two ranks that meet and lose rank 1 at once; started again, they meet again and say what they add up to."""

from __future__ import annotations

import os
import sys

import torch

from tpspec.comm.communicator import Purpose
from tpspec.comm.distributed import Place, join_world

with join_world(Place.from_env(os.environ), torch.device("cpu"), timeout_s=20) as world:
    comm = world.group([0, 1])
    assert comm is not None
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and world.rank == 1:
        os._exit(1)
    total = comm.all_reduce(torch.tensor([world.rank + 1.0]), Purpose.mlp)
    sys.stdout.write(f"{world.rank}:{total.item():.0f}\n")
