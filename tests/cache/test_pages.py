"""Pages are never lost, shared only when they are kept, and lie side by side whenever they can."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tpspec.cache.pages import BrokenPages, OutOfPages, PagePool
from tpspec.cache.places import window_max


def test_a_lone_sequence_lies_in_one_run_however_it_grows() -> None:
    """Against allocators that hand out the most recently freed page: attention would copy K and V every round."""
    pool = PagePool(8, 4)
    for num_tokens in range(1, 33):
        pool.grow(7, num_tokens)
        assert pool.runs(7, num_tokens) == ((0, num_tokens),)
    assert pool.num_free == 0


def test_two_sequences_grow_page_by_page_without_cutting_each_other() -> None:
    """Against first fit: the second would start right behind the first, and both would be in pieces from then on."""
    pool = PagePool(16, 4)
    for num_tokens in range(4, 33, 4):
        for seq in (1, 2):
            pool.grow(seq, num_tokens)
    assert [len(pool.runs(seq, 32)) for seq in (1, 2)] == [1, 1]


def test_a_long_prompt_is_not_cut_to_leave_room_for_its_neighbour() -> None:
    """Against always starting in the middle: ten pages would not fit in the upper six of twelve."""
    pool = PagePool(13, 1)
    pool.grow(1, 1)
    pool.grow(2, 10)
    assert pool.runs(2, 10) == ((3, 10),)


def test_a_new_sequence_prefers_the_start_of_a_hole_that_nobody_grows_into() -> None:
    pool = PagePool(12, 1)
    for seq in (1, 2):
        pool.grow(seq, 4)
    assert [pool.runs(seq, 4) for seq in (1, 2)] == [((0, 4),), ((8, 4),)]
    pool.grow(1, 5)
    pool.release(1)
    pool.grow(3, 1)
    assert pool.runs(3, 1) == ((0, 1),)


def test_growing_without_enough_pages_changes_nothing() -> None:
    """Against a partial grow: pages taken before the error would never come back."""
    pool = PagePool(4, 2)
    pool.grow(1, 3)
    assert not pool.can_grow(2, 5)
    with pytest.raises(OutOfPages, match="3 more pages for 5 tokens, 2 free"):
        pool.grow(2, 5)
    assert (pool.num_free, pool.num_used, pool.owners) == (2, 2, [1])
    pool.check_integrity()


def test_growing_to_less_is_no_shrinking() -> None:
    pool = PagePool(4, 2)
    pool.grow(1, 8)
    pool.grow(1, 1)
    assert pool.num_slots(1) == 8


def test_shrinking_frees_whole_pages_only() -> None:
    pool = PagePool(4, 2)
    pool.grow(1, 8)
    pool.shrink(1, 3)
    assert (pool.num_slots(1), pool.num_free, pool.num_reachable(1)) == (4, 2, 8)
    pool.shrink(1, 0)
    assert (pool.owners, pool.num_free) == ([], 4)


def test_shrinking_goes_on_into_the_run_before() -> None:
    """Against stopping at the end of the last piece: its predecessor's pages would stay taken."""
    pool = PagePool(4, 1)
    pool.grow(1, 1)
    pool.grow(2, 1)
    pool.grow(1, 3)
    assert pool.runs(1, 3) == ((0, 2), (3, 1))
    pool.shrink(1, 1)
    assert (pool.num_slots(1), pool.num_free) == (1, 2)


def test_unknown_sequences_are_ignored() -> None:
    pool = PagePool(2, 2)
    pool.release(5)
    pool.shrink(5, 0)
    pool.grow(5, 0)
    assert pool.owners == []
    assert pool.runs(5, 0) == ()


def test_slots_follow_the_runs_across_a_gap() -> None:
    """Against positions computed from the first slot alone: the second piece would be read from a stranger's page."""
    pool = PagePool(4, 2)
    pool.grow(1, 2)
    pool.grow(2, 2)
    pool.grow(1, 6)  # pages 0 and 1, then what lies behind sequence 2
    assert pool.slots(1, 1, 6) == [slot for first, count in pool.runs(1, 6) for slot in range(first, first + count)][1:]
    assert pool.slots(2, 0, 2) == [4, 5]


