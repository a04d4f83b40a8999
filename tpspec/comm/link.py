"""The link between the frontend and the lead: requests one way, tokens the other, over one ipc socket. No pickle.

Knows messages and sockets; must not import torch, for the frontend has none. The frontend binds and stays; the lead
connects, and a restarted lead connects again to the same place.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from tpspec.comm.messages import MALFORMED, ToFrontend, ToLead
from tpspec.errors import WorldFailure

if TYPE_CHECKING:
    from types import TracebackType

LINGER_MS = 2000  # how long the last tokens may take to leave when an end closes
MOST_QUEUED = 100_000  # reports that a busy frontend has not read; then the lead waits for it


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
    """The frontend's end, for an event loop. Owns the place where both meet: a directory only this user can enter."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="tpspec-")  # mode 0700
        self.endpoint = f"ipc://{self._folder.name}/link"
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.rcvhwm = MOST_QUEUED
        self._socket.bind(self.endpoint)

    async def receive(self) -> ToFrontend:
        """The next message of the lead. Raises WorldFailure at nonsense."""
        try:
            return self._decoder.decode(await self._socket.recv())
        except MALFORMED as error:
            raise _nonsense("lead", error) from error

    async def send(self, message: ToLead) -> None:
        """Waits while there is no lead. What a lead had not read when it died is lost: send it again after `Ready`."""
        await self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)
        self._folder.cleanup()

    def __enter__(self) -> LeadLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _nonsense(sender: str, error: Exception) -> WorldFailure:
    return WorldFailure(f"what came from the {sender} is no message of ours: {error}")
