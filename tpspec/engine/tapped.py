"""What the target's layers made of a text, kept for a drafter in another process: it may have to be told again.

Rows are kept in host memory as long as the text runs. Knows tensors of rows; must not know layers or links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpspec.comm.messages import Rows

if TYPE_CHECKING:
    from torch import Tensor


MOST_SENT = 1 << 26  # bytes of rows in a message


class Tapped:
    """Of one sequence. num_sent: positions that the drafter has been told of."""

    def __init__(self) -> None:
        self.num_sent = 0
        self._rows: list[Tensor] = []  # of one position each

    def add(self, start: int, rows_NW: Tensor) -> None:
        """Rows on the host. A text that is read anew says again what it said before."""
        self._rows[start:] = rows_NW.clone().unbind()  # from a card, it came into pinned memory, which is dear
        self.num_sent = min(self.num_sent, start)

    @property
    def is_sent(self) -> bool:
        """All of it."""
        return self.num_sent == len(self._rows)

    def unsent(self, most: int = MOST_SENT) -> Rows | None:
        """From the first position that has not been sent on, in so many bytes, and one at least: of a long text all may
        be there at once, and the lead would do nothing else for seconds."""
        if self.is_sent:
            return None
        first, row_W = self.num_sent, self._rows[self.num_sent]
        rows = self._rows[first : first + max(1, most // row_W.nbytes)]
        self.num_sent += len(rows)
        rows_NW = torch.stack(rows)
        return Rows(first, len(rows), str(rows_NW.dtype).partition(".")[2], rows_NW.view(torch.uint8).numpy().tobytes())


def tensor_of(rows: Rows) -> Tensor:
    """[count, W]."""
    return torch.frombuffer(bytearray(rows.data), dtype=getattr(torch, rows.dtype)).view(rows.count, -1)
