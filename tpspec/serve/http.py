"""`python -m tpspec.serve.http`: the process beside the ranks that holds the sockets. Started by the first lead.

Binds its port before anything slow, then connects requests (api.py) to the lead (comm/link.py), owns the signals, and
ends when no lead will come any more. Must not know how text is generated. Its one line on stdout, JSON, tells who
started it that it listens, and where: {"url": ..., "endpoint": ...}; no line means that it could not; stderr says why.
Exit codes: 0 stopped when asked, 2 an option, port or tokenizer is wrong, 4 the engine is gone for good.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from tpspec.comm.link import LeadLink
from tpspec.comm.messages import Hello, Ready, Stop
from tpspec.comm.process import settle
from tpspec.errors import UserError, WorldFailure
from tpspec.output import output_in_words
from tpspec.serve.api import Api
from tpspec.serve.connection import Connection
from tpspec.serve.grammars import Grammars
from tpspec.serve.key import KeyGuard, read_keys
from tpspec.serve.leads import Leads
from tpspec.serve.log import RequestLog
from tpspec.serve.metrics import Metrics
from tpspec.serve.requests import Table
from tpspec.serve.state import State
from tpspec.serve.turnstile import Turnstile
from tpspec.text import Text
from tpspec.topology.config import DAY_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from starlette.types import ASGIApp

SAME_SIGNAL_S = 1.0  # a terminal and a launcher both pass Ctrl-C on: twice in this time is once
LEAD_POLL_S = 0.2
FLUSH_S = 5  # how long open answers may still be sent once everything is decided


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which close the port at once and exit with 143."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Process:
    """The life of the HTTP process: loading, serving, loading again without a request lost, draining, gone."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._link = LeadLink(options.folder)
        self._leads = Leads(options.parent, options.launcher)
        self._metrics = metrics = Metrics(options.model_name)
        self._state = State(Table(metrics, self._link.send), options.max_queued, options.stall_s)
        self._grammars = Grammars(options.model_folder, lambda: metrics.refused("grammars_full"))
        app: ASGIApp = Api(self._state, metrics, self._grammars, options.model_name, options.topology).app()
        if options.keys:
            app = KeyGuard(app, options.keys)
        config = uvicorn.Config(
            RequestLog(Turnstile(app), log if options.log_requests else None),
            http=Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_level="error",  # anybody may send what uvicorn warns of
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=FLUSH_S,
        )
        self._server = Server(config)
        self._signaled: float | None = None
        self._exit_code = 0
        self._drain: asyncio.Task[None] | None = None

    @property
    def is_loading(self) -> bool:
        return self._state.text is None

    @property
    def endpoint(self) -> str:
        return self._link.endpoint

    async def run(self, listener: socket.socket) -> int:
        """Serves until told to stop; the exit code. Raises UserError (in a group) when the tokenizer is no good."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            async with asyncio.TaskGroup() as group:
                work = (self._hear(), self._watch_leads(), self._load_text())
                jobs = [group.create_task(job) for job in work]
                await self._server.serve([listener])
                for job in jobs:
                    job.cancel()
        finally:
            await self._grammars.end()
            await self._link.close()
        return self._exit_code

    async def _hear(self) -> None:
        while True:
            message = await self._link.receive()
            if isinstance(message, Hello) and self._leads.greet(message):
                self._metrics.restarted()
                self._state.lose()  # the old one may have gone so fast that nobody saw it
            self._state.hear(message)
            if isinstance(message, Ready):
                self._announce()

    async def _load_text(self) -> None:
        self._state.text = await asyncio.to_thread(Text.load, self._options.model_folder)
        settle()
        self._announce()

    def _announce(self) -> None:
        if self._state.phase == "ready":
            say(f"ready: {self._options.model_name}, {self._state.cache_tokens} tokens, prompt and output together")

    async def _watch_leads(self) -> None:
        while (seen := self._leads.look()) != "gone":
            if seen == "lost":
                self._state.lose()
                waiting, left = len(self._state.table), self._leads.restarts_left
                say(f"the engine is gone; {waiting} requests wait until torchrun has started it again ({left} left)")
            await asyncio.sleep(LEAD_POLL_S)
        if self._server.should_exit:
            return  # it ended because we told it to
        say("the engine's process is gone")
        self._state.stopping = True
        self._state.table.end_all("error", "the engine stopped")
        self._link.send(Stop(WorldFailure.exit_code))  # ranks may have outlived torchrun
        self._leave(WorldFailure.exit_code)

    def _on_signal(self) -> None:
        now = time.monotonic()
        if self._signaled is None:
            self._signaled = now
            self._state.stopping = True
            if len(self._state.table):
                say(f"stopping when {len(self._state.table)} requests in flight have ended")
            self._drain = asyncio.ensure_future(self._drain_and_leave())
        elif now - self._signaled > SAME_SIGNAL_S:
            self._server.force_exit = True
            self._end_work()

    async def _drain_and_leave(self) -> None:
        try:
            async with asyncio.timeout(self._options.drain_s):
                while len(self._state.table):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            say(f"{len(self._state.table)} requests did not finish in {self._options.drain_s:g} s")
        self._end_work()

    def _end_work(self) -> None:
        """Readers get what there is, then the lead is told to end the world."""
        if self._server.should_exit:
            return
        self._state.table.end_all("abort")
        self._link.send(Stop())
        self._leave(0)

    def _leave(self, code: int) -> None:
        self._exit_code = code
        self._server.should_exit = True


def say(line: str) -> None:
    log(f"tpspec: {line}")


def log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError naming host and port when there can be none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UserError(f"cannot listen on {host}:{port}: {reason}") from error
    return listener


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tpspec.serve.http", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model-folder", required=True, type=Path, help="tokenizer, chat template and config")
    add("--model-name", required=True, help="the name clients ask for")
    add("--topology", type=json.loads, default={}, help="JSON, as /server_info shows it")
    add("--host", default="127.0.0.1")
    add("--port", type=_between(int, 0, 65535), default=8000, help="0: any free one")
    add("--api-key-file", type=Path, help="keys, one a line: whoever has none is refused")
    add("--log-requests", action="store_true", help="a line of JSON for each on standard error")
    add("--max-queued", type=_between(int, 1, 1 << 20), default=128, help="more than these waiting: 429")
    add("--drain-s", type=_between(float, 0, 3600), default=30.0, help="time for open requests after SIGTERM")
    add("--stall-s", type=_between(float, 0, DAY_S), default=30.0, help="silence of a busy engine: unhealthy")
    add("--parent", type=int, default=os.getppid(), help="the lead, whose end is ours unless it says hello and more")
    add("--launcher", type=int, help="torchrun, whose end is ours in any case")
    add("--folder", type=Path, help="made for us alone, where later leads find us; without it there are none")
    return parser.parse_args(arguments)


def _between(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    def number(word: str) -> float:
        value = kind(word)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{word} is not {low} to {high}")
        return value

    return number


def main() -> int:
    options = parse_options()
    try:
        options.keys = read_keys(options.api_key_file) if options.api_key_file else []
        listener = listen(options.host, options.port)
        say(f"listening on {url(listener)}")
        if not options.keys and not ip_address(listener.getsockname()[0]).is_loopback:
            say("other machines can reach it, and it asks nobody for a key")
        return asyncio.run(_run(options, listener))
    except (UserError, BaseExceptionGroup) as error:
        return _blame(error)


async def _run(options: argparse.Namespace, listener: socket.socket) -> int:
    process = Process(options)  # made inside the loop, to which its sockets belong
    with output_in_words():
        sys.stdout.write(json.dumps({"url": url(listener), "endpoint": process.endpoint}) + "\n")
    code = await process.run(listener)
    if process.is_loading:
        os._exit(code)  # the thread that imports transformers cannot be stopped, and nothing else is left to do
    return code


def _blame(error: BaseException) -> int:
    """A user's error by its message alone, with its exit code; a group of jobs fails by its first."""
    first = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if not isinstance(first, UserError):
        raise error
    if str(first):  # else whoever started it has gone, and wants to know nothing
        say(str(first))
    return first.exit_code


if __name__ == "__main__":
    sys.exit(main())
