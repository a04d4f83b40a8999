"""Processes of one host: whether another is still there, and which cores each has. Knows pids and cores alone."""

from __future__ import annotations

import os
from pathlib import Path


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


def keep_to_own_cores(index: int, count: int) -> None:
    """This thread, and what it starts, stays on its part of the cores, where there are enough for `count` parts."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if each := len(cores) // count:
        os.sched_setaffinity(0, cores[index * each : (index + 1) * each])
