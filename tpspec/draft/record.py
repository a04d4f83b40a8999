"""How often guesses of each kind came true: odds that begin as a belief and become what was seen."""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# What a source's odds are worth is learned by kind, the kinds ending here.
SAID = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
WORTH = (0.01, *((low + high) / 2 for low, high in zip(SAID, (*SAID[1:], 1.0), strict=True)))
WORTH_WEIGHT = 8.0


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


class Calibration:
    """What the odds that a source gives are worth: how often tokens came true of which it said so."""

    def __init__(self) -> None:
        self._record = Record(WORTH, WORTH_WEIGHT)

    def odds(self, said: float) -> float:
        return self._record.odds(bisect(SAID, said))

    def add(self, said: float, *, right: bool) -> None:
        self._record.add(bisect(SAID, said), right=right)
