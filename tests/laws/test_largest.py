"""The largest of long rows are those that torch finds."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.emulated_card import emulated_card
from tpspec.verify.largest import LONG, NUM_HEAPED, NUM_PARTS, largest, some_largest

COLUMNS = st.integers(LONG - 2, LONG + 3 * NUM_PARTS) | st.sampled_from([2 * LONG, 49152, 50257])


def drawn(num_rows: int, num_columns: int, seed: int, values: int) -> torch.Tensor:
    """values: how many different ones; 0: as many as may be."""
    source = torch.Generator().manual_seed(seed)
    if values:
        return torch.randint(0, values, (num_rows, num_columns), generator=source).float()
    return torch.randn(num_rows, num_columns, generator=source)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), COLUMNS, st.integers(0, 99), st.sampled_from([0, 1, 3, 5000]))
def test_the_largest_is_the_first_of_several(num_rows: int, num_columns: int, seed: int, values: int) -> None:
    """Shards merge by the lowest id: stands against another one of two that are alike."""
    x_TV = drawn(num_rows, num_columns, seed, values)
    value_T, column_T = largest(x_TV)
    assert torch.equal(value_T, x_TV.amax(1))
    firsts = [int((row == top).nonzero()[0]) for row, top in zip(x_TV, value_T, strict=True)]
    assert column_T.tolist() == firsts


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), COLUMNS, st.integers(1, 80), st.integers(0, 99), st.sampled_from([0, 3, 5000]))
def test_some_are_the_largest_there_are(num_rows: int, num_columns: int, num: int, seed: int, values: int) -> None:
    """Each once. Stands against a column of the end that no heap has, and one that two have."""
    x_TV = drawn(num_rows, num_columns, seed, values)
    values_TC, columns_TC = some_largest(x_TV, num)
    assert torch.equal(values_TC, x_TV.topk(num).values)
    assert torch.equal(x_TV.gather(1, columns_TC), values_TC)
    assert all(len(set(row)) == num for row in columns_TC.tolist())


@pytest.mark.parametrize("place", [0, LONG // 2, 2 * LONG, 2 * LONG + NUM_HEAPED - 2])
def test_a_number_that_is_none_is_found(place: int) -> None:
    """Stands against a row that passes for one that can be drawn from."""
    x_TV = torch.zeros(2, 2 * LONG + NUM_HEAPED - 1)
    x_TV[1, place] = torch.nan
    value_T, column_T = largest(x_TV)
    assert value_T.isnan().tolist() == [False, True]
    assert column_T[1] == place
    assert some_largest(x_TV, 3)[0][1].isnan().tolist() == [True, False, False]


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card")
def test_a_card_finds_the_same() -> None:
    """Stands against numbers of the host beside those of a card."""
    pytest.importorskip("triton")
    x_TV = drawn(2, LONG + 9, 0, 0)
    with emulated_card():
        found = [*largest(x_TV.to("cuda")), *some_largest(x_TV.to("cuda"), 5)]
        there = [x.cpu() for x in found]
    due = [*largest(x_TV), *some_largest(x_TV, 5)]
    assert [x.tolist() for x in there] == [x.tolist() for x in due]


def test_rows_of_nothing_have_a_column_all_the_same() -> None:
    """Padding alone: -inf everywhere."""
    value_T, column_T = largest(torch.full((2, LONG), -torch.inf))
    assert value_T.isneginf().all()
    assert column_T.tolist() == [0, 0]
