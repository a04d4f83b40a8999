"""Whose state is in which slot of a `StateStore`, and which states of beginnings are kept. Integers and keys only.

Slots that are kept are others than seats: the same calls give the same slots on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    """States of beginnings, under the keys of their last pages (engine/reuse.py). The longest unused makes room.

    num_left: rows that there is room for beside each.
    """

    def __init__(self, slots: range, num_left: int) -> None:
        self._free = list(reversed(slots))
        self._kept: dict[bytes, Kept] = {}  # the longest unused first
        self.num_slots, self.num_left = len(slots), num_left

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def use(self, key: bytes) -> Kept:
        """What is kept under it, which is used now."""
        kept = self._kept[key] = self._kept.pop(key)
        return kept

    def keep(self, key: bytes, rows: tuple[int, ...]) -> int:
        """The slot for a state that nothing is kept for yet; there has to be one."""
        slot = self._free.pop() if self._free else self._kept.pop(next(iter(self._kept))).slot
        self._kept[key] = Kept(slot, rows)
        return slot

    def drop(self, keys: Iterable[bytes]) -> None:
        """Keys under which nothing is kept are ignored."""
        self._free += [self._kept.pop(key).slot for key in keys if key in self._kept]
