"""The link between the frontend and the lead: requests one way, tokens the other, over one ipc socket. No pickle.

Knows messages and sockets; must not import torch, for the frontend has none. The frontend binds and stays; leads come
and go, one at a time, and each says hello first.
"""

from __future__ import annotations

import os
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from tpspec.comm.messages import MALFORMED, Hello, ToFrontend, ToLead
from tpspec.comm.process import folder_prefix, is_alive
from tpspec.errors import WorldFailure

if TYPE_CHECKING:
    from types import TracebackType

LINGER_MS = 2000  # how long the last tokens may take to leave when an end closes
MOST_QUEUED = 100_000  # reports that a busy frontend has not read; then the lead waits for it
PID = "pid"  # a file


class FrontendLink:
    """The lead's end, for a loop that never sleeps while it has work."""

    def __init__(self, endpoint: str, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToLead] = msgspec.msgpack.Decoder(ToLead)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.sndhwm = MOST_QUEUED
        self._socket.sndtimeo = int(timeout_s * 1000)
        self._socket.connect(endpoint)

    def poll(self, timeout_s: float = 0.0) -> list[ToLead]:
        """Everything that has arrived, in order; waits for the first up to timeout_s. WorldFailure at nonsense."""
        if timeout_s > 0:
            self._socket.poll(int(timeout_s * 1000))
        messages: list[ToLead] = []
        while True:
            try:
                messages.append(self._decoded(self._socket.recv(zmq.DONTWAIT)))
            except zmq.Again:
                return messages

    def send(self, message: ToFrontend) -> None:
        """Returns at once while the frontend reads. Raises WorldFailure when it has not read for long."""
        try:
            self._socket.send(self._encoder.encode(message))
        except zmq.Again as error:
            raise WorldFailure(f"the frontend has read nothing for {self._timeout_s:g} s") from error

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)

    def _decoded(self, frame: bytes) -> ToLead:
        try:
            return self._decoder.decode(frame)
        except MALFORMED as error:
            raise _nonsense("frontend", error) from error


class LeadLink:
    """The frontend's end, for an event loop. Owns the place where both meet: a directory only this user can enter.

    folder: one that was made for it, where leads to come look for it; it goes with the link, too. What is sent while
    there is no lead is lost, and so is what a lead had not read when it ended: nothing reaches the next one twice.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(mkdtemp(prefix=folder_prefix()))  # mode 0700
        self.endpoint = endpoint(self._folder)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.rcvhwm = self._socket.sndhwm = MOST_QUEUED
        self._socket.bind(self.endpoint)
        self._lead: bytes | None = None
        (self._folder / PID).write_text(str(os.getpid()))

    async def receive(self) -> ToFrontend:
        """The next message of the lead. Raises WorldFailure at nonsense."""
        while True:
            sender, *frames = await self._socket.recv_multipart()
            try:
                message = self._decoder.decode(b"".join(frames))
            except MALFORMED as error:
                raise _nonsense("lead", error) from error
            if isinstance(message, Hello) or self._lead is None:
                self._lead = sender
            if sender == self._lead:
                return message

    async def send(self, message: ToLead) -> None:
        if self._lead is not None:
            await self._socket.send_multipart([self._lead, self._encoder.encode(message)])

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)
        rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LeadLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/link"


def frontend_at(folder: Path) -> int | None:
    """The pid of the frontend that listens there, if one does."""
    try:
        pid = int((folder / PID).read_text())
    except (OSError, ValueError):
        return None
    return pid if is_alive(pid) else None


def _nonsense(sender: str, error: Exception) -> WorldFailure:
    return WorldFailure(f"what came from the {sender} is no message of ours: {error}")
