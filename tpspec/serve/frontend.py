"""The HTTP process as the lead sees it: started by the first lead, found by those that torchrun starts later.

An inbox of requests and a reader of reports. Must not know requests or text.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from shutil import rmtree
from time import monotonic, sleep
from typing import TYPE_CHECKING

from tpspec.comm.link import FrontendLink, endpoint, frontend_at
from tpspec.comm.messages import Hello, Ready, Report, Stop
from tpspec.comm.process import clear_after, is_alive
from tpspec.errors import UserError, WorldFailure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import FrameType

    from tpspec.comm.launcher import Launcher
    from tpspec.comm.messages import Stats, ToLead
    from tpspec.comm.watch import Watch
    from tpspec.request import Delta

IDLE_S = 1.0  # an idle lead shares empty news this often, so that the other ranks know it lives
END_S = 10.0  # how long the HTTP process may take to leave
LOOK_S = 0.02


class HttpFailed(UserError):
    """The HTTP process did not start. Without a message: it has written its own, and one is enough."""


class HttpProcess:
    """child: where this process has started it."""

    def __init__(self, pid: int, where: str, child: subprocess.Popen[str] | None = None) -> None:
        self._pid, self.endpoint, self._child = pid, where, child

    @classmethod
    def started(cls, command: Sequence[str]) -> HttpProcess:
        """Returns when it listens. Raises HttpFailed."""
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            child.wait()
            raise HttpFailed
        return cls(child.pid, str(json.loads(line)["endpoint"]), child)

    @classmethod
    def found(cls, folder: Path) -> HttpProcess | None:
        pid = frontend_at(folder)
        return None if pid is None else cls(pid, endpoint(folder))

    def exit_code(self) -> int | None:
        """None while it runs. Of another's child nobody tells; but that it left before it said so."""
        if self._child is not None:
            return self._child.poll()
        return None if is_alive(self._pid) else WorldFailure.exit_code

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.exit_code() is None:
                os.kill(self._pid, number)

    def end(self) -> None:
        """Waits until readers have what they are owed."""
        deadline = monotonic() + END_S
        while self.exit_code() is None and monotonic() < deadline:
            sleep(LOOK_S)
        self.signal(signal.SIGKILL)
        if self._child is not None:
            self._child.wait()


class Frontend:
    """command: what starts the process. launcher: None without torchrun. watch: over the other ranks of the world."""

    def __init__(self, command: Sequence[str], timeout_s: float, launcher: Launcher | None, watch: Watch) -> None:
        self._launcher, self._watch, self._serves = launcher, watch, False
        found = HttpProcess.found(launcher.folder) if launcher is not None and launcher.restarts > 0 else None
        self._is_found = found is not None
        try:
            self._process = found or HttpProcess.started(command)
        except HttpFailed:
            self._clear()
            raise
        self._link = FrontendLink(self._process.endpoint, timeout_s)
        self._link.send(Hello(os.getpid(), launcher.restarts_left if launcher is not None else 0))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def ready(self, max_tokens: int, num_ranks: int, max_running: int) -> None:
        self._serves = True
        self._link.send(Ready(max_tokens, num_ranks, max_running))

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        messages = self._link.poll(IDLE_S if wait else 0.0)
        may_be_gone = not messages and (wait or self._link.is_over)
        if may_be_gone and (code := self._process.exit_code()) is not None:
            return [Stop(code)]
        return messages

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        self._link.send(Report(deltas, stats))

    def close(self) -> None:
        """Waits until readers have what they are owed; then nothing of ours is left running."""
        self._link.close()
        self._process.end()
        self._clear()

    def abandon(self, *, is_final: bool) -> None:
        """The world failed. A process that may have readers sees us go, and waits or tells them; else it has no use.

        is_final: no other lead comes.
        """
        if self._serves or self._is_found or not is_final:
            self._link.close()
            return
        self._process.signal(signal.SIGTERM)
        self.close()

    def _clear(self) -> None:
        if self._launcher is not None:
            rmtree(self._launcher.folder, ignore_errors=True)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The HTTP process drains and then tells us to stop; not when torchrun only clears up after a rank it lost.

        While there is nothing to serve with yet, the others end by the same signal; who went on would miss them.
        """
        is_over = not self._watch.lost
        if is_over:
            self._process.signal(number)
        if not self._serves:
            if is_over and not self._is_found:
                self._process.end()
                self._clear()
            clear_after(os.getpid())
            os._exit(0)
