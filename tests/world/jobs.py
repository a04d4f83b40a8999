"""Run under torchrun by the tests beside it: real engines over gloo, one job after another, texts as JSON.

Usage: jobs.py IN OUT, where IN is a list of jobs {topology, requests, liar, alone} and OUT gets a list of
{texts, stats}. `liar` replaces the drafter by one that drafts nonsense; `alone` serves one request at a time. A job
{topology, ids, file} instead runs a prompt through the target and leaves the logits of all its rows in the file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from tests.draft.liar import Liar
from tests.worlds import Script, Told
from tpspec.comm.channel import Channel, open_channel
from tpspec.comm.communicator import Communicator
from tpspec.comm.distributed import Place, join_world
from tpspec.comm.messages import Submit
from tpspec.engine.hosts import InlineHost
from tpspec.model.batch import Span
from tpspec.request import Request
from tpspec.roles.build import build_engine
from tpspec.roles.target import follow_rounds, lead_rounds
from tpspec.topology.config import Topology

CPU = torch.device("cpu")


def run(job: dict[str, Any], comm: Communicator, channel: Channel) -> dict[str, Any]:
    engine = build_engine(Topology.model_validate_json(json.dumps(job["topology"])), comm, CPU).engine
    if job.get("liar"):
        engine.host, engine.draft_tokens = InlineHost(Liar(engine.vocab)), 3
    requests = [msgspec.convert(request, Request) for request in job["requests"]]
    told = Told()
    for batch in [[request] for request in requests] if job.get("alone") else [requests]:
        script = Script({1: [Submit(request) for request in batch]}, told)
        if comm.rank == 0:
            lead_rounds(engine, channel, script)
        else:
            follow_rounds(engine, channel)
    return {"texts": told.texts(), "stats": msgspec.to_builtins(engine.stats())}


def leave_logits(job: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """The shards of every row side by side, [T, V], as a safetensors file."""
    target = build_engine(Topology.model_validate_json(json.dumps(job["topology"])), comm, CPU).engine.target
    ids = tuple(job["ids"])
    rows = target.logits([Span(0, 0, ids, ((0, len(ids)),), len(ids))])
    padding = rows.width - rows.logits_TV.shape[1]
    shards_NTV = rows.gather(torch.nn.functional.pad(rows.logits_TV, (0, padding), value=torch.nan))
    whole_TV = shards_NTV.transpose(0, 1).flatten(1)
    if comm.rank == 0:
        save_file({"logits": whole_TV[:, ~whole_TV[0].isnan()].contiguous()}, job["file"])
    return {}


def main() -> None:
    place = Place.from_env(os.environ)
    with join_world(place, CPU) as world:
        ranks = list(range(place.world_size))
        jobs = json.loads(Path(sys.argv[1]).read_text())
        comm = world.group(ranks, ordered=any(job["topology"].get("deterministic") for job in jobs))
        channel = open_channel(world, ranks, 60.0)
        assert comm is not None
        assert channel is not None
        results = [leave_logits(job, comm) if "file" in job else run(job, comm, channel) for job in jobs]
        if place.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(results))
        channel.close()


if __name__ == "__main__":
    main()
