"""What rounds cost here, measured as they go: seconds of a round of one row, of each further row, of a draft token.

Least squares over the last rounds, with a belief about the price of a row that counts while all rounds are alike. Must
not decide anything: the lead's numbers travel as news.
"""

from __future__ import annotations

from tpspec.comm.messages import Costs

KEPT = 0.99  # of what was known, after each round
ROW_SHARE, ROW_WEIGHT = 0.05, 4.0  # a row costs 5% of a round, as sure as rounds of 1 and 5 rows would make it
OUTLIER = 3.0  # a round that took so many times what was expected says something about the machine, not about rounds


class Meter:
    """Sums over rounds, older ones fading."""

    def __init__(self) -> None:
        # Of rounds: how many, rows, seconds, rows squared, rows times seconds.
        self._sums = [0.0] * 5
        self._drafted = self._draft_s = 0.0

    def round(self, num_rows: int, seconds: float) -> None:
        """A round that verified, and read no prompt: its seconds without those of drafting."""
        if (costs := self.costs) is not None:
            seconds = min(seconds, OUTLIER * costs.seconds(num_rows))
        terms = (1, num_rows, seconds, num_rows**2, num_rows * seconds)
        self._sums = [KEPT * before + term for before, term in zip(self._sums, terms, strict=True)]

    def drafting(self, num_tokens: int, seconds: float) -> None:
        """num_tokens: that came of it, over all sequences. seconds: that the target waited."""
        self._drafted = KEPT * self._drafted + num_tokens
        self._draft_s = KEPT * self._draft_s + seconds

    @property
    def costs(self) -> Costs | None:
        """None before the first round."""
        rounds, rows, seconds, squares, products = self._sums
        if not rounds:
            return None
        mean_rows, mean_s = rows / rounds, seconds / rounds
        spread, together = squares - rows * mean_rows, products - rows * mean_s
        row_s = max(0.0, (together + ROW_WEIGHT * ROW_SHARE * mean_s) / (spread + ROW_WEIGHT))
        one_row_s = max(mean_s - row_s * (mean_rows - 1), ROW_SHARE * mean_s)
        return Costs(one_row_s, row_s, self._draft_s / self._drafted if self._drafted else 0.0)
