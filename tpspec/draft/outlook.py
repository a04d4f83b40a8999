"""What reading one token more is likely to bring, learned; and when a source that does not pay is tried once more.

Counts only; must not know tokens, a model or what anything costs.
"""

from __future__ import annotations

from tpspec.draft.record import Record

NEXT, NEXT_WEIGHT = 0.8, 8.0  # odds of a token nobody has read to yet, until some have been seen
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024  # answers without a draft before it is tried; each trial that fails doubles them


class Outlook:
    """Of one source, over all texts."""

    def __init__(self) -> None:
        self._record = Record((NEXT,), NEXT_WEIGHT)
        self._pause, self._num_silent = FIRST_PAUSE, 0

    @property
    def next(self) -> float:
        """Odds that the likeliest token after one that has come true comes true."""
        return self._record.odds(0)

    @property
    def tries(self) -> bool:
        """Whether one token is to be read though it does not pay."""
        return self._num_silent >= self._pause

    def saw(self, *, right: bool) -> None:
        self._record.add(0, right=right)

    def answered(self, *, drafted: bool) -> None:
        if not drafted:
            self._num_silent += 1
            return
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if self.tries else FIRST_PAUSE
        self._num_silent = 0
