"""Three ranks over gloo: saves what each got from the collectives, and what the ledger counted, under argv[1]."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import torch

from tpspec.comm.communicator import Purpose
from tpspec.comm.distributed import Place, join_world
from tpspec.comm.ledger import Ledger, counted


def rows(rank: int, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num_rows, 48, generator=generator).bfloat16()


def main() -> None:
    folder = Path(sys.argv[1])
    place = Place.from_env(os.environ)
    with join_world(place, torch.device("cpu"), timeout_s=30) as world:
        everyone = world.group([0, 1, 2], ordered=True, transport="gloo")
        pair = world.group([0, 2], transport="gloo")
        lone = world.group([1])
        assert everyone is not None
        assert (pair is None) == (place.rank == 1)
        assert (lone is not None) == (place.rank == 1)
        ledger = Ledger()
        comm = counted(everyone, ledger)
        found = {
            "note": world.announce("ipc:///tmp/somewhere" if world.rank == 0 else None),
            "small": comm.all_reduce(rows(place.rank, 5), Purpose.mlp),
            "large": comm.all_reduce(rows(place.rank, 4096), Purpose.attention),  # above the size where gloo reduces
            "gathered": comm.all_gather(rows(place.rank, 2), Purpose.pick),
            "pair": None if pair is None else pair.all_reduce(rows(place.rank, 4096), Purpose.mlp),
        }
        torch.save(found, folder / f"{place.rank}.pt")
        (folder / f"{place.rank}.json").write_bytes(msgspec.json.encode(ledger.totals()))


if __name__ == "__main__":
    main()
