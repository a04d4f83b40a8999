"""Ranks over shared memory. argv[1]: `compare` with gloo, run `endless`ly, or go without the library (`missing`)."""

from __future__ import annotations

import os
import sys

import torch

from tpspec.comm import shared
from tpspec.comm.communicator import Purpose
from tpspec.comm.distributed import Place, World, join_world
from tpspec.comm.shared import SLOT_BYTES, SharedMemory
from tpspec.errors import UserError, WorldFailure

COUNTS = (1, 7, 576, 6 * 576, SLOT_BYTES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # one write, or the lines of two ranks mix
    sys.stdout.flush()


def compare(world: World) -> None:
    ranks = list(range(world.size))
    quick, slow = world.group(ranks, transport="shared"), world.group(ranks, transport="gloo", ordered=True)
    assert isinstance(quick, SharedMemory)
    assert slow is not None
    same = True
    for turn, count in enumerate(COUNTS):
        for dtype in DTYPES:
            x = torch.randn(count, generator=torch.Generator().manual_seed(100 * turn + world.rank)).to(dtype)
            same &= torch.equal(quick.all_gather(x, Purpose.pick), slow.all_gather(x, Purpose.pick))
            same &= torch.equal(quick.all_reduce(x.clone(), Purpose.mlp), slow.all_reduce(x, Purpose.mlp))
    say("same" if same else "differs")


def endless(world: World) -> None:
    comm = world.group(list(range(world.size)))
    assert isinstance(comm, SharedMemory)
    say("ready")
    while True:
        comm.all_reduce(torch.ones(8), Purpose.mlp)


def missing(world: World) -> None:
    shared.LIBRARY = "tpspec.comm._absent"
    try:
        say(type(world.group([0, 1], transport=sys.argv[2])).__name__)  # type: ignore[arg-type]
    except UserError as error:
        say(str(error))


def main() -> None:
    try:
        with join_world(Place.from_env(os.environ), torch.device("cpu"), timeout_s=30) as world:
            {"compare": compare, "endless": endless, "missing": missing}[sys.argv[1]](world)
    except WorldFailure as failure:
        say(str(failure))
        sys.exit(failure.exit_code)


if __name__ == "__main__":
    main()
