"""Processes of one host: whether another is still there, what it leaves behind, which cores and objects each keeps.

Knows pids, cores and folders alone, and nothing of torch: the HTTP process asks, too.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs, or is stopped. One that has ended and whom nobody buried is not alive."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, PermissionError):
        return False
    except FileNotFoundError:  # no /proc here
        return True
    return state not in "ZX"


class Peer:
    """A process that may end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # A pidfd tells the end of a process that nobody has reaped yet; a signal still reaches it.
        self._file = _pidfd(pid)

    def has_ended(self) -> bool:
        if self._file is None:
            return not _takes_signals(self.pid)
        poll = select.poll()
        poll.register(self._file, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        """Even while it is stopped. Never another that has its number by now, where there are pidfds."""
        with suppress(ProcessLookupError):
            if self._file is None:
                os.kill(self.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._file, signal.SIGKILL)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _pidfd(pid: int) -> int | None:
    """None where the system has none. Raises ProcessLookupError for a process that is gone."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        raise
    except OSError:  # the C library knows it, the kernel does not
        return None


def folder_prefix() -> str:
    """Of the names of folders for this process's sockets, so that others can clear up after it."""
    return f"tpspec-{os.getpid()}-"


def clear_after(pid: int) -> None:
    """Removes the folders of a process of this user that is gone, or is about to be."""
    for folder in Path(gettempdir()).glob(f"tpspec-{pid}-*"):
        with suppress(FileNotFoundError):
            if folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_to_own_cores(index: int, count: int) -> None:
    """This thread, and what it starts, stays on its part of the cores, where there are enough for `count` parts."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if each := len(cores) // count:
        os.sched_setaffinity(0, cores[index * each : (index + 1) * each])


def settle() -> None:
    """Whatever is loaded by now stays to the end, and no collection of garbage looks through it again.

    There are a quarter of a million objects after an import of torch: a full collection takes a rank 0.1 s, in the
    middle of a round.
    """
    gc.collect()
    gc.freeze()


def _takes_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
