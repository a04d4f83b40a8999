"""Keeps a drafter's process alive beside the world: starts it, waits until it is ready, starts it again when it dies.

A drafter that crashes, is killed or stopped must not end the world, so it is no process of torchrun's. Knows processes;
must not know models or messages.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING

import msgspec

from tpspec.comm.gap import Filled, cpu_s
from tpspec.comm.process import is_alive
from tpspec.errors import EXIT_CODES, UserError
from tpspec.roles.drafter import READY, Orders

if TYPE_CHECKING:
    from tpspec.comm.communicator import Communicator
    from tpspec.comm.gap import Gap

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "tpspec.roles.drafter")
LOOK_S = 0.2  # how often the guard looks after its drafter
PAUSES_S = (0.0, 1.0, 5.0, 30.0)  # before the first restart, the second, ...; the last for all that follow
HEALTHY_S = 60.0  # a drafter that lived so long is restarted at once


class Pauses:
    """Before each start of a drafter but the first."""

    def __init__(self) -> None:
        self._deaths = 0

    def after(self, lived_s: float) -> float:
        """Of one that has lived so long: seconds."""
        self._deaths = 0 if lived_s > HEALTHY_S else self._deaths + 1
        return PAUSES_S[min(self._deaths, len(PAUSES_S)) - 1] if self._deaths else 0.0


class Guard:
    """One drafter's process. gap: of the rank beside it, where somebody counts what runs there."""

    def __init__(self, orders: Orders, gap: Gap | None = None) -> None:
        self._orders, self._gap = orders, gap
        self._pauses = Pauses()
        self._restart_at: float | None = None
        self._process = self._start()

    def wait_until_ready(self) -> None:
        """Raises what the drafter says is wrong when it cannot start."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said == READY:
            return
        said = f"{said}\n{self._last_words()}".strip()
        code, _, message = said.partition(" ")
        if not message:
            raise UserError(f"the drafter ended before it was ready (exit code {self._process.wait()})")
        raise EXIT_CODES[int(code)](message)

    def beside(self, comm: Communicator) -> Communicator:
        """`comm`, with what the drafter works meanwhile counted; as it is where nobody counts or nothing is sent."""
        if self._gap is None or comm.size == 1:
            return comm
        return Filled(comm, self._gap, lambda: cpu_s(self._process.pid))  # another process after a restart

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
        """None while it runs or is to run again; 0 when it was told to end. One that died is started again."""
        code = self._process.poll()
        if code is None or code == 0:
            return code
        if self._restart_at is None:
            self._mourn(code)
        elif monotonic() >= self._restart_at:
            self._restart()
        return None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Its process is told to end by others, and ends with this one."""

    def _mourn(self, code: int) -> None:
        pause = self._pauses.after(monotonic() - self._started_at)
        self._restart_at = monotonic() + pause
        why = self._last_words().removeprefix(READY).strip()
        log.warning("the drafter died (exit code %s%s); it is started again in %g s", code, why and f": {why}", pause)

    def _last_words(self) -> str:
        """What it said and nobody has read; it has ended, or is about to."""
        assert self._process.stdout is not None
        with self._process.stdout as said:
            return said.read().strip()

    def _restart(self) -> None:
        try:
            self._process = self._start()
            self._restart_at = None
        except OSError as error:  # the machine has no room for a process; the world goes on all the same
            log.warning("the drafter cannot be started: %s; it is tried again in %g s", error, PAUSES_S[-1])
            self._restart_at = monotonic() + PAUSES_S[-1]

    def _start(self) -> subprocess.Popen[str]:
        """Away from signals for the world, which the lead obeys and tells the drafter of.

        In its shard's session if it is beside one: Linux weighs sessions first (autogroup), and classes within each.
        """
        self._started_at = monotonic()
        pipe, alone = subprocess.PIPE, self._gap is None
        process = subprocess.Popen(
            COMMAND,
            stdin=pipe,
            stdout=pipe,
            text=True,
            start_new_session=alone,
            process_group=None if alone else 0,
        )
        if self._orders.is_filler:
            step_back(process.pid)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as orders:  # one that has died already is looked after later
            orders.write(msgspec.json.encode(self._orders).decode())
        return process


def step_back(pid: int) -> None:
    """The lowest class of the scheduler: the process runs where nobody else wants to, from its first import on."""
    with suppress(ProcessLookupError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, pid, 19)
