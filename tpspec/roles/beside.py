"""A drafter in the gaps of a card: a thread of the rank whose shard is there, with a stream of its own.

Processes take turns on a card, unless CUDA's multi-process service runs. Streams of one process share it: what is asked
of one of lower priority runs where the others leave room, as while the shard waits for other cards. Where the drafter
fails it begins anew; what takes the card from the process, takes it from the shard, too. Knows threads; must not know
models or messages.
"""

from __future__ import annotations

import logging
import os
import sys
from queue import SimpleQueue
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
    from tpspec.comm.communicator import Communicator
    from tpspec.roles.drafter import Orders

log = logging.getLogger(__name__)

SWITCH = "TPSPEC_GAPS"  # variable: what a drafter in gaps is
THREAD, PROCESS = "thread", "process"
TURN_S = 1e-4  # that the shard's thread waits for Python at most, while another has it
END_S = 5.0  # that is waited for the drafter to end the forward it is in


def in_a_thread(device: torch.device) -> bool:
    """Whether a drafter in gaps is a thread there. On the CPU, where the OS shares cores out by process, it is not."""
    found = os.environ.get(SWITCH) or (THREAD if device.type == "cuda" else PROCESS)
    if found not in (THREAD, PROCESS):
        raise UserError(f"{SWITCH}={found}: should be {THREAD} or {PROCESS}")
    return found == THREAD


class Beside:
    """One drafter's thread. When this has been made the drafter is ready: what it compiles, records and tries is over
    before the shard begins with that. Raises what it says is wrong when it cannot start."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._is_over = orders, Event()
        self._said = SimpleQueue[Exception | None]()
        self._was_ready = False
        sys.setswitchinterval(TURN_S)
        self._thread = Thread(target=self._live, name="drafter", daemon=True)
        self._thread.start()
        if (error := self._said.get()) is not None:
            raise error if isinstance(error, UserError) else UserError(f"the drafter cannot start: {error}") from error

    def beside(self, comm: Communicator) -> Communicator:
        """As it is: nobody tells what a thread has of a card."""
        return comm

    def wait_until_ready(self) -> None:
        """It is."""

    def watch_beside(self) -> None:
        """It begins anew by itself."""

    def close(self) -> None:
        """It ends."""
        self._is_over.set()
        self._thread.join(END_S)

    def _live(self) -> None:
        pauses = Pauses()
        while not self._is_over.is_set():
            begun = monotonic()
            try:
                go_last(torch.device(self._orders.device))
                draft(self._orders, self._ready, self._is_wanted)
                return
            except Exception as error:
                if not self._was_ready:
                    self._said.put(error)
                    return
                pause = pauses.after(monotonic() - begun)
                log.warning("the drafter failed; it is started again in %g s", pause, exc_info=True)
            self._is_over.wait(pause)

    def _ready(self) -> None:
        if not self._was_ready:
            self._was_ready = True
            self._said.put(None)

    def _is_wanted(self) -> bool:
        return not self._is_over.is_set() and is_alive(self._orders.lead_pid)
