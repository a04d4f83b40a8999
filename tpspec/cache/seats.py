"""Whose state is in which slot of a `StateStore`, and which states of beginnings are kept. Integers and keys only.

Slots that are kept are others than seats: the same calls give the same slots on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Seats:
    """Which text has which of a number of slots: the lowest that is free, when it begins. num_left: see StateStore."""

    def __init__(self, num_seats: int, num_left: int) -> None:
        self.num_seats, self.num_left = num_seats, num_left
        self._seats: dict[int, int] = {}

    def __contains__(self, seq: int) -> bool:
        return seq in self._seats

    @property
    def is_full(self) -> bool:
        return len(self._seats) == self.num_seats

    def take(self, seq: int) -> None:
        """Raises ValueError where none is free, or `seq` has one."""
        if self.is_full or seq in self:
            raise ValueError(f"sequence {seq} finds no state of {self.num_seats}, or has one")
        taken = set(self._seats.values())
        self._seats[seq] = next(seat for seat in range(self.num_seats) if seat not in taken)

    def release(self, seq: int) -> None:
        """Unknown sequences are ignored."""
        self._seats.pop(seq, None)

    def of(self, seq: int) -> int:
        return self._seats[seq]


class Kept(NamedTuple):
    """A state, and those of the rows beside it that its beginning goes on with, in order."""

    slot: int
    rows: tuple[int, ...]


class KeptStates:
    """States of beginnings, under the keys of their last pages (engine/reuse.py). Some are trails, which only the text
    that left them is known to have a use for; neither sort takes more than half of the slots where the other wants any.

    num_left: rows that there is room for beside each.
    """

    def __init__(self, slots: range, num_left: int) -> None:
        self._free = list(reversed(slots))
        self._kept: dict[bytes, Kept] = {}  # the longest unused first
        self._trails: set[bytes] = set()
        self.num_slots, self.num_left = len(slots), num_left

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def use(self, key: bytes) -> Kept:
        """What is kept under it, which is used now, and no trail any more."""
        self._trails.discard(key)
        kept = self._kept[key] = self._kept.pop(key)
        return kept

    def keep(self, key: bytes, rows: tuple[int, ...], is_there: Callable[[bytes], bool], *, trail: bool = False) -> int:
        """The slot for a state that nothing is kept for yet; there has to be one. is_there: whether a page lies under a
        key still, without which a state is of no use."""
        if not self._free:
            self.drop([self._most_useless(is_there, trail=trail)])
        slot = self._free.pop()
        self._kept[key] = Kept(slot, rows)
        if trail:
            self._trails.add(key)
        return slot

    def drop(self, keys: Iterable[bytes]) -> None:
        """Keys under which nothing is kept are ignored."""
        for key in keys:
            if key in self._kept:
                self._free.append(self._kept.pop(key).slot)
                self._trails.discard(key)

    def drop_trail(self, key: bytes) -> None:
        """Unless somebody has used it."""
        if key in self._trails:
            self.drop([key])

    def _most_useless(self, is_there: Callable[[bytes], bool], *, trail: bool) -> bytes:
        """Of those whose pages are gone, or else of the sort that has more, or is wanted now, the longest unused."""
        num_trails, half = len(self._trails), self.num_slots / 2
        of_trails = num_trails > half or (num_trails == half and trail)
        oldest = next(key for key in self._kept if (key in self._trails) == of_trails)
        return next((key for key in self._kept if not is_there(key)), oldest)
