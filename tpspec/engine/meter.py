"""What rounds cost here and what they give, measured as they go. The lead's numbers travel as news, and decide for all.

Must not decide anything itself.
"""

from __future__ import annotations

from tpspec.comm.messages import Costs
from tpspec.draft.row_cost import RowCost

KEPT = 0.99  # of what drafts were known to cost, after each time
RATE_KEPT = 0.95  # of tokens and seconds, after each round


class Meter:
    """Sums over rounds, older ones fading."""

    def __init__(self) -> None:
        self._rounds = RowCost()
        self._drafted = self._draft_s = self._tokens = self._seconds = 0.0

    def round(self, num_rows: int, seconds: float) -> None:
        """A round that verified, and read no prompt: its seconds without those of drafting."""
        self._rounds.add(num_rows, seconds)

    def drafting(self, num_tokens: int, seconds: float) -> None:
        """num_tokens: that came of it, over all sequences. seconds: that the target waited."""
        self._drafted = KEPT * self._drafted + num_tokens
        self._draft_s = KEPT * self._draft_s + seconds

    def gain(self, num_tokens: int, seconds: float) -> None:
        """What a round gave, and how long after the one before."""
        self._tokens = RATE_KEPT * self._tokens + num_tokens
        self._seconds = RATE_KEPT * self._seconds + seconds

    @property
    def costs(self) -> Costs | None:
        """None before the first round."""
        if not self._rounds.base_s:
            return None
        draft_s = self._draft_s / self._drafted if self._drafted else 0.0
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return Costs(self._rounds.base_s, self._rounds.row_s, draft_s, rate)
