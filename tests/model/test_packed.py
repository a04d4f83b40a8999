"""Numbers of few bits, read out of words that were written bit by bit."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from tests.model import published
from tpspec.model.packed import Packing


@settings(deadline=None)
@given(bits=st.integers(2, 8), is_spaced=st.booleans(), ends=st.tuples(st.integers(0, 200), st.integers(1, 200)))
def test_any_numbers_are_read_out_of_the_words_that_hold_them(
    bits: int, is_spaced: bool, ends: tuple[int, int]
) -> None:
    """Stands against a number that is lost where it lies in two words, words beyond the last, and bits of a neighbour:
    every other number has all of them."""
    packing = Packing.spaced(bits) if is_spaced else Packing.stream(bits)
    pack = published.packed if is_spaced else published.streamed
    count, wanted = sum(ends), range(ends[0], sum(ends))
    values = np.random.default_rng(0).integers(0, 2**bits, (3, count))
    values[:, ::2] = 2**bits - 1
    for told in (values, np.pad(values, ((0, 0), (0, 50)))):
        words = torch.from_numpy(pack(told, bits))
        assert words.shape[1] == packing.num_words(told.shape[1])
        which = packing.words_of(wanted)
        read = packing.numbers(words[:, which.start : which.stop], wanted)
        assert read.dtype == torch.uint8
        assert np.array_equal(read.numpy(), values[:, wanted.start :])
