"""Who runs in a round, and which way of drafting is worth its while: decided by the lead, told to the others as news.

Integers and seconds that are handed in; must not know a drafter, a link or tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TRIAL_ROUNDS, LONG_ROUNDS = 12, 150  # of a way that is tried, and of the one that was best before another is


class Turns:
    """Two halves of the sequences in turn, so that one is drafted for while the other is verified."""

    def __init__(self) -> None:
        self._half: dict[int, int] = {}
        self._last = 1

    def next(self, ready: Sequence[int]) -> list[int]:
        """Those of `ready` whose turn it is; all of them while there is only one half."""
        self._half = {seq: self._half[seq] for seq in ready if seq in self._half}
        for seq in ready:
            if seq not in self._half:
                second = sum(self._half.values())
                self._half[seq] = int(2 * second < len(self._half))
        self._last = 1 - self._last
        turn = [seq for seq in ready if self._half[seq] == self._last]
        if not turn:
            self._last = 1 - self._last
            turn = list(ready)
        return turn


class Trials:
    """The best of a few ways, by the tokens a second that each gave when it was last tried."""

    def __init__(self, num_ways: int) -> None:
        self._rates: list[float | None] = [None] * num_ways
        self._left = TRIAL_ROUNDS
        self._tokens = self._seconds = 0.0
        self._turn = 0  # the next to be tried
        self.way = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """What a round of the present way gave; may change the way."""
        self._tokens += num_tokens
        self._seconds += seconds
        self._left -= 1
        if self._left > 0 or not self._seconds:
            return
        self._rates[self.way] = self._tokens / self._seconds
        self._tokens = self._seconds = 0.0
        self._choose()

    def _choose(self) -> None:
        if None in self._rates:
            self.way, self._left = self._rates.index(None), TRIAL_ROUNDS
            return
        best = max(range(len(self._rates)), key=lambda way: self._rates[way] or 0.0)
        others = [way for way in range(len(self._rates)) if way != best]
        if self.way != best or not others:
            self.way, self._left = best, LONG_ROUNDS
            return
        self._turn += 1
        self.way, self._left = others[self._turn % len(others)], TRIAL_ROUNDS
