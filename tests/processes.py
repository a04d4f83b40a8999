"""What tests ask of processes that they started: each may end between two questions."""

from __future__ import annotations

import psutil


def lives(process: psutil.Process) -> bool:
    """Whether it is there, and no zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
