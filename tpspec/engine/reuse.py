"""Which pages of other texts a new one may begin with: a page is known by a chain of hashes over all before it.

Where a model keeps states, a text begins with as many as there is a state behind (text_states.py).

The chain begins with the request's salt, so that texts of different salts share nothing, and nobody learns from how
fast an answer comes what another was told. Integers and bytes; the same on every rank that hears the same news.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from hashlib import sha256
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpspec.cache.pages import PagePool
    from tpspec.engine.sequence import Sequence
    from tpspec.engine.text_states import Stateless


class Reuse:
    """is_on: whether anything is taken or kept from now on. Every call is for a sequence that waits or runs.

    num_asked, num_found: tokens of texts that came, and those of them that need not be read. digest: of all keys so
    far, in their order.
    """

    def __init__(self, pool: PagePool, states: Stateless, *, is_on: bool) -> None:
        self._pool, self._states, self.is_on = pool, states, is_on
        self.num_asked = self.num_found = self.digest = 0

    def take(self, seq: Sequence) -> int | None:
        """Pages that hold the beginning of its text, for a sequence that owns none; how many of its are there. None
        where nobody begins with any."""
        if not self.is_on:
            return None
        keys = self._keys(seq, seq.num_passable)
        known = list(takewhile(self._pool.keeps, keys))
        seq.num_kept = self._reach(known)
        self._pool.adopt(seq.id, known[: seq.num_kept])
        seq.num_cached = seq.num_kept * self._pool.page_size
        return len(known)

    def count(self, seq: Sequence) -> None:
        """It has been admitted with what it took."""
        if self.is_on and seq.num_passable:
            self.num_asked += seq.num_tokens
            self.num_found += seq.num_cached
            seq.num_found = seq.num_cached if seq.num_found is None else seq.num_found

    def is_near(self, seq: Sequence, elders: Iterable[Sequence]) -> bool:
        """Whether an elder is about to read what `seq` would have to read next; he will know of it."""
        keys = self._keys(seq, seq.num_passable) if self.is_on else []
        for elder in elders:
            awaited = self._states.awaited(seq.num_kept, _num_alike(keys, elder.keys)) * self._pool.page_size
            if elder.num_cached < awaited:
                self._states.stop_at(elder, awaited)
                return True
        return False

    def keep(self, seq: Sequence) -> None:
        """What of it is cached will not be written again, as far as it fills pages."""
        if not self.is_on or seq.num_cached // self._pool.page_size == seq.num_kept:
            return
        keys = self._keys(seq, seq.num_cached)
        for index in range(seq.num_kept, len(keys)):
            self._pool.keep(seq.id, index, keys[index])
            self.digest = zlib.crc32(keys[index], self.digest)
        seq.num_kept = len(keys)

    def spoil(self, seq: Sequence) -> None:
        """What it has written and read is wrong: nobody may begin with it."""
        self._pool.spoil(seq.keys)
        self._states.spoil(seq.keys)

    def _reach(self, known: list[bytes]) -> int:
        """With how many of these pages a text may begin: what the next token sees is there, and a state behind them."""
        count = len(known)
        while (fewer := self._states.reach(known[: self._pool.reach(known[:count])])) < count:
            count = fewer
        return count

    def _keys(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """Of the pages that the first num_tokens of its text fill; made once."""
        size, keys = self._pool.page_size, seq.keys
        for first in range(len(keys) * size, num_tokens // size * size, size):
            before = keys[-1] if keys else sha256(seq.request.salt.encode()).digest()
            keys.append(sha256(before + array("q", seq.tokens[first : first + size]).tobytes()).digest())
        return keys[: num_tokens // size]


def _num_alike(one: list[bytes], other: list[bytes]) -> int:
    """First keys that are the same: in chains of hashes none is after one that differs."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda index: one[index] != other[index])
