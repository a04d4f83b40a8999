"""`-m tpspec.serve`: an OpenAI-compatible server in front of the ranks that torchrun started.

The lead starts the HTTP process (http.py) before any weight is read, so that a port in use is known at once, and talks
to it over a socket (frontend.py); one that torchrun starts later finds it there. Must not know requests or text.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tpspec.comm.launcher import Launcher
from tpspec.comm.watch import end_at_once
from tpspec.command import Parser
from tpspec.errors import UserError, WorldFailure
from tpspec.published.checkpoint import find
from tpspec.roles.door import add_topology_options, find_place, guarded, open_seat, warn_of_open_store
from tpspec.serve.frontend import Frontend
from tpspec.topology.config import to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.comm.watch import Watch
    from tpspec.topology.config import Topology

MODULE = "tpspec.serve"
DRAIN_S = 25.0  # for requests in flight; torchrun kills what is left 30 s after its signal


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Every rank of the world calls it with the same arguments."""
    return guarded(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    launcher = Launcher.from_env(os.environ, os.getppid())
    frontends: list[Frontend] = []
    is_early = True

    def meet_frontend(topology: Topology, watch: Watch) -> None:
        command = _command(topology, options, launcher)
        frontends.append(Frontend(command, topology.engine.timeout_s, launcher, watch))

    try:
        options = _parser().parse_args(arguments)
        with open_seat(options, MODULE, meet_frontend) as seat:
            is_early = False
            if not seat.leads:
                _leave_signals_to_the_lead()
                return seat.follow()
            warn_of_open_store(seat.world.place)
            (frontend,) = frontends
            frontend.ready(seat.max_tokens, len(seat.topology.target.ranks), seat.max_running)
            code = seat.lead(frontend)
            if code == UserError.exit_code:  # of the HTTP process, which has said why
                _start_no_more(launcher, code)
            return code
    except Exception as error:
        _give_up(error, is_early, launcher, frontends)
        raise
    finally:
        for frontend in frontends:
            frontend.close()


def _give_up(error: Exception, is_early: bool, launcher: Launcher | None, frontends: list[Frontend]) -> None:
    """Another start of the ranks may mend it, unless it is an error of the user's, and the first did not get far."""
    may_return = launcher is not None and launcher.restarts_left > 0
    is_users = isinstance(error, UserError) and not isinstance(error, WorldFailure)
    is_hopeless = is_users and is_early and launcher is not None and launcher.restarts == 0
    while frontends:
        frontends.pop().abandon(is_final=is_hopeless or not may_return)
    if isinstance(error, UserError) and is_hopeless and find_place().rank == 0:
        _start_no_more(launcher, error.exit_code)


def _start_no_more(launcher: Launcher | None, code: int) -> None:
    if launcher is not None and launcher.restarts_left > 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which it passes on; what is wrong has yet to be said
        launcher.stop(code)


def _leave_signals_to_the_lead() -> None:
    """A launcher signals every rank, but requests in flight are finished first: the lead says when to stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _command(topology: Topology, wanted: argparse.Namespace, launcher: Launcher | None) -> list[str]:
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
    if wanted.api_key_file is not None:
        options["--api-key-file"] = wanted.api_key_file
    if launcher is not None:
        options["--launcher"] = launcher.pid
        if launcher.max_restarts > 0:
            options["--folder"] = launcher.own_folder()
    words = [str(word) for option in options.items() for word in option]
    flags = ["--log-requests"] if wanted.log_requests else []
    return [sys.executable, "-m", "tpspec.serve.http", *words, *flags]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"python -m {MODULE}",
        description="Serve a sharded model over an OpenAI-compatible HTTP interface.",
        epilog=f"Start it with torchrun: torchrun --nproc-per-node 2 -m {MODULE} topologies/cpu-2.yaml",
    )
    add_topology_options(parser)
    parser.add_argument(
        "--log-requests", action="store_true", help="write a line of JSON for each request to standard error"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="API keys, one a line; without it nobody is asked for one"
    )
    return parser


if __name__ == "__main__":
    code = main()
    if code == WorldFailure.exit_code:
        end_at_once()  # torchrun starts no other world before this one is gone, and Python takes a second to leave
    sys.exit(code)
