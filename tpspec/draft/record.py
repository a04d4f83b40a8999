"""How often guesses of each kind came true: odds that begin as a belief and become what was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Record:
    """belief: odds of each kind before anything was seen, worth `weight` guesses."""

    def __init__(self, belief: Sequence[float], weight: float) -> None:
        self._tried = [weight] * len(belief)
        self._right = [weight * odds for odds in belief]

    def odds(self, kind: int) -> float:
        return self._right[kind] / self._tried[kind]

    def add(self, kind: int, *, right: bool) -> None:
        self._tried[kind] += 1
        self._right[kind] += right
