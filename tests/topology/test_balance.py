"""Weights that the cards decide."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tpspec.errors import OutOfMemory
from tpspec.topology.balance import LEAST, Capacity, balanced

ROOMY = 1e12
CARDS = st.lists(
    st.builds(Capacity, st.floats(1e9, 1e11), st.floats(1e11, 2e12), st.floats(0, 1e10)), min_size=1, max_size=8
)


def test_equal_cards_share_alike() -> None:
    assert balanced(30.0, [Capacity(ROOMY, 5.0)] * 3) == pytest.approx((10, 10, 10))


def test_a_card_twice_as_fast_holds_twice_as_much() -> None:
    """Equal parts would make the fast card wait for the slow one in every layer."""
    assert balanced(30.0, [Capacity(ROOMY, 2.0), Capacity(ROOMY, 1.0)]) == pytest.approx((20, 10))


def test_a_small_card_holds_what_it_has_room_for() -> None:
    assert balanced(30.0, [Capacity(4.0, 1.0), Capacity(ROOMY, 1.0)]) == pytest.approx((4, 26))


def test_what_a_drafter_reads_beside_a_shard_is_taken_off_that_shard() -> None:
    """Both ranks are then ready at the same time."""
    gap, other = balanced(30.0, [Capacity(ROOMY, 1.0, aside=6.0), Capacity(ROOMY, 1.0)])
    assert (gap, other) == pytest.approx((12, 18))


def test_beside_a_mixture_a_drafter_takes_off_as_many_bytes_as_are_read_of_them() -> None:
    """Against a shard that is lighter by the drafter's bytes, of which a round reads a quarter, and still is last."""
    cards = [Capacity(ROOMY, 1.0, aside=6.0), Capacity(ROOMY, 1.0), Capacity(ROOMY, 2.0)]
    held = balanced(160.0, cards, 0.25)
    assert held == pytest.approx((22, 46, 92))
    assert balanced(160.0, cards) == pytest.approx((35.5, 41.5, 83))


def test_a_drafter_larger_than_the_shard_leaves_its_rank_a_little() -> None:
    gap, other = balanced(30.0, [Capacity(ROOMY, 1.0, aside=600.0), Capacity(ROOMY, 1.0)])
    assert (gap, other) == pytest.approx((LEAST * 15, 30 - LEAST * 15))


def test_too_little_room_says_how_much_is_missing() -> None:
    with pytest.raises(OutOfMemory, match=r"are 2.00 GiB, and the ranks have room for 1.00"):
        balanced(2.0 * 2**30, [Capacity(2.0**29, 1.0)] * 2)


@given(CARDS, st.floats(0.01, 1.0))
def test_the_parts_are_the_whole_and_nobody_holds_more_than_it_has_room_for(cards: list[Capacity], full: float) -> None:
    total = full * sum(card.room for card in cards)
    parts = balanced(total, cards)
    assert sum(parts) == pytest.approx(total, rel=1e-6)
    assert all(0 < part <= card.room for part, card in zip(parts, cards, strict=True))
