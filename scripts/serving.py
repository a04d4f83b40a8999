"""A server of our own and clients of the plainest kind, for the scripts that measure it: torchrun, sockets, no SDK.

A client costs next to nothing, since it shares the cores with the ranks. Must not know what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
END_S = 60.0
PORTS = range(20000, 32768)


def free_port() -> int:
    """A port that nobody has, of those that no system gives away: a connection could take one before a server does."""
    while True:
        port = random.choice(PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def torchrun(num_ranks: int, *words: str) -> list[str]:
    """words: `-m`, a module and its words, or a script and its own."""
    # By an address, for a machine's name may lead nowhere.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*launch, "--nproc-per-node", str(num_ranks), *words]


def end(worker: subprocess.Popen[str]) -> None:
    """And all that it started: ranks are in sessions of their own, where no signal to the worker's finds them."""
    if worker.poll() is not None:
        return
    started = psutil.Process(worker.pid).children(recursive=True)
    worker.kill()
    for process in started:  # parents first: nobody is left who could start another
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, END_S)  # what they held, of a card too, is free then
    worker.communicate()


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}


class Server:
    """A world that serves a topology, for as long as the `with` lasts. overrides: KEY=VALUE, as for --set."""

    def __init__(self, topology: str, num_ranks: int, overrides: Sequence[str] = ()) -> None:
        self.port = free_port()
        sets = [word for override in (*overrides, f"serve.port={self.port}") for word in ("--set", override)]
        command = torchrun(num_ranks, "-m", "tpspec.serve", topology, *sets)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (stop closes it)
        self.launcher = psutil.Popen(command, env=environment(), stdout=self._log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_S
        while self.launcher.poll() is None and time.monotonic() < deadline:
            if self.get("/ready") is not None:
                return self
            time.sleep(0.2)
        raise SystemExit(f"the server did not start\n{self.stop()}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> dict[str, psutil.Process]:
        """All that belong to it, by what they are."""
        found: dict[str, psutil.Process] = {"launcher": self.launcher}
        for process in self.launcher.children(recursive=True):
            found[_name(process)] = process
        return found

    def get(self, path: str) -> str | None:
        """None where it is not there, or answers with an error."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return None

    def metric(self, name: str) -> float:
        """The sum over the labels."""
        values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics") or "", re.MULTILINE)
        return sum(map(float, values))

    def stop(self) -> str:
        """The end of what it has printed."""
        children = self.launcher.children(recursive=True) if self.launcher.is_running() else []
        self.launcher.terminate()
        for process in psutil.wait_procs([self.launcher, *children], END_S)[1]:
            process.kill()
        with self._log:
            self._log.seek(0)
            return self._log.read()[-3000:]


def _name(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    rank = process.environ().get("RANK", "?")
    kinds = {"tpspec.serve.http": "frontend", "tpspec.roles.drafter": "drafter", "tpspec.serve": f"rank {rank}"}
    return next((kind for word, kind in kinds.items() if word in words), f"process {process.pid}")


@dataclass
class Answer:
    """What a client saw of a request. times: of each chunk that brought text or ids, by the loop's clock."""

    status: int
    text: str = ""
    finish: str | None = None
    error: str | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    rounds: int = 0
    asked: float = 0.0
    times: list[float] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.asked


async def complete(port: int, **fields: Any) -> Answer:
    """One streamed completion, read to its end."""
    clock = asyncio.get_running_loop().time
    asked = clock()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(_asking({"stream_options": {"include_usage": True}} | fields))
        answer = await _begin(reader, asked)
        if answer.status != 200:
            answer.error = (await reader.read()).decode(errors="replace")
            return answer
        async for event in _events(reader):
            _take(answer, event, clock())
        return answer
    finally:
        writer.close()


def round_seconds(port: int, **fields: Any) -> float:
    """Of a streamed completion, which is not even read: the chunks are counted. A client that costs 0.02 ms a round."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(_asking(fields))
        if not connection.recv(1 << 16).startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"a request was refused: {fields}")
        times: list[float] = []
        while data := connection.recv(1 << 16):
            times += [time.perf_counter()] * data.count(b"data: {")
    return (times[-1] - times[0]) / (len(times) - 1)


def _asking(fields: dict[str, Any]) -> bytes:
    body = json.dumps({"stream": True} | fields).encode()
    return _head("POST", "/v1/completions", len(body)) + body


def _head(method: str, path: str, length: int) -> bytes:
    lines = f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {length}", "connection: close"
    return "\r\n".join((*lines, "", "")).encode()


async def _begin(reader: asyncio.StreamReader, asked: float) -> Answer:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
    return Answer(int(status.split()[1]), asked=asked, headers=headers)


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The data of server-sent events; the marks of a chunked body are lines that do not begin as they do."""
    async for line in reader:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[len(b"data: ") :])


def _take(answer: Answer, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        answer.error = json.dumps(event["error"])
    for choice in event.get("choices", ()):
        answer.times.append(now)
        answer.text += choice["text"]
        answer.finish = choice["finish_reason"] or answer.finish
    if usage := event.get("usage"):
        answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        answer.rounds = usage.get("speculation", {}).get("rounds", 0)
