"""Unix sockets between processes of one user: the folder that holds them, and how one message is told from the next.

Must not know what a message means, nor who talks. Must not import torch: the HTTP process has none.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import msgspec

from tpspec.comm.messages import MALFORMED
from tpspec.comm.process import folder_prefix
from tpspec.errors import UserError, WorldFailure

if TYPE_CHECKING:
    from collections.abc import Iterator

M = TypeVar("M")
LENGTH = struct.Struct(">I")  # of a message, before it
MOST_BYTES = 1 << 28  # of a message; more is nonsense
MOST_NAME = 16  # bytes of a name here
MOST_PATH = 103  # bytes of the whole: the least that any system takes


def framed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


class Inbox(Generic[M]):
    """Bytes as they come, whole messages out. kind: of messages; sender: in words."""

    def __init__(self, kind: object, sender: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(cast("type[M]", kind))
        self._sender, self._bytes = sender, bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Raises WorldFailure at the first that is nonsense."""
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
            if end > MOST_BYTES:
                raise self._nonsense(f"it is said to have {end} bytes")
            if end > len(self._bytes):
                return
            frame = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            try:
                yield self._decoder.decode(frame)
            except MALFORMED as error:
                raise self._nonsense(str(error)) from error

    def _nonsense(self, reason: str) -> WorldFailure:
        return WorldFailure(f"what came from the {self._sender} is no message of ours: {reason}")


def private_folder() -> Path:
    """A new one that only this user can enter (mode 0700), found by `clear_after`."""
    return Path(mkdtemp(prefix=folder_prefix()))


def check_room() -> None:
    """UserError where folders made here have names too long for a socket in them."""
    longest = Path(gettempdir(), folder_prefix() + MOST_NAME * "x")
    if len(os.fsencode(longest)) + 1 + MOST_NAME > MOST_PATH:
        raise UserError(f"no socket can have a name as long as those in {gettempdir()}; set TMPDIR to a shorter path")
