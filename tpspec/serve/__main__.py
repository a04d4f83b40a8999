"""`-m tpspec.serve`: an OpenAI-compatible server in front of the ranks that torchrun started.

The lead starts the HTTP process (http.py) before any weight is read, so that a port in use is known at once, and talks
to it over a socket. Must not know requests or text.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tpspec.comm.link import FrontendLink
from tpspec.comm.messages import Ready, Report, Stop
from tpspec.errors import UserError
from tpspec.roles.door import Seat, add_topology_options, guarded, open_seat
from tpspec.topology.checkpoint import find
from tpspec.topology.config import to_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from tpspec.comm.messages import Stats, ToLead
    from tpspec.request import Delta
    from tpspec.topology.config import Topology

MODULE = "tpspec.serve"
IDLE_S = 1.0  # an idle lead shares empty news this often, so that the other ranks know it lives
DRAIN_S = 25.0  # for requests in flight; torchrun kills what is left 30 s after its signal
END_S = 10.0  # how long the HTTP process may take to leave


class Frontend:
    """The HTTP process as the lead sees it: an inbox of requests, and a reader of reports."""

    def __init__(self, topology: Topology, key_file: Path | None) -> None:
        command = _command(topology, key_file)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._link = FrontendLink(self._endpoint(), topology.engine.timeout_s)
        self._serves = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def ready(self, seat: Seat) -> None:
        self._serves = True
        self._link.send(Ready(seat.max_tokens, len(seat.topology.target.ranks)))

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        messages = self._link.poll(IDLE_S if wait else 0.0)
        if not messages and wait and self._process.poll() is not None:
            return [Stop(self._process.returncode)]
        return messages

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        self._link.send(Report(deltas, stats))

    def close(self) -> None:
        """Waits until readers have what they are owed; then nothing of ours is left running."""
        self._link.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """The world failed. A process that serves sees us go and tells its clients; one that does not is sent away."""
        if self._serves:
            self._link.close()
            return
        self._process.terminate()
        self.close()

    def _endpoint(self) -> str:
        """What the process says first; nothing when it could not start, and then it has said why itself."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise HttpFailed
        return str(json.loads(line)["endpoint"])

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The HTTP process drains and then tells us to stop."""
        if self._process.poll() is None:
            self._process.send_signal(number)


class HttpFailed(UserError):
    """The HTTP process did not start. Without a message: it has written its own, and one is enough."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Every rank of the world calls it with the same arguments."""
    options = _parser().parse_args(arguments)
    return guarded(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    frontends: list[Frontend] = []
    try:
        with open_seat(
            options, MODULE, lambda topology: frontends.append(Frontend(topology, options.api_key_file))
        ) as seat:
            if not seat.leads:
                _leave_signals_to_the_lead()
                return seat.follow()
            (frontend,) = frontends
            frontend.ready(seat)
            return seat.lead(frontend)
    except UserError:
        for frontend in frontends:
            frontend.abandon()
        frontends.clear()
        raise
    finally:
        for frontend in frontends:
            frontend.close()


def _leave_signals_to_the_lead() -> None:
    """A launcher signals every rank, but requests in flight are finished first: the lead says when to stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _command(topology: Topology, key_file: Path | None) -> list[str]:
    serve = topology.serve
    options: dict[str, object] = {
        "--model-folder": find(topology.target.model),
        "--model-name": topology.target.model,
        "--topology": to_json(topology),
        "--host": serve.host,
        "--port": serve.port,
        "--max-queued": serve.max_queued,
        "--stall-s": topology.engine.timeout_s,
        "--drain-s": DRAIN_S,
        "--parent": os.getpid(),
    }
    if key_file is not None:
        options["--api-key-file"] = key_file
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "tpspec.serve.http", *words]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=MODULE,
        description="Serve a sharded model over an OpenAI-compatible HTTP interface.",
        epilog=f"Start it with torchrun: torchrun --nproc-per-node 2 -m {MODULE} topologies/cpu-2.yaml",
    )
    add_topology_options(parser)
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="API keys, one a line; without it nobody is asked for one"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
