"""What a forward of m rows takes, measured as forwards go: so much for one row, so much for each row more.

Least squares over the last forwards, with a belief about the price of a row that counts while all of them are alike.
Knows rows and seconds.
"""

from __future__ import annotations

KEPT = 0.99  # of what was known, after each forward
ROW_SHARE, ROW_WEIGHT = 0.05, 4.0  # a row costs 5% of a forward, as sure as forwards of 1 and 5 rows would make it
OUTLIER = 3.0  # one that took so many times what was expected says something about the machine, not about forwards


class RowCost:
    """base_s: of a forward of one row; row_s: of each further row. Both 0 before the first."""

    def __init__(self) -> None:
        self.base_s = self.row_s = 0.0
        # How many forwards, and sums over them, older ones fading.
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0

    def seconds(self, num_rows: int) -> float:
        return self.base_s + self.row_s * (num_rows - 1)

    def add(self, num_rows: int, seconds: float) -> None:
        if self.base_s:
            seconds = min(seconds, OUTLIER * self.seconds(num_rows))
        self._count = KEPT * self._count + 1
        self._rows = KEPT * self._rows + num_rows
        self._seconds = KEPT * self._seconds + seconds
        self._squares = KEPT * self._squares + num_rows**2
        self._products = KEPT * self._products + num_rows * seconds
        mean_rows, mean_s = self._rows / self._count, self._seconds / self._count
        spread, together = self._squares - self._rows * mean_rows, self._products - self._rows * mean_s
        self.row_s = max(0.0, (together + ROW_WEIGHT * ROW_SHARE * mean_s) / (spread + ROW_WEIGHT))
        self.base_s = max(mean_s - self.row_s * (mean_rows - 1), ROW_SHARE * mean_s)
