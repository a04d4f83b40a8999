"""The C libraries that are built when the package is installed; where there was no compiler, there are none.

Knows names of modules and files, not what is in them.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec


def library(name: str) -> ctypes.CDLL | None:
    """The shared library built as module `name`, or None. Each call gives a handle of its own."""
    spec = find_spec(name)
    return None if spec is None or spec.origin is None else ctypes.CDLL(spec.origin, use_errno=True)
