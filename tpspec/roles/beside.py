"""A drafter in the gaps of a card: a thread of the rank whose shard is there, with a stream of its own.

Processes take turns on a card, unless CUDA's multi-process service runs. Streams of one process share it: what is asked
of one of lower priority runs where the others leave room, as while the shard waits for other cards. Where the drafter
fails it begins anew; what takes the card from the process, takes it from the shard, too. Knows threads; must not know
models or messages.
"""

from __future__ import annotations

import logging
import sys
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING

import torch

from tpspec.comm.gap import go_last
from tpspec.comm.process import is_alive
from tpspec.errors import UserError
from tpspec.roles.drafter import draft
from tpspec.roles.guard import Pauses

if TYPE_CHECKING:
    from tpspec.roles.drafter import Orders

log = logging.getLogger(__name__)

TURN_S = 1e-4  # that the shard's thread waits for Python at most, while another has it
END_S = 20.0  # that is waited for the drafter to end what it is in: a forward, or reading its weights anew


class Beside:
    """One drafter's thread. It loads, compiles, records and tries while the shard does nothing of that: `has_begun`.
    Until it is closed another thread has Python for TURN_S at most."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._is_over, self._begun = orders, Event(), Event()
        self._fault: BaseException | None = None
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(TURN_S)
        self._thread = Thread(target=self._live, name="drafter", daemon=True)
        self._thread.start()

    def has_begun(self, timeout_s: float) -> bool:
        """Whether it is ready, or cannot be; waits so long for that."""
        return self._begun.wait(timeout_s)

    def wait_until_ready(self) -> None:
        """Raises what is wrong when it cannot start."""
        self._begun.wait()
        if isinstance(self._fault, UserError):
            raise self._fault
        if self._fault is not None:
            raise UserError(f"the drafter cannot start: {self._fault}") from self._fault

    def close(self) -> None:
        """It ends; once more, nothing happens."""
        self._is_over.set()
        self._thread.join(END_S)
        sys.setswitchinterval(self._interval)

    def _live(self) -> None:
        pauses = Pauses()
        while not self._is_over.is_set():
            begun = monotonic()
            try:
                if not self._begun.is_set():  # the first time: it keeps its stream
                    go_last(torch.device(self._orders.device))
                draft(self._orders, self._begun.set, self._is_wanted)
                return
            except BaseException as error:  # a panic of a library in Rust is no Exception
                if not self._begun.is_set():
                    self._fault = error
                    self._begun.set()
                    return
                pause = pauses.after(monotonic() - begun)
                log.warning("the drafter failed; it is started again in %g s", pause, exc_info=True)
            self._is_over.wait(pause)

    def _is_wanted(self) -> bool:
        return not self._is_over.is_set() and is_alive(self._orders.lead_pid)
