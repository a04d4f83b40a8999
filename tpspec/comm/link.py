"""The link between the frontend and the lead: requests one way, tokens the other, over one Unix socket. No pickle.

Knows messages and sockets; must not import torch, for the frontend has none. The frontend listens and stays; leads
come and go, one at a time, and each says hello first. A message is its length in four bytes, then msgpack.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from time import monotonic
from typing import cast

import msgspec

from tpspec.comm.messages import Hello, ToFrontend, ToLead
from tpspec.comm.process import is_alive
from tpspec.comm.sockets import Inbox, framed, private_folder
from tpspec.errors import WorldFailure

MOST_WAITING = 1 << 24  # bytes of reports that a busy frontend has not read; then the lead waits for it
AT_ONCE = 1 << 18  # bytes of one read
LINGER_S = 2.0  # how long the last tokens may take to leave when an end closes
PID = "pid"  # a file


class FrontendLink:
    """The lead's end, for a loop that never sleeps while it has work. Raises WorldFailure when nobody listens."""

    def __init__(self, endpoint: str, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._encoder = msgspec.msgpack.Encoder()
        self._inbox: Inbox[ToLead] = Inbox(ToLead, "frontend")
        self._waiting = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.is_over = False  # the frontend has closed its end
        try:
            self._socket.connect(endpoint)
        except OSError as error:
            self._socket.close()
            raise WorldFailure(f"the frontend does not listen at {endpoint}: {error.strerror}") from error
        self._socket.setblocking(False)

    def poll(self, timeout_s: float = 0.0) -> list[ToLead]:
        """Everything that has arrived, in order; may wait for it up to timeout_s. Raises WorldFailure at nonsense."""
        if timeout_s > 0:
            self._wait(select.POLLIN | (select.POLLOUT if self._waiting else 0), timeout_s)
        self._flush()
        messages: list[ToLead] = []
        while data := self._read():
            messages += self._inbox.feed(data)
        return messages

    def send(self, message: ToFrontend) -> None:
        """Returns at once while the frontend reads. Raises WorldFailure when it has not read for long."""
        self._waiting += framed(self._encoder.encode(message))
        self._flush()
        if len(self._waiting) > MOST_WAITING and not self._drain(MOST_WAITING, self._timeout_s):
            raise WorldFailure(f"the frontend has read nothing for {self._timeout_s:g} s")

    def close(self) -> None:
        self._drain(0, LINGER_S)
        self._socket.close()

    def _read(self) -> bytes:
        """What is there, up to AT_ONCE; nothing where there is nothing."""
        if self.is_over:
            return b""
        try:
            data = self._socket.recv(AT_ONCE)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.is_over = not data
        return data

    def _flush(self) -> None:
        """Sends what the socket takes. To a frontend that has gone, nothing more is said."""
        try:
            while self._waiting and not self.is_over:
                del self._waiting[: self._socket.send(self._waiting)]
        except BlockingIOError:
            return
        except OSError:
            self.is_over = True

    def _drain(self, most: int, seconds: float) -> bool:
        """Waits until no more than `most` bytes wait, or nobody reads them; False where it took too long."""
        deadline = monotonic() + seconds
        while len(self._waiting) > most and not self.is_over:
            if (left := deadline - monotonic()) <= 0:
                return False
            self._wait(select.POLLOUT, left)
            self._flush()
        return True

    def _wait(self, event: int, seconds: float) -> None:
        poll = select.poll()
        if not self.is_over:
            poll.register(self._socket, event)
        poll.poll(1000 * seconds)


class LeadLink:
    """The frontend's end, for an event loop. Owns the place where both meet: a directory only this user can enter.

    folder: one that was made for it, where leads to come look for it; it goes with the link, too. What is sent while
    there is no lead is lost, and so is what a lead had not read when it ended: nothing reaches the next one twice.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or private_folder()
        self.endpoint = endpoint(self._folder)
        self._encoder = msgspec.msgpack.Encoder()
        self._arrived: asyncio.Queue[tuple[_Connection, ToFrontend | WorldFailure]] = asyncio.Queue()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(self.endpoint).unlink(missing_ok=True)  # of one that was killed, when nobody was left to clear up
        self._listener.bind(self.endpoint)
        self._listener.listen()  # from now on a lead can connect, and is heard once we do
        self._server: asyncio.Server | None = None
        self._lead: _Connection | None = None
        (self._folder / PID).write_text(str(os.getpid()))

    async def receive(self) -> ToFrontend:
        """The next message of the lead. Raises WorldFailure at nonsense."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: _Connection(self._arrived), sock=self._listener)
        while True:
            sender, message = await self._arrived.get()
            if isinstance(message, WorldFailure):
                raise message
            if isinstance(message, Hello) or self._lead is None:
                self._lead = sender
            if sender is self._lead:
                return message

    def send(self, message: ToLead) -> None:
        """Returns at once."""
        if self._lead is not None:
            self._lead.write(framed(self._encoder.encode(message)))

    async def close(self) -> None:
        if self._lead is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._lead.end()
        if self._server is not None:
            self._server.close()
        self._listener.close()
        rmtree(self._folder, ignore_errors=True)


class _Connection(asyncio.Protocol):
    """A lead, as the frontend sees it; may have gone."""

    def __init__(self, arrived: asyncio.Queue[tuple[_Connection, ToFrontend | WorldFailure]]) -> None:
        self._arrived = arrived
        self._inbox: Inbox[ToFrontend] = Inbox(ToFrontend, "lead")
        self._gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._inbox.feed(data):
                self._arrived.put_nowait((self, message))
        except WorldFailure as nonsense:
            self._arrived.put_nowait((self, nonsense))

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()

    def write(self, frame: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame)

    async def end(self) -> None:
        """Returns when it has been sent everything."""
        self._transport.close()
        await self._gone.wait()


def endpoint(folder: Path) -> str:
    return str(folder / "link")


def frontend_at(folder: Path) -> int | None:
    """The pid of the frontend that listens there, if one does."""
    try:
        pid = int((folder / PID).read_text())
    except (OSError, ValueError):
        return None
    return pid if is_alive(pid) else None
