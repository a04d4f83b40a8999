"""Unix sockets between processes of one user: the folder that holds them, and how one message is told from the next.

Knows no message and nobody who talks. Must not import torch: the HTTP process has none.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from tpspec.comm.process import folder_prefix
from tpspec.errors import UserError

LENGTH = struct.Struct(">I")  # of a message, before it
MOST_NAME = 16  # bytes of a name here
MOST_PATH = 103  # bytes of the whole: the least that any system takes


def framed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def private_folder() -> Path:
    """A new one that only this user can enter (mode 0700), found by `clear_after`."""
    return Path(mkdtemp(prefix=folder_prefix()))


def check_room() -> None:
    """UserError where folders made here have names too long for a socket in them."""
    longest = Path(gettempdir(), folder_prefix() + MOST_NAME * "x")
    if len(os.fsencode(longest)) + 1 + MOST_NAME > MOST_PATH:
        raise UserError(f"no socket can have a name as long as those in {gettempdir()}; set TMPDIR to a shorter path")
