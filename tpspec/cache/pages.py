"""Which pages of a cache belong to which sequence: integers and keys only, no tensors, no tokens, no policy.

A page is `page_size` consecutive slots. A sequence owns runs of adjacent pages, in the order of its positions, rather
than a list of pages: attention reads a sequence that lies in one run without a copy, so allocation is about staying
adjacent, and growing by a page is one addition. A page that is kept under a key may be owned by several sequences, and
outlives them until its place is wanted: when there is none in which nothing is kept, where the longest unused ones lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tpspec.cache.places import Places

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tpspec.model.batch import Runs


class OutOfPages(Exception):
    """The pool cannot hold what was asked; nothing has changed."""


class BrokenPages(AssertionError):
    """A page is lost or has an owner too many, or a sequence lacks slots: a bug of ours, never the user's."""


class Pages(Protocol):
    """The pages of sequences, for someone who reads and grows them. `PagePool` says what each verb does."""

    def num_slots(self, seq: int) -> int: ...
    def grow(self, seq: int, num_tokens: int) -> None: ...
    def shrink(self, seq: int, num_tokens: int) -> None: ...
    def release(self, seq: int) -> None: ...
    def runs(self, seq: int, num_tokens: int) -> Runs: ...
    def slots(self, seq: int, start: int, stop: int) -> list[int]: ...
    def recent_runs(self, seq: int, start: int, stop: int) -> Runs | None: ...
    def recent_slots(self, seq: int, start: int, stop: int) -> list[int]: ...


@dataclass(slots=True)
class _Run:
    """Adjacent pages [first, stop) of one sequence."""

    first: int
    stop: int


@dataclass(slots=True)
class _Owned:
    """The pages of one sequence. dropped: pages before the first of `runs`, which it has given up. stop: pages that its
    positions fill, dropped or not. placed: the last release before a place was chosen for its last run; 0 for pages
    that it has adopted."""

    dropped: int = 0
    stop: int = 0
    placed: int = 0
    runs: list[_Run] = field(default_factory=list)


_NOTHING = _Owned()  # of who owns no pages; never changed


