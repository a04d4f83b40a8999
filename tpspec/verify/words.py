"""Words by key and counter: what noise is made of, the same on every rank and device (splitmix64; Steele, Lea, Flood
2014). Must not know what a word is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt

    Ints: TypeAlias = npt.NDArray[np.int64]

LENGTH = 64  # ids that share words, a block; fixed, for every choice of it is another noise
WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed_int(x: int) -> int:
    """The finaliser, on an unsigned word."""
    x &= WORD
    x = (x ^ (x >> 30)) * FIRST & WORD
    x = (x ^ (x >> 27)) * SECOND & WORD
    return x ^ (x >> 31)


def signed(x: int) -> int:
    """The int64 with the bits of a word."""
    x &= WORD
    return x - (1 << 64) if x >> 63 else x


def shifted(x: Ints, bits: int) -> Ints:
    """Logical shift to the right of int64, which keeps its sign by itself."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Ints) -> Ints:
    """`mixed_int` on int64, whose products wrap."""
    x = (x ^ shifted(x, 30)) * signed(FIRST)
    x = (x ^ shifted(x, 27)) * signed(SECOND)
    return x ^ shifted(x, 31)


def words_of(keys: Ints, counters: Ints) -> Ints:
    return mixed(keys + counters * signed(GOLDEN))
