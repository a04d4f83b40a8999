"""How much of a model each rank should hold: what it reads while the others read theirs, as far as it has room.

Numbers only: knows no device, file or process. The same numbers give the same weights on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST = 0.05  # of an equal part: a rank that holds next to nothing still takes part in every collective
HALVINGS = 80


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a rank can hold. room: bytes for its part of model and cache. bytes_per_s: at which it reads weights.

    aside: bytes that it has to read in a round besides: what it makes of other ranks' heads, and what of the drafter in
    its gaps does not fit into its waits.
    """

    room: float
    bytes_per_s: float
    aside: float = 0.0


def balanced(total: float, capacities: Sequence[Capacity], read: float = 1.0) -> tuple[float, ...]:
    """Bytes of `total` for each rank, so that all are ready at once, as far as there is room. Raises OutOfMemory.

    read: the part of it that a round reads, above 0; less than 1 where experts are held that no row is sent to.
    """
    rooms = sum(capacity.room for capacity in capacities)
    if rooms < total:
        raise OutOfMemory(
            f"target.weights: auto: model and cache are {total / 2**30:.2f} GiB, and the ranks have room for "
            f"{rooms / 2**30:.2f}; use more ranks, a smaller cache.tokens or a smaller model"
        )
    least = LEAST * total / len(capacities)
    low, high = 0.0, max((read * (total + one.room) + one.aside) / one.bytes_per_s for one in capacities)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(_parts(middle, capacities, least, read)) >= total else (middle, high)
    return tuple(_parts(high, capacities, least, read))


def _parts(seconds: float, capacities: Sequence[Capacity], least: float, read: float) -> list[float]:
    """What each rank holds if it reads its part of that in such a time."""
    return [min(one.room, max(least, (seconds * one.bytes_per_s - one.aside) / read)) for one in capacities]