class PagePool:
    """Pages [0, num_pages) of page_size slots each, free or owned: by one sequence, or if they are kept by several.

    The same calls give the same pages: every rank keeps a pool of its own and they never differ. A free page may be
    kept, too, until somebody takes it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages and slots, got {num_pages} pages of {page_size} slots")
        self.page_size = page_size
        self._free = bytearray(b"\x01" * num_pages)  # 1: free; bytes, so that runs are found at the speed of C
        self._num_free = num_pages
        self._owned: dict[int, _Owned] = {}
        self._num_owners = [0] * num_pages
        self._keys: dict[int, bytes] = {}  # of pages that are kept; empty where none leads to it any more
        self._kept: dict[bytes, int] = {}
        self._idle: dict[int, int] = {}  # pages that are kept and free, since which release
        self._num_releases = self._returning = 0  # the latter: the last release of one who will be back

    @property
    def num_pages(self) -> int:
        return len(self._free)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def owners(self) -> list[int]:
        """Sequences that own pages, the one that began first leading."""
        return list(self._owned)

    def num_slots(self, seq: int) -> int:
        """Positions of `seq` that have slots, or had one before it was dropped."""
        return self._owned.get(seq, _NOTHING).stop * self.page_size

    def num_reachable(self, seq: int) -> int:
        """`num_slots` if `seq` took every free page."""
        return self.num_slots(seq) + self.num_free * self.page_size

    def can_grow(self, seq: int, num_tokens: int) -> bool:
        return self._num_missing(seq, num_tokens) <= self._num_free

    def grow(self, seq: int, num_tokens: int) -> None:
        """Make room for num_tokens slots in total. Raises OutOfPages, and then nothing has changed."""
        missing = self._num_missing(seq, num_tokens)
        if missing > self._num_free:
            raise OutOfPages(f"sequence {seq} needs {missing} more pages for {num_tokens} tokens, {self.num_free} free")
        while missing > 0:
            missing -= self._take(seq, missing)

    def shrink(self, seq: int, num_tokens: int) -> None:
        """Give up the pages that hold nothing of the first num_tokens slots."""
        owned = self._owned.get(seq, _NOTHING)
        excess = -self._num_missing(seq, num_tokens)
        while excess > 0 and owned.runs:
            last = owned.runs[-1]
            first = max(last.first, last.stop - excess)
            self._give_up(first, last.stop)
            excess -= last.stop - first
            owned.stop -= last.stop - first
            last.stop = first
            if last.first == last.stop:
                owned.runs.pop()
        if not owned.stop:
            self._owned.pop(seq, None)

    def drop(self, seq: int, num_tokens: int) -> None:
        """Give up the pages that hold nothing but the first num_tokens slots; positions keep their numbers."""
        owned = self._owned.get(seq, _NOTHING)
        excess = num_tokens // self.page_size - owned.dropped
        self._num_releases += excess > 0  # or they would pass for those of the last who went, who may be back
        while excess > 0 and owned.runs:
            run = owned.runs[0]
            stop = min(run.stop, run.first + excess)
            self._give_up(run.first, stop)
            excess -= stop - run.first
            owned.dropped += stop - run.first
            run.first = stop
            if run.first == run.stop:
                owned.runs.pop(0)

    def release(self, seq: int, *, returns: bool = False) -> None:
        """Give up every page of `seq`; unknown sequences are ignored. returns: it will want them again soon."""
        self._num_releases += 1
        if returns:
            self._returning = self._num_releases
        for run in self._owned.pop(seq, _NOTHING).runs:
            self._give_up(run.first, run.stop)

    def keep(self, seq: int, index: int, key: bytes) -> None:
        """Page `index` of `seq` is never written again: who knows the key may have it. The first of a key stays it."""
        page = self.slots(seq, index * self.page_size, index * self.page_size + 1)[0] // self.page_size
        if key not in self._kept and page not in self._keys:
            self._keys[page], self._kept[key] = key, page

    def unkeep(self) -> None:
        """Nothing is kept under a key any more; only while nobody owns a page."""
        self._keys.clear()
        self._kept.clear()
        self._idle.clear()

    def spoil(self, keys: Collection[bytes]) -> None:
        """What lies under these keys is wrong: nobody may have it by them, and who has it already has to find out."""
        for page in [self._kept.pop(key) for key in keys if self.keeps(key)]:
            self._keys[page] = b""

    def keeps(self, key: bytes) -> bool:
        """Whether a page is kept under it."""
        return key in self._kept

    def reach(self, keys: Sequence[bytes]) -> int:
        """With how many of the pages under these keys a text may begin: those up to the first that is not kept."""
        return next((count for count, key in enumerate(keys) if not self.keeps(key)), len(keys))

    def adopt(self, seq: int, keys: Sequence[bytes], *, dropped: int = 0) -> None:
        """Give `seq`, which owns nothing, the pages kept under these keys, no more of which than `reach` says.

        dropped: pages before the first that it begins without.
        """
        if dropped:
            self._owned[seq] = _Owned(dropped, dropped)
        for key in keys:
            page = self._kept[key]
            if self._idle.pop(page, None) is not None:
                self._mark(page, page + 1, free=False)
            self._num_owners[page] += 1
            self._append(seq, page, page + 1)

    def pass_by(self, seq: int, num_cached: int) -> None:
        """`seq` has so many tokens cached, and its next rows follow them: what none of those sees may go."""

    def grow_recent(self, seq: int, num_tokens: int) -> None:
        """`grow` for layers with a window, where those have slots of their own."""

    def recent_runs(self, seq: int, start: int, stop: int) -> Runs | None:
        """`runs` of those layers: of positions before `stop` that a row at `start` sees; None where there are none."""

    def recent_slots(self, seq: int, start: int, stop: int) -> list[int]:
        """`slots` of those layers; empty where there are none."""
        return []

    def num_dropped(self, seq: int) -> int:
        """Of its first positions, those that have been dropped."""
        return self._owned.get(seq, _NOTHING).dropped * self.page_size

    def runs(self, seq: int, num_tokens: int) -> Runs:
        """(first slot, count) pieces of positions [0, num_tokens), in order; nearly always one piece."""
        owned = self._owned.get(seq, _NOTHING)
        if len(owned.runs) == 1 and not owned.dropped and 0 < num_tokens <= owned.stop * self.page_size:
            return ((owned.runs[0].first * self.page_size, num_tokens),)
        return self.pieces(seq, 0, num_tokens)

    def pieces(self, seq: int, start: int, stop: int) -> Runs:
        """The same of positions [start, stop)."""
        return tuple(self._pieces(seq, start, stop))

    def slots(self, seq: int, start: int, stop: int) -> list[int]:
        """The slot of each position in [start, stop)."""
        return [slot for first, count in self._pieces(seq, start, stop) for slot in range(first, first + count)]

    def check_integrity(self) -> None:
        """Every page is free, owned by one sequence, or kept. Raises BrokenPages with the first page at fault."""
        owners: list[list[int]] = [[] for _ in range(self.num_pages)]
        for seq, owned in self._owned.items():
            held = sum(run.stop - run.first for run in owned.runs)
            if owned.stop != owned.dropped + held:
                raise BrokenPages(
                    f"sequence {seq} has {held} pages and dropped {owned.dropped}, {owned.stop} were counted"
                )
            for page in (page for run in owned.runs for page in range(run.first, run.stop)):
                owners[page].append(seq)
        for page, who in enumerate(owners):
            self._check_page(page, who)
        if self._num_free != sum(self._free):
            raise BrokenPages(f"{sum(self._free)} pages are free, {self._num_free} were counted")
        if self._kept != {key: page for page, key in self._keys.items() if key}:
            raise BrokenPages(f"{len(self._keys)} pages are kept, {len(self._kept)} keys lead to them")

    def _check_page(self, page: int, who: list[int]) -> None:
        is_free, is_kept, counted = bool(self._free[page]), page in self._keys, self._num_owners[page]
        what = (
            f"page {page}: owned by {who or 'nobody'}, {'' if is_free else 'not '}free, {'' if is_kept else 'not '}kept"
        )
        if is_free == bool(who) or (len(who) > 1 and not is_kept) or len(set(who)) < len(who):
            raise BrokenPages(what)
        if len(who) != counted or (page in self._idle) != (is_free and is_kept):
            raise BrokenPages(f"{what}; {counted} owners were counted, {'' if page in self._idle else 'not '}idle")

    def _num_missing(self, seq: int, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) - self._owned.get(seq, _NOTHING).stop

    def _pieces(self, seq: int, start: int, stop: int) -> list[tuple[int, int]]:
        owned = self._owned.get(seq, _NOTHING)
        base = owned.dropped * self.page_size  # position of the run's first slot
        if start < base:
            raise ValueError(f"sequence {seq} dropped its first {base} slots, positions from {start} were asked for")
        pieces: list[tuple[int, int]] = []
        for run in owned.runs:
            if base >= stop:
                break
            end = base + (run.stop - run.first) * self.page_size
            low, high = max(start, base), min(stop, end)
            if low < high:
                pieces.append((run.first * self.page_size + low - base, high - low))
            base = end
        if base < stop:
            raise ValueError(f"sequence {seq} owns {base} slots, positions up to {stop} were asked for")
        return pieces

    def _take(self, seq: int, wanted: int) -> int:
        """Give `seq` up to `wanted` adjacent free pages at the best place; how many it got."""
        owned = self._owned.setdefault(seq, _Owned())
        first = self._next_page(owned, wanted)
        if not owned.runs or owned.runs[-1].stop != first:
            owned.placed = self._num_releases
        taken = self._free.find(0, first, first + wanted)
        stop = min(first + wanted, self.num_pages) if taken < 0 else taken
        for page in self._idle.keys() & range(first, stop):
            del self._idle[page]
            self._kept.pop(self._keys.pop(page), None)
        self._mark(first, stop, free=False)
        self._num_owners[first:stop] = [1] * (stop - first)
        self._append(seq, first, stop)
        return stop - first

    def _append(self, seq: int, first: int, stop: int) -> None:
        owned = self._owned.setdefault(seq, _Owned())
        runs = owned.runs
        owned.stop += stop - first
        if runs and runs[-1].stop == first:
            runs[-1].stop = stop
        else:
            runs.append(_Run(first, stop))

    def _next_page(self, owned: _Owned, wanted: int) -> int:
        """Behind its last, also over what was kept there when that place was chosen.

        What others have left there since then, or whatever is kept behind pages that it has adopted, goes only where
        no room is left in which nothing is kept; and behind adopted ones only if nothing was unused longer. What its
        owner gave up to make room is spared.
        """
        after = owned.runs[-1].stop if owned.runs else self.num_pages
        if after == self.num_pages or not self._free[after] or self._idle.get(after) == self._returning:
            return self._places().best(wanted)
        kept = max(self._idle.get(page, 0) for page in range(after, min(after + wanted, self.num_pages)))
        if kept <= owned.placed:
            return after
        places = self._places()
        if (blank := places.blank(wanted)) is not None:
            return blank
        best = after if owned.placed else places.longest_unused(wanted)
        return best if places.since[best] < kept else after

    def _places(self) -> Places:
        since = np.zeros(self.num_pages, np.int64)
        since[list(self._idle)] = list(self._idle.values())
        return Places(self._free, since, {owned.runs[-1].stop for owned in self._owned.values() if owned.runs})

    def _give_up(self, first: int, stop: int) -> None:
        """One owner less."""
        for page in range(first, stop):
            self._num_owners[page] -= 1
            if not self._num_owners[page]:
                self._mark(page, page + 1, free=True)
                if page in self._keys:
                    self._idle[page] = self._num_releases

    def _mark(self, first: int, stop: int, *, free: bool) -> None:
        count = stop - first
        self._free[first:stop] = (b"\x01" if free else b"\x00") * count
        self._num_free += count if free else -count


class Borrowed:
    """Another's pool, for slots behind what a sequence owns there. Takes free pages; the owner takes them back."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.num_slots, self.runs, self.slots = pool.num_slots, pool.runs, pool.slots
        self.recent_runs, self.recent_slots = pool.recent_runs, pool.recent_slots

    def grow(self, seq: int, num_tokens: int) -> None:
        """Raises OutOfPages for a sequence that owns none, too: nothing of it is cached."""
        if not self._pool.num_slots(seq):
            raise OutOfPages(f"sequence {seq} owns no pages")
        self._pool.grow(seq, num_tokens)
        self._pool.grow_recent(seq, num_tokens)

    def shrink(self, seq: int, num_tokens: int) -> None: ...
    def release(self, seq: int) -> None: ...
