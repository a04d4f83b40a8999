"""Pages of a model some of whose layers see the last tokens only: of those, few pages are kept. Integers and keys only.

Layers without a window have slots for every position of a text, as in any pool. Those with one have slots of their
own, in a second and smaller pool, and what has left the window gives its place up. Both hand out pages under the same
keys, so that a text begins with what another has read as far as both of them still have what its next token sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.cache.pages import BrokenPages, PagePool

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tpspec.model.batch import Runs


class WindowedPool(PagePool):
    """window: of the layers, the longest. num_recent: pages of `recent`, the pool for those layers.

    Who plans says where each sequence stands (`pass_by`) before any takes room for its rows (`grow_recent`): with as
    many pages as topology/caches.py counts, no more sequences and rows than it was told of never lack one.
    """

    def __init__(self, num_pages: int, page_size: int, window: int, num_recent: int) -> None:
        super().__init__(num_pages, page_size)
        self.window, self.recent = window, PagePool(num_recent, page_size)

    def pass_by(self, seq: int, num_cached: int) -> None:
        self.recent.drop(seq, self._first_seen(num_cached))

    def grow_recent(self, seq: int, num_tokens: int) -> None:
        self.recent.grow(seq, num_tokens)

    def recent_runs(self, seq: int, start: int, stop: int) -> Runs:
        return self.recent.pieces(seq, min(stop, self._first_seen(start)), stop)

    def recent_slots(self, seq: int, start: int, stop: int) -> list[int]:
        return self.recent.slots(seq, start, stop)

    def shrink(self, seq: int, num_tokens: int) -> None:
        super().shrink(seq, num_tokens)
        self.recent.shrink(seq, num_tokens)

    def release(self, seq: int, *, returns: bool = False) -> None:
        super().release(seq, returns=returns)
        self.recent.release(seq, returns=returns)

    def keep(self, seq: int, index: int, key: bytes) -> None:
        super().keep(seq, index, key)
        if index * self.page_size >= self.recent.num_dropped(seq):
            self.recent.keep(seq, index, key)

    def unkeep(self) -> None:
        super().unkeep()
        self.recent.unkeep()

    def spoil(self, keys: Collection[bytes]) -> None:
        """Also what has left the window, and may still lie there."""
        super().spoil(keys)
        self.recent.spoil(keys)

    def reach(self, keys: Sequence[bytes]) -> int:
        """As far as `recent` has what the token behind them sees."""
        in_a_row = count = 0  # pages that `recent` has, up to the one that is looked at
        for stop, key in enumerate(keys[: super().reach(keys)], 1):
            in_a_row = in_a_row + 1 if self.recent.keeps(key) else 0
            if stop - in_a_row <= self._num_unseen(stop):
                count = stop
        return count

    def adopt(self, seq: int, keys: Sequence[bytes], *, dropped: int = 0) -> None:
        if keys:
            first = self._num_unseen(len(keys))
            self.recent.adopt(seq, keys[first:], dropped=first)
        super().adopt(seq, keys, dropped=dropped)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.recent.check_integrity()
        if only := set(self.recent.owners) - set(self.owners):
            raise BrokenPages(f"sequences {sorted(only)} own pages of layers with a window, and no others")

    def _num_unseen(self, num_pages: int) -> int:
        """Of so many pages the first ones, which the token behind them does not see."""
        return self._first_seen(num_pages * self.page_size) // self.page_size

    def _first_seen(self, position: int) -> int:
        """By a token at this position."""
        return max(0, position - self.window + 1)
