"""The leads that the HTTP process serves, one after another: whether one is there, and whether another will come.

Knows pids and torchrun's promise to start the ranks again; must not know requests or sockets.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from tpspec.comm.process import clear_after, is_alive

if TYPE_CHECKING:
    from tpspec.comm.messages import Hello

RETURN_S = 120.0  # torchrun takes up to 30 s to end what is left of a world, and a lead some more to import torch

Seen = Literal["here", "lost", "away", "gone"]


class Leads:
    """pid: of the first lead. launcher: of torchrun, without which nobody starts another."""

    def __init__(self, pid: int, launcher: int | None) -> None:
        self._pid, self._launcher = pid, launcher
        self.restarts_left = 0
        self._lost_at: float | None = None

    def greet(self, hello: Hello) -> bool:
        """Whether it is another one than before."""
        is_other = hello.pid != self._pid
        self._pid, self.restarts_left, self._lost_at = hello.pid, hello.restarts_left, None
        return is_other

    def look(self) -> Seen:
        """`lost` is said once of each, then `away` until another comes; `gone` when none will."""
        if self._launcher is not None and not is_alive(self._launcher):
            return "gone"
        if is_alive(self._pid):
            return "here"
        if self.restarts_left < 1:
            return "gone"
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            clear_after(self._pid)
            return "lost"
        return "away" if time.monotonic() - self._lost_at < RETURN_S else "gone"
