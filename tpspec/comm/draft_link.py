"""How outcomes reach the drafter and drafts come back: one ipc socket, two messages a round, no pickle, no collective.

Nothing here waits for a peer that is not there: what cannot be handed over is dropped, and epochs tell. Knows messages
and sockets; must not know what a draft is for, nor import torch.
"""

from __future__ import annotations

from shutil import rmtree
from typing import Protocol

import msgspec
import zmq

from tpspec.comm.messages import MALFORMED, Drafts, ToDrafter
from tpspec.comm.sockets import private_folder
from tpspec.errors import WorldFailure

MOST_QUEUED = 1000  # messages to a drafter that does not read; further ones are dropped
LINGER_MS = 500


class DraftLink(Protocol):
    """The lead's end."""

    num_messages: int
    num_bytes: int

    def send(self, message: ToDrafter) -> bool:
        """Returns at once; whether somebody may get it."""

    def receive(self, timeout_s: float) -> list[Drafts]:
        """What has arrived; waits for the first of it."""

    def close(self) -> None: ...


class OutcomeLink(Protocol):
    """The drafter's end."""

    def send(self, message: Drafts) -> None: ...
    def receive(self, timeout_s: float) -> list[ToDrafter]: ...
    def close(self) -> None: ...


class _Counting:
    """num_messages, num_bytes: both ways, since it was made."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self._encoder = socket, msgspec.msgpack.Encoder()
        self.num_messages = self.num_bytes = 0

    def put(self, message: object) -> bool:
        frame = self._encoder.encode(message)
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        self._count(frame)
        return True

    def frames(self, timeout_s: float) -> list[bytes]:
        frames: list[bytes] = []
        if timeout_s > 0:
            self._socket.poll(max(1, round(timeout_s * 1000)))
        while True:
            try:
                frames.append(self._socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                return frames
            self._count(frames[-1])

    def _count(self, frame: bytes) -> None:
        self.num_messages += 1
        self.num_bytes += len(frame)


class LeadDraftLink(_Counting):
    """The lead's end, which stays; drafters come and go. Binds in a directory that only this user can enter."""

    def __init__(self) -> None:
        self._folder = private_folder()
        self.endpoint = f"ipc://{self._folder}/drafts"
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.sndhwm = MOST_QUEUED
        socket.bind(self.endpoint)
        super().__init__(socket)
        self._decoder = msgspec.msgpack.Decoder(Drafts)

    def send(self, message: ToDrafter) -> bool:
        return self.put(message)

    def receive(self, timeout_s: float) -> list[Drafts]:
        """Nonsense is dropped: a draft is never worth a world."""
        messages: list[Drafts] = []
        for frame in self.frames(timeout_s):
            try:
                messages.append(self._decoder.decode(frame))
            except MALFORMED:
                continue
        return messages

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)
        rmtree(self._folder, ignore_errors=True)


class DrafterDraftLink(_Counting):
    """The drafter's end."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.connect(endpoint)
        super().__init__(socket)
        self._decoder: msgspec.msgpack.Decoder[ToDrafter] = msgspec.msgpack.Decoder(ToDrafter)

    def send(self, message: Drafts) -> None:
        self.put(message)

    def receive(self, timeout_s: float) -> list[ToDrafter]:
        """Raises WorldFailure at nonsense: whoever started this drafter starts another."""
        try:
            return [self._decoder.decode(frame) for frame in self.frames(timeout_s)]
        except MALFORMED as error:
            raise WorldFailure(f"what came from the lead is no outcome: {error}") from error

    def close(self) -> None:
        self._context.destroy(linger=0)
