"""Whether another process of this host is still there, for those whose life hangs on it. Knows pids alone."""

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
