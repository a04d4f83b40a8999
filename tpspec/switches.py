"""Variables of the environment by which something is done another way: to measure it, or where a machine needs it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tpspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

ON, OFF = "on", "off"


def switch(name: str, usual: str = ON, ways: Sequence[str] = (ON, OFF)) -> str:
    """Which of the ways the variable asks for; the usual one where it is not set, or empty."""
    found = os.environ.get(name) or usual
    if found not in ways:
        raise UserError(f"{name}={found}: should be {' or '.join(ways)}")
    return found
