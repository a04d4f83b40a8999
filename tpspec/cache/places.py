"""Where in a pool a text is put: which pages are free, and how long what is kept in them was unused. Integers only.

Must not know whose a page is, nor under which key it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

GROWTH = 8  # a text may be expected to grow by this part of a pool


@dataclass(frozen=True, slots=True)
class Places:
    """Of a pool as it is now. free: a byte for each page. since: the release since which it is kept and free, 0 where
    it is not both. growing: pages behind the last of each sequence."""

    free: bytearray
    since: NDArray[np.int64]
    growing: Collection[int]

    def best(self, wanted: int) -> int:
        """Where nothing is kept, if there is enough of such room."""
        blank = self.blank(wanted)
        return self.longest_unused(wanted) if blank is None else blank

    def blank(self, wanted: int) -> int | None:
        """In the longest stretch of pages in which nothing is kept; None where it is hardly long enough.

        Who lies before it can grow: in the middle behind a text that does, and behind one that may be back as far away
        as it leaves the new one as much, but no farther than a text may be expected to grow.
        """
        is_blank = np.frombuffer(self.free, np.uint8).astype(bool) & (self.since == 0)
        edges = np.flatnonzero(np.diff(is_blank, prepend=False, append=False))
        if not len(edges):
            return None
        longest = int((edges[1::2] - edges[::2]).argmax())
        start, stop = map(int, edges[2 * longest : 2 * longest + 2])
        slack = stop - start - wanted
        if slack < len(self.free) // 32:
            return None
        if start in self.growing:
            return _in_the_middle(start, stop, wanted)
        if start == 0 or self.since[start - 1] == 0:
            return start
        return start + min(slack // 2, len(self.free) // GROWTH)

    def longest_unused(self, wanted: int) -> int:
        """Of places where the text can grow that with the longest unused pages; of those the one after which the most
        are free."""
        rooms = list(self._rooms(wanted))
        enough = min(wanted + len(self.free) // GROWTH, max(stop - start for start, stop in rooms))
        latest = window_max(self.since, enough)  # of the pages from each on
        places = []
        for start, stop in rooms:
            if stop - start >= enough:
                at = start + int(latest[start : stop - enough + 1].argmin())  # the first: after it the most are free
                places.append((int(latest[at]), at - stop, at))
        return min(places)[-1]

    def _rooms(self, wanted: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of free pages."""
        first = self.free.find(1)
        while first >= 0:
            taken = self.free.find(0, first)
            stop = len(self.free) if taken < 0 else taken
            yield _in_the_middle(first, stop, wanted) if first in self.growing else first, stop
            first = self.free.find(1, stop)


def _in_the_middle(start: int, stop: int, wanted: int) -> int:
    """Where a text begins between these pages, so that who lies before them can grow, too; but not so late that
    `wanted` pages no longer fit where they would have."""
    return max(start, min((start + stop) // 2, stop - wanted))


def window_max(numbers: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Of each `width` numbers in a row, [len(numbers) - width + 1]: of windows of two, of four, and so on."""
    wide, done = numbers, 1
    while done < width:
        step = min(done, width - done)
        wide, done = np.maximum(wide[:-step], wide[step:]), done + step
    return wide
