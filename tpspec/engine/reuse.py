"""Which pages of other texts a new one may begin with: a page is known by a chain of hashes over all before it.

The chain begins with the request's salt, so that texts of different salts share nothing, and nobody learns from how
fast an answer comes what another was told. Integers and bytes; the same on every rank that hears the same news.
"""

from __future__ import annotations

import zlib
from array import array
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpspec.cache.pages import PagePool
    from tpspec.engine.sequence import Sequence


class Reuse:
    """is_on: whether anything is taken or kept from now on. Every call is for a sequence that waits or runs.

    num_asked, num_found: tokens of texts that came, and those of them that need not be read. digest: of all keys so
    far, in their order.
    """

    def __init__(self, pool: PagePool, *, is_on: bool) -> None:
        self._pool, self.is_on = pool, is_on
        self.num_asked = self.num_found = self.digest = 0

    def take(self, seq: Sequence) -> None:
        """Pages that hold the beginning of its text, for a sequence that owns none."""
        if self.is_on:
            seq.num_kept = self._pool.adopt(seq.id, self._keys(seq, seq.num_passable))
            seq.num_cached = seq.num_kept * self._pool.page_size

    def count(self, seq: Sequence) -> None:
        """It has been admitted with what it took."""
        if self.is_on and seq.num_passable:
            self.num_asked += seq.num_tokens
            self.num_found += seq.num_cached
            seq.num_found = seq.num_cached if seq.num_found is None else seq.num_found

    def is_near(self, seq: Sequence, elders: Iterable[Sequence]) -> bool:
        """Whether an elder is about to read the page that `seq` would have to read next."""
        size, index = self._pool.page_size, seq.num_kept
        wanted = self._keys(seq, seq.num_passable)[index : index + 1] if self.is_on else []
        unread = (elder for elder in elders if elder.num_cached < (index + 1) * size)
        return bool(wanted) and any(elder.keys[index : index + 1] == wanted for elder in unread)

    def keep(self, seq: Sequence) -> None:
        """What of it is cached will not be written again, as far as it fills pages."""
        if not self.is_on:
            return
        keys = self._keys(seq, seq.num_cached)
        for index in range(seq.num_kept, len(keys)):
            self._pool.keep(seq.id, index, keys[index])
            self.digest = zlib.crc32(keys[index], self.digest)
        seq.num_kept = len(keys)

    def _keys(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """Of the pages that the first num_tokens of its text fill; made once."""
        size, keys = self._pool.page_size, seq.keys
        for first in range(len(keys) * size, num_tokens // size * size, size):
            before = keys[-1] if keys else sha256(seq.request.salt.encode()).digest()
            keys.append(sha256(before + array("q", seq.tokens[first : first + size]).tobytes()).digest())
        return keys[: num_tokens // size]
