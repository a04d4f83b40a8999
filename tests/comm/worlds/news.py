"""Three ranks and a channel of two of them (0 leads 2): every follower prints the rounds it heard of."""

from __future__ import annotations

import os
import sys

import torch

from tpspec.comm.channel import open_channel
from tpspec.comm.distributed import Place, join_world
from tpspec.comm.messages import News


def main() -> None:
    place = Place.from_env(os.environ)
    with join_world(place, torch.device("cpu"), timeout_s=30) as world:
        channel = open_channel(world, [0, 2], timeout_s=30)
        assert (channel is None) == (place.rank == 1)
        if channel is None:
            return
        heard = [channel.share(News(round=i) if place.rank == 0 else None).round for i in range(200)]
        channel.close()
        sys.stdout.write(f"rank {place.rank} heard {heard == list(range(200))}\n")


if __name__ == "__main__":
    main()
