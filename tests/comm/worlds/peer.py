"""Ranks that see each other's memory, which is a file of each here; the kernel runs in Triton's interpreter.

argv[1]: a folder for the files; argv[2]: `agree` with gloo, `wrong`: rank 1 is told another place for rank 0's, or
`late`: rank 1 comes to its first message long after rank 0's looks would have been spent, or `rows`: by one kernel with
a norm, against two.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tpspec.cache.store import Kept, KVStore
from tpspec.comm.communicator import Communicator, Purpose
from tpspec.comm.distributed import Place, join_world
from tpspec.comm.peer import PeerMemory, attempt, memory_bytes, warm_up
from tpspec.comm.peer_kernel import CAPACITY
from tpspec.errors import WorldFailure
from tpspec.model.card.steps import CardSteps
from tpspec.model.card.tilings import Tiling
from tpspec.model.norm import Norm
from tpspec.model.sight import Heads, Shape, Sight
from tpspec.model.steps import AddNorm

CPU = torch.device("cpu")
LOOKS = 5_000  # some hundred milliseconds
# Not bfloat16, which the interpreter takes for whole numbers in places.
ROWS = (  # and whether they are summed by the norm's kernel: not too many, nor too wide
    (1, 64, torch.float32, True),
    (6, 48, torch.float16, True),
    (9, 64, torch.float32, False),
    (2, 4096, torch.float32, True),
    (8, 600, torch.float32, True),
    (1, 4100, torch.float32, False),
)
CALLS = ((3, torch.float32), (1024, torch.float16), (1500, torch.float32), (2100, torch.float16))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def memories(gloo: Communicator, folder: Path) -> list[torch.Tensor]:
    size = memory_bytes(gloo.size)
    own = folder / str(gloo.rank)
    own.write_bytes(bytes(size))
    gloo.all_gather(torch.zeros(1), Purpose.control)  # everybody's file is there
    return [
        torch.from_file(str(folder / str(rank)), shared=True, size=size, dtype=torch.uint8) for rank in range(gloo.size)
    ]


def agree(peers: PeerMemory, gloo: Communicator) -> None:
    """Sums and gathers of several sizes, one after another in the same memory, are gloo's, added in rank order."""
    same, at_once = True, peers.most_at_once
    for turn, (count, dtype) in enumerate(CALLS):
        x = torch.randn(count, generator=torch.Generator().manual_seed(10 * turn + gloo.rank)).to(dtype)
        same &= torch.equal(peers.all_gather(x, Purpose.pick), gloo.all_gather(x, Purpose.pick))
        total = gloo.all_reduce(x.clone(), Purpose.mlp)
        for peers.most_at_once in (at_once, 0, at_once) if turn % 2 else (0, 0):  # in one leg and in two
            same &= torch.equal(peers.all_reduce(x.clone(), Purpose.mlp), total)
    peers.most_at_once = at_once
    for count in (CAPACITY // 4 + 1, gloo.size * CAPACITY // 4 + 1):  # too long for one leg, and for two
        longer = torch.arange(count).float() + gloo.rank
        total = gloo.all_reduce(longer.clone(), Purpose.mlp)
        same &= torch.equal(peers.all_reduce(longer, Purpose.mlp), total)
    say("lost" if peers.is_lost else "same" if same else "differs")


def rows(peers: PeerMemory, gloo: Communicator) -> None:
    """Sums with a norm behind them are, in one kernel, what they are in two: few rows and wide ones, one after another
    in the same memory."""
    shape = Shape(frozenset({Sight(Heads((0,), 16), None)}), torch.float32, CPU, 1.0, "silu")
    steps = CardSteps(
        shape, (), KVStore({0: Kept(1, 16)}, 16, torch.float32, CPU), dict.fromkeys(shape.heads, Tiling(32, 16, 0, 64))
    )
    random = torch.Generator().manual_seed(gloo.rank)
    at_once, by_two = peers.most_at_once, peers.all_reduce
    apart: list[bool] = []
    peers.all_reduce = lambda *given: (apart.append(True), by_two(*given))[1]  # type: ignore[method-assign]
    same = True
    for turn, (count, dim, dtype, joined) in enumerate(ROWS):
        part = torch.randn(count, dim, generator=random).to(dtype)
        x, weight, out_weight = (
            gloo.all_gather(torch.randn(size, generator=random), Purpose.control)[0]
            for size in ((count, dim), (dim,), (dim,))
        )
        norm = (Norm(weight, 1e-5), Norm(weight, 1e-5, centred=True), None)[turn % 3]
        out_norm = Norm(out_weight, 1e-3) if turn % 2 else None
        made: list[torch.Tensor] = []
        apart.clear()
        for peers.most_at_once in (0, at_once):
            then = AddNorm(steps, x.to(dtype, copy=True), norm, out_norm)
            made += peers.all_reduce_then(part.clone(), Purpose.mlp, then)
        same &= torch.equal(made[0], made[2]) and torch.equal(made[1], made[3]) and len(apart) == 2 - joined
    say("lost" if peers.is_lost else "same" if same else "differs")


def late(peers: PeerMemory, gloo: Communicator) -> None:
    if gloo.rank == 1:
        time.sleep(3.0)  # it compiles
    warm_up(peers, CPU)
    gloo.all_gather(torch.zeros(1), Purpose.control)
    say("lost" if peers.is_lost else "nothing lost")
    x = torch.arange(1500).float() + gloo.rank
    same = torch.equal(peers.all_reduce(x.clone(), Purpose.mlp), gloo.all_reduce(x.clone(), Purpose.mlp))
    say("same" if same and not peers.is_lost else "differs")


def wrong(peers: PeerMemory) -> None:
    try:
        attempt(peers, CPU, LOOKS)
        say("nothing was wrong")
    except WorldFailure as fault:
        say(str(fault))


def main() -> None:
    place = Place.from_env(os.environ)
    with join_world(place, CPU) as world:
        gloo = world.group(range(world.size), transport="gloo", ordered=True)
        assert gloo is not None
        seen = memories(gloo, Path(sys.argv[1]))
        addresses = [one.data_ptr() for one in seen]
        elsewhere = torch.zeros(len(seen[0]), dtype=torch.uint8)
        if sys.argv[2] == "wrong" and world.rank == 1:
            addresses[0] = elsewhere.data_ptr()
        peers = PeerMemory(gloo, addresses, CPU)
        for epochs in (peers._epochs, peers._row_epochs):
            epochs.fill_(2**31 - 3)  # days later: it wraps soon
        if sys.argv[2] == "agree":
            agree(peers, gloo)
        elif sys.argv[2] == "rows":
            rows(peers, gloo)
        elif sys.argv[2] == "late":
            late(peers, gloo)
        else:
            wrong(peers)
        gloo.all_gather(torch.zeros(1), Purpose.control)


main()
