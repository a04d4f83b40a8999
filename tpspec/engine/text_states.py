"""What the scheduler does about states (cache/states.py): whose is where, and which beginnings of texts keep a copy.

A text may go on only from a state, and one stands where its text does, not at every page. So copies are made: where a
prompt nearly ends, where a text parts from what others have read, and behind the pages of an answer. Integers and keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tpspec.model.batch import Carried, StateCopy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence as Many

    from tpspec.cache.pages import PagePool
    from tpspec.cache.seats import KeptStates, Seats
    from tpspec.engine.sequence import Sequence

WORTH = 64  # tokens that a state should spare: so few are read in a round that hardly takes longer than any other
OPENING = 8  # last tokens of a prompt that the next turn of its chat may not have: how an answer begins


class Stateless:
    """Of a model that keeps no states: texts go on from any page. Sequences are those that run.

    is_foreseen: whether how a text goes on by one token is known before that is.
    """

    is_foreseen = True

    @property
    def shares(self) -> bool:
        """Whether a text may begin with what others have read."""
        return True

    def reach(self, keys: Many[bytes]) -> int:
        """With how many of the pages under these keys, all of which are there, a text may begin."""
        return len(keys)

    def awaited(self, num_kept: int, num_alike: int) -> int:
        """Who begins with num_kept pages and has num_alike in common with an elder: up to which page it is worth
        waiting for him, 0 where it is not."""
        return num_kept + 1 if num_alike > num_kept else 0

    def stop_at(self, seq: Sequence, num_tokens: int) -> None:
        """Somebody waits for it to have read so many."""

    def begin(self, seq: Sequence, num_known: int | None) -> list[StateCopy]:
        """It runs from now on. num_known: pages of its text that others have read, with which it may begin or not; None
        where nobody begins with anything."""
        return []

    def release(self, seq: int) -> None:
        """Unknown sequences are ignored."""

    def most_nodes(self, num_nodes: int) -> int:
        """Of a tree of so many nodes, those that there is room for."""
        return num_nodes

    def next_stop(self, seq: int, start: int, stop: int) -> int:
        """Where a chunk that begins at `start` and could reach `stop` ends."""
        return stop

    def carried(self, seq: int, num_certain: int) -> Carried | None:
        """How its next span goes on, num_certain rows of which are certain."""

    def has_read(self, seq: Sequence) -> list[StateCopy]:
        """A chunk; what of its pages is to be kept is kept."""
        return []

    def has_gone_on(self, seq: Sequence, rows: tuple[int, ...]) -> list[StateCopy]:
        """By those of the rows that its last span left, its root first; likewise."""
        return []

    def spoil(self, keys: Iterable[bytes]) -> None:
        """What lies under these keys is wrong."""


@dataclass(slots=True)
class _Standing:
    """Of a text that runs. rows: that its last span left and it has kept. stops: tokens after which a copy is made.

    latest: tokens of the last copy, or that it began with. trail: key of the last copy of its answer.
    """

    rows: tuple[int, ...]
    latest: int
    stops: set[int] = field(default_factory=set)
    trail: bytes | None = None


class TextStates(Stateless):
    """seats: of texts that run. kept: of beginnings. pool: of the texts. worth: tokens that a copy should spare."""

    is_foreseen = False  # what is kept of a state is copied between two rounds

    def __init__(self, seats: Seats, kept: KeptStates, pool: PagePool, worth: int = WORTH) -> None:
        self._seats, self._kept, self._worth = seats, kept, worth
        self._page_size, self._is_there = pool.page_size, pool.keeps
        self._standing: dict[int, _Standing] = {}

    @property
    def shares(self) -> bool:
        return self._kept.num_slots > 0

    def reach(self, keys: Many[bytes]) -> int:
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._kept), 0)

    def awaited(self, num_kept: int, num_alike: int) -> int:
        return num_alike if (num_alike - num_kept) * self._page_size >= self._worth else 0

    def stop_at(self, seq: Sequence, num_tokens: int) -> None:
        """Who waits may begin at a stop that is a little earlier."""
        stops, least = self._standing[seq.id].stops, max(seq.num_cached, num_tokens - self._worth)
        if not any(least < stop <= num_tokens for stop in stops):
            stops.add(num_tokens)

    def begin(self, seq: Sequence, num_known: int | None) -> list[StateCopy]:
        self._seats.take(seq.id)
        text = self._standing[seq.id] = _Standing((), seq.num_cached)
        if num_known is not None:
            size, last = self._page_size, seq.num_cached
            for stop in sorted((num_known * size, (seq.num_tokens - OPENING) // size * size)):
                if stop >= last + self._worth:
                    text.stops.add(stop)
                    last = stop
        if not seq.num_cached:
            return []
        slot, text.rows = self._kept.use(seq.keys[seq.num_kept - 1])
        return [StateCopy(slot, self._seats.of(seq.id), max(text.rows) + 1)]

    def release(self, seq: int) -> None:
        self._standing.pop(seq, None)
        self._seats.release(seq)

    def most_nodes(self, num_nodes: int) -> int:
        return min(num_nodes, self._seats.num_left - 1)

    def next_stop(self, seq: int, start: int, stop: int) -> int:
        return min((place for place in self._standing[seq].stops if start < place < stop), default=stop)

    def carried(self, seq: int, num_certain: int) -> Carried:
        return Carried(self._seats.of(seq), self._standing[seq].rows, num_certain)

    def has_read(self, seq: Sequence) -> list[StateCopy]:
        text = self._standing[seq.id]
        text.rows = (0,)  # the last of its rows
        return self._keep(seq, seq.num_cached, text.rows) if seq.num_cached in text.stops else []

    def has_gone_on(self, seq: Sequence, rows: tuple[int, ...]) -> list[StateCopy]:
        """A copy stands before the same root and goes on with fewer rows: as many as fill pages, and are few enough."""
        text, size = self._standing[seq.id], self._page_size
        text.rows, root = rows, seq.num_cached - len(rows)
        for stop in range(seq.num_kept * size, max(root, text.latest + self._worth - 1), -size):
            if max(rows[: stop - root]) < self._kept.num_left:
                return self._trail(seq, stop, rows[: stop - root])
        return []

    def _trail(self, seq: Sequence, stop: int, rows: tuple[int, ...]) -> list[StateCopy]:
        """In place of the last one."""
        text = self._standing[seq.id]
        if text.trail is not None:
            self._kept.drop_trail(text.trail)
        text.trail = seq.keys[stop // self._page_size - 1]
        return self._keep(seq, stop, rows, trail=True)

    def spoil(self, keys: Iterable[bytes]) -> None:
        self._kept.drop(keys)

    def _keep(self, seq: Sequence, num_tokens: int, rows: tuple[int, ...], *, trail: bool = False) -> list[StateCopy]:
        key = seq.keys[num_tokens // self._page_size - 1]
        self._standing[seq.id].latest = num_tokens
        if key in self._kept:
            self._kept.use(key)
            return []
        slot = self._kept.keep(key, rows, self._is_there, trail=trail)
        return [StateCopy(self._seats.of(seq.id), slot, max(rows) + 1)]
