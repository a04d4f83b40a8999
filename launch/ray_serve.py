#!/usr/bin/env python3
"""python launch/ray_serve.py TOPOLOGY [--replicas N] [--set KEY=VALUE]: N worlds of a topology on a Ray cluster.

Joins the cluster that RAY_ADDRESS or `ray start` on this machine names (RAY_AUTH_MODE=token where it wants one), or
starts one here. Ray Serve listens on the topology's host and port, with the same routes as ./launch/serve; each world
listens on loopback, beside its replica. A placement group of one bundle holds the cores and cards of all ranks of a
world, for they share a host. Ranks that are lost are started again, TPSPEC_MAX_RESTARTS times (3); then the world is
made anew, and meanwhile the others answer. `/metrics`, `/health` and `/` are those of whichever world is asked.

Every node needs this package with its extra, `pip install -e '.[ray]'`, and the models: by name, or at the same
absolute path. Ray's own ports can be reached from other machines: a cluster belongs in a network of its own. Must not
know what is in a request, nor how ranks talk.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import TYPE_CHECKING

import httpx
import ray
from ray import serve
from starlette.responses import JSONResponse, Response, StreamingResponse

from tpspec.errors import UserError
from tpspec.serve.errors import ApiError
from tpspec.topology.config import load, to_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from starlette.requests import Request

    from tpspec.topology.config import Topology

MANY = 4096  # requests that Ray lets through to a world, which has a queue of its own and says 429 where it is full
START_S = 3600.0  # for weights to be read
END_S = 60.0  # for requests in flight, then for the world to leave
LISTENING = re.compile(r"listening on (http://\S+)")
OF_THE_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"host", b"date"})
# torchrun, sent SIGTERM by the kernel when its parent ends: a replica that is killed takes its world along.
TORCHRUN = """
import ctypes, runpy, signal
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
runpy.run_module("tpspec.launch", run_name="__main__", alter_sys=True)
"""


class World:
    """A replica: a world that torchrun holds on this node, and the way to its HTTP port."""

    async def __init__(self, topology: str, flags: list[str], options: list[str]) -> None:
        self._folder = TemporaryDirectory(prefix="tpspec-ray-")
        file = Path(self._folder.name, "topology.yaml")
        file.write_text(topology)
        launch = ["--rdzv-backend", "tpspec", "--rdzv-endpoint", "here", *flags]
        own = ["--set", "serve.host=127.0.0.1", "--set", "serve.port=0"]
        command = ["-c", TORCHRUN, *launch, "-m", "tpspec.serve", str(file), *own, *options]
        self._leaving = False
        self._launcher = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # Ray gives each rank the threads of all
            stderr=asyncio.subprocess.PIPE,
        )
        url = await self._listening()
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)
        self._jobs = [asyncio.ensure_future(job) for job in (self._pass_lines_on(), self._leave_with_world())]
        async with asyncio.timeout(START_S):
            while (await self._client.get("/ready", timeout=None)).status_code != 200:
                await asyncio.sleep(0.2)

    async def __call__(self, request: Request) -> Response:
        """What the world answers, piece by piece as it comes; a client that leaves here leaves there too."""
        headers = list(_passed_on(request.headers.raw))
        path = httpx.URL(path=request.scope["path"], query=request.scope["query_string"])
        asked = self._client.build_request(request.method, path, headers=headers, content=await request.body())
        try:
            answer = await self._client.send(asked, stream=True)
        except httpx.TransportError:
            error = ApiError(503, "this world has ended, and another is started", code="restarting", retry_after=1)
            return JSONResponse(error.body, error.status, error.headers)
        response = StreamingResponse(_pieces(answer), answer.status_code)
        response.raw_headers = list(_passed_on(answer.headers.raw))
        return response

    async def check_health(self) -> None:
        """Ray ends a replica that raises here three times in a row, and makes another."""
        status = (await self._client.get("/health", timeout=5)).json()["status"]
        if status not in ("ready", "restarting"):  # torchrun starts ranks again by itself, and streams wait for that
            raise RuntimeError(f"the world is {status}")

    async def __del__(self) -> None:
        """Ray's last word, once no request is in flight here."""
        self._leaving = True
        if self._launcher.returncode is None:
            self._launcher.terminate()
        await self._launcher.wait()
        self._folder.cleanup()

    async def _listening(self) -> str:
        """The world's URL, which it says before it reads weights."""
        assert self._launcher.stderr is not None
        async for raw in self._launcher.stderr:
            sys.stderr.write(line := raw.decode(errors="replace"))
            if found := LISTENING.search(line):
                return found[1]
        raise RuntimeError(f"the world did not start, exit code {await self._launcher.wait()}: see its lines above")

    async def _pass_lines_on(self) -> None:
        assert self._launcher.stderr is not None
        while some := await self._launcher.stderr.read(1 << 16):
            sys.stderr.write(some.decode(errors="replace"))

    async def _leave_with_world(self) -> None:
        """Ray sees a process end at once: it asks this replica nothing more, and makes another."""
        await self._launcher.wait()
        if not self._leaving:
            sys.stderr.write("tpspec: the world has ended, and its replica with it\n")
            sys.stderr.flush()
            os._exit(1)


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    return ((name, value) for name, value in headers if name.lower() not in OF_THE_CONNECTION)


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def replicas(topology: Topology, num_replicas: int, options: list[str]) -> serve.Application:
    """The application that Ray Serve runs."""
    num_ranks = topology.num_ranks
    enough = ray.cluster_resources().get("GPU", 0) >= num_ranks
    num_cards = num_ranks if topology.device == "cuda" or (topology.device == "auto" and enough) else 0
    made = serve.deployment(World).options(
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": num_ranks, "num_gpus": num_cards},
        placement_group_bundles=[{"CPU": num_ranks, "GPU": num_cards} if num_cards else {"CPU": num_ranks}],
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=MANY,
        graceful_shutdown_timeout_s=END_S,
    )
    flags = ["--nproc-per-node", str(num_ranks), "--max-restarts", os.environ.get("TPSPEC_MAX_RESTARTS", "3")]
    return made.bind(to_json(topology), flags, options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology", type=Path)
    parser.add_argument("--replicas", type=int, default=1, help="worlds")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--api-key-file", metavar="FILE", help="API keys, one a line; an absolute path on every node")
    options = parser.parse_args()
    try:
        topology = load(options.topology, options.set)
    except UserError as error:
        sys.stderr.write(f"tpspec: error: {error}\n")
        return error.exit_code
    keys = ["--api-key-file", options.api_key_file] if options.api_key_file else []
    ray.init()
    serve.start(http_options={"host": topology.serve.host, "port": topology.serve.port})
    told_to_stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told_to_stop.set())
    serve.run(replicas(topology, options.replicas, keys), name="tpspec", route_prefix="/")
    told_to_stop.wait()
    serve.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
