"""Under torchrun: an engine over gloo, with every call of torch.distributed counted. Usage: counted.py JOB OUT.

JOB has {topology, requests}; OUT/RANK.json gets {seen, ledger, forward_s}: calls and bytes by torch.distributed's verb,
tallies by purpose, and the engine's seconds.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from tests.worlds import Script
from tpspec.comm import distributed
from tpspec.comm.channel import open_channel
from tpspec.comm.distributed import Place, join_world
from tpspec.comm.messages import Submit
from tpspec.request import Request
from tpspec.roles.build import build_engine
from tpspec.roles.target import follow_rounds, lead_rounds
from tpspec.topology.config import Topology

CPU = torch.device("cpu")
GATHERED = 4096  # bytes: larger sums go through gloo's own all_reduce, so that both ways occur


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    place = Place.from_env(os.environ)
    distributed.GATHER_BYTES = GATHERED
    with join_world(place, CPU) as world:
        ranks = list(range(place.world_size))
        comm, channel = world.group(ranks, transport="gloo"), open_channel(world, ranks, 60.0)
        assert comm is not None
        assert channel is not None
        engine = build_engine(Topology.model_validate_json(json.dumps(job["topology"])), comm, CPU).engine
        seen = counting()
        if comm.rank == 0:
            script = Script({1: [Submit(msgspec.convert(request, Request)) for request in job["requests"]]})
            lead_rounds(engine, channel, script)
        else:
            follow_rounds(engine, channel)
        found = {"seen": seen, "ledger": engine.ledger.totals(), "forward_s": engine.stats().forward_s}
        (out / f"{place.rank}.json").write_bytes(msgspec.json.encode(found))
        channel.close()


def counting() -> dict[str, Counter[str]]:
    """From now on every verb that moves tensors is counted; those that should never be called, too."""
    seen: dict[str, Counter[str]] = {}

    def watch(owner: Any, name: str, payload: int) -> None:
        verb: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, Counter()).update({"count": 1, "bytes": args[payload].nbytes})
            return verb(*args, **kwargs)

        setattr(owner, name, counted)

    watch(dist, "all_reduce", 0)
    watch(distributed, "gather_into", 1)
    for name in ("broadcast", "reduce", "send", "recv", "isend", "irecv"):
        watch(dist, name, 0)
    return seen


if __name__ == "__main__":
    main()
