"""Ranks that share one card, and its memory: sums, gathers, then rounds whose collectives are part of a recording.

argv[1]: a checkpoint. Writes "same" where sums are right, with and without a norm behind them, and the text
of recorded rounds is that of plain ones.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tpspec.cache.store import Kept, KVStore
from tpspec.comm.communicator import Communicator, Purpose
from tpspec.comm.distributed import Place, join_world
from tpspec.comm.messages import News
from tpspec.comm.peer import PeerMemory
from tpspec.comm.peer_cards import share_cards
from tpspec.comm.through_host import ThroughHost
from tpspec.model.card.steps import card_steps
from tpspec.model.norm import Norm
from tpspec.model.sight import Heads, Shape, Sight
from tpspec.model.steps import AddNorm
from tpspec.request import Request
from tpspec.roles.build import build_engine
from tpspec.topology.config import automatic

CARD = torch.device("cuda", 0)
COUNTS = (3, 576, 6 * 4096, 30_000, 60_000)  # the last too long for one leg


def sums_are_right(peers: Communicator, host: Communicator) -> bool:
    right = True
    for turn, count in enumerate(COUNTS * 5):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.randn(count, generator=torch.Generator().manual_seed(10 * turn + host.rank)).to(dtype)
            gathered = peers.all_gather(x.to(CARD), Purpose.pick).cpu()
            summed = peers.all_reduce(x.to(CARD), Purpose.mlp).cpu()
            right &= torch.equal(gathered, host.all_gather(x, Purpose.pick))
            right &= torch.equal(summed, host.all_reduce(x.clone(), Purpose.mlp))
    return right


def norms_are_right(peers: PeerMemory) -> bool:
    """By the kernel that sums and by one of their own, to the bit: rounds of few rows take the one, of more the two."""
    shape = Shape(frozenset({Sight(Heads((0,), 64), None)}), torch.bfloat16, CARD, 1.0, "silu")
    steps = card_steps(shape, (), KVStore({0: Kept(1, 64)}, 64, torch.bfloat16, CARD))
    assert steps is not None
    right, random = True, torch.Generator().manual_seed(peers.rank)
    for num_rows, dim, dtype in ((1, 576, torch.float16), (6, 4096, torch.bfloat16), (8, 8192, torch.bfloat16)):
        part = torch.randn(num_rows, dim, generator=random).to(CARD, dtype)
        x, norm = torch.full_like(part, 0.3), Norm(torch.linspace(0.5, 2, dim, device=CARD), 1e-5)
        joined = peers.all_reduce_then(part.clone(), Purpose.mlp, AddNorm(steps, x.clone(), norm, norm))
        apart = steps.add_norm(x.clone(), peers.all_reduce(part.clone(), Purpose.mlp), norm, norm)
        right &= all(torch.equal(*both) for both in zip(joined, apart, strict=True))
    return right


def text(folder: Path, comm: Communicator, dtype: str, source: str = "ngram") -> list[int]:
    keys = {"target.dtype": dtype, "draft.source": source, "draft.tokens": 3, "cache.tokens": 512}
    overrides = [f"{key}={value}" for key, value in keys.items()]
    topology = automatic(comm.size, str(folder), cuda=True, overrides=overrides)
    built = build_engine(topology, comm, CARD)
    built.own.prepare()
    engine = built.engine
    engine.hear(News(round=1, requests=(Request(0, (5, 6, 7, 8) * 3, 16),)))
    tokens: list[int] = []
    while not engine.is_idle:
        tokens += [token for delta in engine.step() for token in delta.tokens]
    return tokens


def main() -> None:
    with join_world(Place.from_env(os.environ), CARD) as world:
        host = world.group(range(world.size), ordered=True, transport="host")  # as peers sum: in the order of ranks
        assert isinstance(host, ThroughHost)
        peers = share_cards(host, host._host, CARD)
        right = sums_are_right(peers, host._host) & norms_are_right(peers)
        plain = text(Path(sys.argv[1]), host, "float32")
        peers.is_queued = True  # every message of this model is small enough
        right &= text(Path(sys.argv[1]), peers, "float32") == plain
        # In 16 bits products fetch weights before the sum in front has ended; what they say is not compared here.
        right &= text(Path(sys.argv[1]), peers, "bfloat16") == text(Path(sys.argv[1]), peers, "bfloat16")
        sys.stdout.write(f"{'same' if right else 'differs'}\n")


if __name__ == "__main__":
    main()
