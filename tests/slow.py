"""Cases of a test that are run by ./scripts/test-slow alone: those that take a path again that others of it take.

A change to what they are of is a reason to run them; a sound path of theirs, in every run, is some other case's.
"""

from __future__ import annotations

from typing import Any

import pytest


def slowly(*cases: Any) -> list[Any]:
    """Of `parametrize`; a tuple is a case of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