def test_asking_for_slots_that_are_not_owned_is_an_error() -> None:
    """Against silently short runs: attention would read fewer keys than there are tokens."""
    pool = PagePool(4, 2)
    pool.grow(1, 2)
    with pytest.raises(ValueError, match="owns 2 slots"):
        pool.runs(1, 3)


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 pages"):
        PagePool(0, 4)


def test_integrity_names_the_page_that_is_lost_or_shared() -> None:
    pool = PagePool(4, 2)
    pool.grow(1, 4)
    pool._free[1] = 1
    with pytest.raises(BrokenPages, match=r"page 1: owned by \[1\], free"):
        pool.check_integrity()
    pool._free[1:3] = b"\x00\x00"
    with pytest.raises(BrokenPages, match="page 2: owned by nobody"):
        pool.check_integrity()
    pool._free[2] = 1
    pool._num_free = 3
    with pytest.raises(BrokenPages, match="2 pages are free, 3 were counted"):
        pool.check_integrity()


CALLS = st.lists(st.tuples(st.sampled_from(["grow", "shrink", "release"]), st.integers(0, 4), st.integers(0, 30)))


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 12), st.integers(1, 4), CALLS)
def test_no_call_loses_shares_or_relocates_a_slot(
    num_pages: int, page_size: int, calls: list[tuple[str, int, int]]
) -> None:
    """Against pages freed twice, owned twice or swapped under a sequence whose keys are in them."""
    pool = PagePool(num_pages, page_size)
    for verb, seq, num_tokens in calls:
        before = pool.slots(seq, 0, pool.num_slots(seq))
        could = pool.can_grow(seq, num_tokens)
        try:
            pool.release(seq) if verb == "release" else getattr(pool, verb)(seq, num_tokens)
        except OutOfPages:
            assert verb == "grow"
            assert not could
        after = pool.slots(seq, 0, pool.num_slots(seq))
        needed = 0 if verb == "release" else -(-num_tokens // page_size) * page_size
        grown = max(len(before), needed) if could else len(before)
        assert len(after) == (grown if verb == "grow" else min(len(before), needed))
        kept = min(len(before), len(after))
        assert before[:kept] == after[:kept]
        pool.check_integrity()
        owned = [slot for owner in pool.owners for slot in pool.slots(owner, 0, pool.num_slots(owner))]
        assert len(owned) == len(set(owned)) == pool.num_used * page_size
        runs = [pool.runs(owner, pool.num_slots(owner)) for owner in pool.owners]
        assert all(a + n != b for pieces in runs for (a, n), (b, _) in pairwise(pieces))


SHARING = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "keep", "adopt", "shrink", "release"]), st.integers(0, 4), st.integers(0, 9)
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 12), st.integers(1, 3), SHARING)
def test_who_knows_a_key_gets_what_was_kept_under_it_or_nothing(
    num_pages: int, page_size: int, calls: list[tuple[str, int, int]]
) -> None:
    """Against a page that is taken from under its owner, counted once for two, or found under a key it has lost."""
    pool = PagePool(num_pages, page_size)
    written: dict[int, int] = {}  # page -> the call that first wrote it for its owner
    kept: dict[bytes, int] = {}

    def pages(seq: int) -> list[int]:
        return [slot // page_size for slot in pool.slots(seq, 0, pool.num_slots(seq))[::page_size]]

    for number, (verb, seq, size) in enumerate(calls):
        before = {owner: pages(owner) for owner in range(5)}
        key = bytes([size])
        if verb == "grow" and pool.can_grow(seq, size * page_size):
            pool.grow(seq, size * page_size)
            fresh = pages(seq)[len(before[seq]) :]
            assert not set(fresh) & {page for owned in before.values() for page in owned}
            written |= dict.fromkeys(fresh, number)
        elif verb == "keep" and size < len(before[seq]):
            if key not in pool._kept and before[seq][size] not in pool._keys:
                kept[key] = written[before[seq][size]]
            pool.keep(seq, size, key)
        elif verb == "adopt" and not before[seq]:
            count = pool.reach([key])
            pool.adopt(seq, [key][:count])
            assert len(pages(seq)) == count
            assert all(written[page] == kept[key] for page in pages(seq))
        elif verb == "shrink":
            pool.shrink(seq, size * page_size)
            assert pages(seq) == before[seq][:size]
        elif verb == "release":
            pool.release(seq, returns=bool(size % 2))
            assert not pages(seq)
        assert all(pages(owner) == before[owner] for owner in range(5) if owner != seq)
        pool.check_integrity()
        assert pool.num_used == len({page for owner in range(5) for page in pages(owner)})


def read(pool: PagePool, seq: int, num_pages: int, *, ends: bool = True) -> None:
    """A text of its own, whose pages are kept and which may end then."""
    pool.grow(seq, num_pages)
    for index in range(num_pages):
        pool.keep(seq, index, bytes([seq, index]))
    if ends:
        pool.release(seq)


def known(pool: PagePool, seq: int, num_pages: int) -> list[bool]:
    return [pool.keeps(bytes([seq, index])) for index in range(num_pages)]


def test_what_was_unused_the_longest_makes_room_first() -> None:
    """Against a new text that is put where it would be in an empty pool: the same pages would be lost every time."""
    pool = PagePool(16, 1)
    for seq in range(3):
        read(pool, seq, 4)
    pool.adopt(3, [bytes([0, index]) for index in range(4)])
    pool.release(3)
    pool.grow(4, 3)
    assert [all(known(pool, seq, 4)) for seq in range(3)] == [True, False, True]


@pytest.mark.parametrize("num_texts", [2, 3, 4])
def test_texts_that_take_turns_keep_what_they_have_read(num_texts: int) -> None:
    """Against a text that is put right behind another, which is back soon and grows over it: of two clients of an empty
    cache one had to read all of every turn anew."""
    pool, sizes = PagePool(128, 1), dict.fromkeys(range(num_texts), 10)
    for turn in range(4):
        for seq in sizes:
            keys = [bytes([seq, index]) for index in range(sizes[seq])]
            assert pool.reach(keys) == (len(keys) if turn else 0)
            pool.adopt(seq, keys if turn else [])
            sizes[seq] += 4
            read(pool, seq, sizes[seq])
            pool.check_integrity()


def test_a_text_that_has_no_room_behind_it_goes_on_where_nothing_is_kept() -> None:
    """Against what others have read going for a text that grows, while most of the pool holds nothing of use."""
    pool = PagePool(32, 1)
    read(pool, 0, 4, ends=False)
    read(pool, 1, 4)
    first = pool.slots(0, 0, 1)[0]
    while len(pool.runs(0, pool.num_slots(0))) == 1:
        pool.grow(0, pool.num_slots(0) + 1)
    assert pool.num_slots(0) > 4
    assert first == 0
    assert all(known(pool, 1, 4))


def test_a_page_more_costs_microseconds_in_a_large_pool() -> None:
    """Against a scan of the pool per page. A false alarm needs a machine 50 times slower than a laptop."""
    pool = PagePool(100_000, 16)
    began = time.perf_counter()
    for num_tokens in range(16, 16 * 10_000, 16):
        pool.grow(1, num_tokens)
        pool.runs(1, num_tokens)
    assert time.perf_counter() - began < 2


@given(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=40), data=st.data())
def test_the_latest_of_every_window_is_found_in_few_steps(numbers: list[int], data: st.DataObject) -> None:
    """Stands against a cache of a million tokens in which placing one text compared twenty million numbers."""
    width = data.draw(st.integers(1, len(numbers)))
    found = window_max(np.array(numbers), width).tolist()
    assert found == [max(numbers[at : at + width]) for at in range(len(numbers) - width + 1)]
