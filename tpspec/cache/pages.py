"""Which pages of a cache belong to which sequence: integers only, no tensors, no tokens, no policy.

A page is `page_size` consecutive slots. A sequence owns runs of adjacent pages, in the order of its positions, rather
than a list of pages: attention reads a sequence that lies in one run without a copy, so allocation is about staying
adjacent, and growing by a page is one addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpspec.model.batch import Runs


class OutOfPages(Exception):
    """The pool cannot hold what was asked; nothing has changed."""


class BrokenPages(AssertionError):
    """A page is lost or owned twice, or a sequence lacks slots: a bug of ours, never the user's."""


class Pages(Protocol):
    """The pages of sequences, for someone who reads and grows them. `PagePool` says what each verb does."""

    def num_slots(self, seq: int) -> int: ...
    def grow(self, seq: int, num_tokens: int) -> None: ...
    def shrink(self, seq: int, num_tokens: int) -> None: ...
    def release(self, seq: int) -> None: ...
    def runs(self, seq: int, num_tokens: int) -> Runs: ...
    def slots(self, seq: int, start: int, stop: int) -> list[int]: ...


@dataclass(slots=True)
class _Run:
    """Adjacent pages [first, stop) of one sequence."""

    first: int
    stop: int


class PagePool:
    """Pages [0, num_pages) of page_size slots each, free or owned by one sequence.

    The same calls give the same pages: every rank keeps a pool of its own and they never differ.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages and slots, got {num_pages} pages of {page_size} slots")
        self.page_size = page_size
        self._free = bytearray(b"\x01" * num_pages)  # 1: free; bytes, so that runs are found at the speed of C
        self._num_free = num_pages
        self._runs: dict[int, list[_Run]] = {}

    @property
    def num_pages(self) -> int:
        return len(self._free)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - self._num_free

    @property
    def owners(self) -> list[int]:
        """Sequences that own pages, the one that began first leading."""
        return list(self._runs)

    def num_slots(self, seq: int) -> int:
        """Slots that `seq` owns."""
        return self._num_owned(seq) * self.page_size

    def num_reachable(self, seq: int) -> int:
        """Slots that `seq` would own if it took every free page."""
        return self.num_slots(seq) + self._num_free * self.page_size

    def can_grow(self, seq: int, num_tokens: int) -> bool:
        return self._num_missing(seq, num_tokens) <= self._num_free

    def grow(self, seq: int, num_tokens: int) -> None:
        """Make room for num_tokens slots in total. Raises OutOfPages, and then nothing has changed."""
        missing = self._num_missing(seq, num_tokens)
        if missing > self._num_free:
            raise OutOfPages(
                f"sequence {seq} needs {missing} more pages for {num_tokens} tokens, {self._num_free} free"
            )
        while missing > 0:
            missing -= self._take(seq, missing)

    def shrink(self, seq: int, num_tokens: int) -> None:
        """Free the pages that hold nothing of the first num_tokens slots."""
        runs = self._runs.get(seq, [])
        excess = -self._num_missing(seq, num_tokens)
        while excess > 0:
            last = runs[-1]
            first = max(last.first, last.stop - excess)
            self._mark(first, last.stop, free=True)
            excess -= last.stop - first
            last.stop = first
            if last.first == last.stop:
                runs.pop()
        if not runs:
            self._runs.pop(seq, None)

    def release(self, seq: int) -> None:
        """Free every page of `seq`; unknown sequences are ignored."""
        for run in self._runs.pop(seq, []):
            self._mark(run.first, run.stop, free=True)

    def runs(self, seq: int, num_tokens: int) -> Runs:
        """(first slot, count) pieces of positions [0, num_tokens), in order; nearly always one piece."""
        return tuple(self._pieces(seq, 0, num_tokens))

    def slots(self, seq: int, start: int, stop: int) -> list[int]:
        """The slot of each position in [start, stop)."""
        return [slot for first, count in self._pieces(seq, start, stop) for slot in range(first, first + count)]

    def check_integrity(self) -> None:
        """Every page exactly once: free, or owned by one sequence. Raises BrokenPages with the first page at fault."""
        owners: list[list[int]] = [[] for _ in range(self.num_pages)]
        for seq, runs in self._runs.items():
            for page in (page for run in runs for page in range(run.first, run.stop)):
                owners[page].append(seq)
        for page, who in enumerate(owners):
            if len(who) + self._free[page] != 1:
                raise BrokenPages(f"page {page}: owned by {who or 'nobody'}, {'' if self._free[page] else 'not '}free")
        if self._num_free != sum(self._free):
            raise BrokenPages(f"{sum(self._free)} pages are free, {self._num_free} were counted")

    def _num_owned(self, seq: int) -> int:
        return sum(run.stop - run.first for run in self._runs.get(seq, ()))

    def _num_missing(self, seq: int, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) - self._num_owned(seq)

    def _pieces(self, seq: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        base = 0  # position of the run's first slot
        for run in self._runs.get(seq, ()):
            if base >= stop:
                return
            end = base + (run.stop - run.first) * self.page_size
            low, high = max(start, base), min(stop, end)
            if low < high:
                yield run.first * self.page_size + low - base, high - low
            base = end
        if base < stop:
            raise ValueError(f"sequence {seq} owns {base} slots, positions up to {stop} were asked for")

    def _take(self, seq: int, wanted: int) -> int:
        """Give `seq` up to `wanted` adjacent free pages at the best place; how many it got."""
        runs = self._runs.setdefault(seq, [])
        first = self._next_page(runs, wanted)
        taken = self._free.find(0, first, first + wanted)
        stop = min(first + wanted, self.num_pages) if taken < 0 else taken
        self._mark(first, stop, free=False)
        if runs and runs[-1].stop == first:
            runs[-1].stop = stop
        else:
            runs.append(_Run(first, stop))
        return stop - first

    def _next_page(self, runs: list[_Run], wanted: int) -> int:
        if runs:
            after = runs[-1].stop
            if after < self.num_pages and self._free[after]:
                return after
        return self._roomiest(wanted)

    def _roomiest(self, wanted: int) -> int:
        """The free page after which the most pages are free.

        Behind the last page of another sequence we start in the middle, so that both can grow; but not so late that
        `wanted` pages no longer fit where they would have.
        """
        growing = {runs[-1].stop for runs in self._runs.values() if runs}
        best, most = -1, 0
        for first, stop in self._free_runs():
            middle = max(first, min((first + stop) // 2, stop - wanted))
            start = middle if first in growing else first
            if stop - start > most:
                best, most = start, stop - start
        return best

    def _free_runs(self) -> Iterator[tuple[int, int]]:
        first = self._free.find(1)
        while first >= 0:
            taken = self._free.find(0, first)
            stop = self.num_pages if taken < 0 else taken
            yield first, stop
            first = self._free.find(1, stop)

    def _mark(self, first: int, stop: int, *, free: bool) -> None:
        count = stop - first
        self._free[first:stop] = (b"\x01" if free else b"\x00") * count
        self._num_free += count if free else -count


class Borrowed:
    """Another's pool, for slots behind what a sequence owns there. Takes free pages; the owner takes them back."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.num_slots, self.runs, self.slots = pool.num_slots, pool.runs, pool.slots

    def grow(self, seq: int, num_tokens: int) -> None:
        """Raises OutOfPages for a sequence that owns none, too: nothing of it is cached."""
        if not self._pool.num_slots(seq):
            raise OutOfPages(f"sequence {seq} owns no pages")
        self._pool.grow(seq, num_tokens)

    def shrink(self, seq: int, num_tokens: int) -> None: ...
    def release(self, seq: int) -> None: ...
