"""Whole numbers of few bits, packed in words of 32: which words hold some of them, and what those hold.

The lowest bits come first, of a number as of a word. Must not know what is counted, nor what a tensor is called.

Shapes: R rows, W words of a row, N numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

WORD = 4  # bytes


@dataclass(frozen=True, slots=True)
class Packing:
    """Every `each` numbers of `bits` bits lie side by side in `size` bytes, from the first bit on."""

    bits: int
    each: int
    size: int

    @classmethod
    def stream(cls, bits: int) -> Packing:
        """Without a gap: a number may begin in one word and end in the next."""
        shared = gcd(bits, 8)
        return cls(bits, 8 // shared, bits // shared)

    @classmethod
    def spaced(cls, bits: int) -> Packing:
        """As many to a word as fit whole; bits that are left are nobody's."""
        return cls(bits, 8 * WORD // bits, WORD)

    def num_words(self, count: int) -> int:
        """Of the first `count` numbers."""
        whole, rest = divmod(count, self.each)
        return -(-(8 * self.size * whole + self.bits * rest) // (8 * WORD))

    def words_of(self, wanted: range) -> range:
        """Those that hold these numbers, from the last one before them with which a word and a number begin."""
        return range(wanted.start // self._apart * lcm(self.size, WORD) // WORD, self.num_words(wanted.stop))

    def numbers(self, words_RW: Tensor, wanted: range) -> Tensor:
        """[R, N] of uint8, from words_of(wanted) in int32."""
        skipped = wanted.start % self._apart
        return self.every(words_RW)[:, skipped : skipped + len(wanted)]

    def every(self, words_RW: Tensor) -> Tensor:
        """[R, N] of uint8: all that the words hold, of which the first begins one."""
        bytes_RB = words_RW.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        if self.bits == 8:
            return bytes_RB
        if missing := -bytes_RB.shape[1] % self.size:
            bytes_RB = F.pad(bytes_RB, (0, missing))
        parts = bytes_RB.view(len(bytes_RB), -1, self.size).unbind(-1)
        firsts = range(0, self.each * self.bits, self.bits)
        return torch.stack([self._at(first, parts) for first in firsts], -1).flatten(1)

    def _at(self, first: int, parts: tuple[Tensor, ...]) -> Tensor:
        """The number whose lowest bit is this one; it lies in one byte, or in two."""
        at, below = divmod(first, 8)
        number, above = parts[at] >> below if below else parts[at], below + self.bits - 8
        if above > 0:
            number = number | parts[at + 1] << (8 - below)
        return number & (2**self.bits - 1) if above else number

    @property
    def _apart(self) -> int:
        """Numbers from one that begins a word to the next."""
        return lcm(self.size, WORD) // self.size * self.each
