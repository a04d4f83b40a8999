"""What the target's layers made of a text, kept for a drafter in another process: it may have to be told again.

Rows are kept in host memory as long as the text runs. Knows tensors of rows; must not know layers or links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpspec.comm.messages import Rows

if TYPE_CHECKING:
    from torch import Tensor


MOST_SENT = 1 << 26  # bytes in a message


class Tapped:
    """Of one sequence. num_sent: positions that the drafter has been told of."""

    def __init__(self) -> None:
        self.num_sent = 0
        self._rows: list[Tensor] = []  # of one position each

    def add(self, start: int, rows_NW: Tensor) -> None:
        """Rows on the host. A text that is read anew says again what it said before."""
        self._rows[start:] = rows_NW.clone().unbind()  # from a card, it came into pinned memory, which is dear
        self.num_sent = min(self.num_sent, start)

    def unsent(self) -> Rows | None:
        """From the first position that has not been sent on, MOST_SENT at most: of a text that begins with what others
        have read all are there at once."""
        if self.num_sent == len(self._rows):
            return None
        first, row_W = self.num_sent, self._rows[self.num_sent]
        rows = self._rows[first : first + max(1, MOST_SENT // row_W.nbytes)]
        self.num_sent += len(rows)
        rows_NW = torch.stack(rows)
        return Rows(first, len(rows), str(rows_NW.dtype).partition(".")[2], rows_NW.view(torch.uint8).numpy().tobytes())


def tensor_of(rows: Rows) -> Tensor:
    """[count, W]."""
    return torch.frombuffer(bytearray(rows.data), dtype=getattr(torch, rows.dtype)).view(rows.count, -1)
