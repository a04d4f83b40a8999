"""Keeps a drafter's process alive beside the world: starts it, waits until it is ready, starts it again when it dies.

A drafter that crashes, is killed or stopped must not end the world, so it is no process of torchrun's. Knows processes;
must not know models or messages.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING

import msgspec

from tpspec.comm.draft_link import is_alive
from tpspec.errors import EXIT_CODES, UserError, WorldFailure
from tpspec.roles.drafter import READY, Orders

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "tpspec.roles.drafter")
LOOK_S = 0.2  # how often the guard looks after its drafter
PAUSES_S = (0.0, 1.0, 5.0, 30.0)  # before the first restart, the second, ...; the last for all that follow
HEALTHY_S = 60.0  # a drafter that lived so long is restarted at once


class Guard:
    """One drafter's process."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._deaths = 0
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Raises what the drafter says is wrong when it cannot start."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said == READY:
            return
        code, _, message = said.partition(" ")
        if not message:
            raise UserError(f"the drafter ended before it was ready (exit code {self._process.wait()})")
        raise EXIT_CODES[int(code)](message)

    def watch(self) -> int:
        """Until the lead is gone or has told the drafter to stop; the exit code."""
        while is_alive(self._orders.lead_pid):
            if self.look() == 0:
                return 0
            sleep(LOOK_S)
        self.end()
        return 0

    def watch_beside(self) -> None:
        """The same, beside a shard's own work."""
        Thread(target=self.watch, name="drafter's guard", daemon=True).start()

    def look(self) -> int | None:
        """None while it runs; 0 when it was told to end. One that died is started again."""
        code = self._process.poll()
        if code is not None and code != 0:
            self._deaths = 0 if monotonic() - self._started_at > HEALTHY_S else self._deaths + 1
            pause = PAUSES_S[min(self._deaths, len(PAUSES_S)) - 1] if self._deaths else 0.0
            log.warning("the drafter died (exit code %s); it is started again in %g s", code, pause)
            sleep(pause)
            self._process = self._start()
            return None
        return code

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[str]:
        self._started_at = monotonic()
        pipe = subprocess.PIPE
        process = subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=None, text=True)
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(self._orders).decode())
            process.stdin.close()
        except BrokenPipeError as error:
            raise WorldFailure("the drafter's process ended as soon as it was started") from error
        return process
