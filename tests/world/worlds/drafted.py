"""Run under torchrun: seats with a drafter of their own over gloo, one after another, as a front door takes them.

Usage: drafted.py IN OUT, where IN is a list of jobs {topology, batches}, a batch being requests that run together. OUT
gets a list of {texts, stats}: a list of texts for each batch, and the lead's counters at the end.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.worlds import Script
from tpspec.comm.distributed import Place, World, join_world
from tpspec.comm.messages import Submit
from tpspec.comm.watch import Watch
from tpspec.request import Request
from tpspec.roles.seat import Seat, seated
from tpspec.topology.config import Topology

CPU = torch.device("cpu")


def run(job: dict[str, Any], world: World) -> dict[str, Any]:
    made = Topology.model_validate_json(json.dumps(job["topology"]))
    with ExitStack() as stack:
        seat = seated(made, world, Watch({}, (), 1.0), stack)
        texts = [batch(seat, requests) for requests in job["batches"]] if seat.holds_shard else [seat.follow()]
        stats = msgspec.to_builtins(seat.stats()) if seat.leads else {}
        seat.close()
    return {"texts": texts, "stats": stats}


def batch(seat: Seat, requests: list[dict[str, Any]]) -> list[list[int]]:
    script = Script({1: [Submit(msgspec.convert(request, Request)) for request in requests]})
    assert (seat.lead(script) if seat.leads else seat.follow()) == 0
    return script.told.texts()


def main() -> None:
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    place = Place.from_env(os.environ)
    with join_world(place, CPU) as world:
        results = [run(job, world) for job in jobs]
        if place.rank == 0:
            out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
