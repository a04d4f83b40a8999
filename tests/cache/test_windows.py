"""Layers that see the last tokens only keep few pages, and a text begins with what another has read where both do."""

from __future__ import annotations

import pytest

from tpspec.cache.pages import Borrowed, BrokenPages, OutOfPages, PagePool
from tpspec.cache.windows import WindowedPool

PAGE, WINDOW = 4, 6


def pool(num_recent: int = 8, num_pages: int = 32) -> WindowedPool:
    return WindowedPool(num_pages, PAGE, WINDOW, num_recent)


def read(subject: WindowedPool, seq: int, start: int, stop: int) -> None:
    """As a round does it."""
    subject.pass_by(seq, start)
    subject.grow(seq, stop)
    subject.grow_recent(seq, stop)


def keys(count: int, salt: str = "") -> list[bytes]:
    return [f"{salt}{index}".encode() for index in range(count)]


def kept(subject: WindowedPool, seq: int, count: int, salt: str = "", chunk: int = PAGE) -> None:
    """A text of so many pages has been read, chunk by chunk, and everything it filled is known by its keys."""
    for stop in range(chunk, count * PAGE + 1, chunk):
        read(subject, seq, stop - chunk, stop)
        for index in range((stop - chunk) // PAGE, stop // PAGE):
            subject.keep(seq, index, keys(count, salt)[index])


def test_what_no_row_sees_any_more_gives_its_place_up() -> None:
    """Stands against a cache that keeps every page of every layer: five times what Gemma 3 needs."""
    subject = pool()
    for start in range(0, 100, 2):
        read(subject, 1, start, start + 2)
        first = max(0, start - WINDOW + 1)
        runs = subject.recent_runs(1, start, start + 2)
        assert sum(count for _, count in runs) == start + 2 - first
        assert subject.recent.num_used <= -(-(WINDOW + 2) // PAGE) + 1
    assert subject.num_used == 25
    subject.release(1)
    assert subject.num_used == subject.recent.num_used == 0


def test_rows_keep_their_slots_while_a_window_moves() -> None:
    """Stands against a position that is looked for where it would be had nothing been dropped."""
    subject = pool()
    read(subject, 1, 0, 10)
    before = dict(zip(range(10), subject.recent_slots(1, 0, 10), strict=True))
    read(subject, 1, 10, 14)
    seen = range(10 - WINDOW + 1, 10)
    assert subject.recent_slots(1, seen.start, seen.stop) == [before[position] for position in seen]
    with pytest.raises(ValueError, match="dropped its first 4 slots, positions from 3 were asked for"):
        subject.recent_slots(1, 3, 10)


@pytest.mark.parametrize("made_room", [False, True])
def test_a_window_that_moves_lies_in_two_pieces_at_most(made_room: bool) -> None:
    """Against pages that a window left being kept free as if for one who will be back, in the first text of all and
    behind one that made room: every new page then went elsewhere."""
    subject = WindowedPool(128, PAGE, 32, 24)
    if made_room:
        subject.release(0, returns=True)
    for index, key in enumerate(keys(100)):
        start, stop = index * PAGE, (index + 1) * PAGE
        read(subject, 1, start, stop)
        subject.keep(1, index, key)
        assert len(subject.recent_runs(1, start, stop)) <= 2


def test_a_text_begins_with_what_both_kinds_of_layers_still_have() -> None:
    """Stands against a prefix whose last tokens' keys are gone where a window looks for them."""
    subject = pool(num_recent=3)
    kept(subject, 1, 10)
    subject.release(1)
    assert subject.reach(keys(10)) == 10
    subject.adopt(2, keys(10))
    assert subject.recent_slots(2, 40 - WINDOW + 1, 40)
    subject.release(2)
    assert subject.reach(keys(4)) == 0  # pages 2 and 3 have left the window, and given their place up
    assert subject.num_used == 0


def test_of_a_longer_text_that_page_is_taken_whose_window_is_there() -> None:
    """Stands against taking all or nothing, where the window before some page in the middle is still kept."""
    subject = pool(num_recent=13)
    kept(subject, 1, 10)
    subject.release(1)
    kept(subject, 2, 6, "another")  # at last over what was unused the longest
    assert [subject.recent.keeps(key) for key in keys(10)] == [False] + [True] * 9
    assert subject.reach([*keys(7), b"nobody's"]) == 7


def test_both_kinds_of_layers_forget_what_is_spoiled() -> None:
    """Stands against a window full of NaN that is handed out once another has read the same text."""
    subject = pool()
    kept(subject, 1, 3)
    subject.spoil(keys(3))
    assert subject.reach(keys(3)) == 0
    kept(subject, 2, 3)
    assert subject.reach(keys(3)) == 3
    subject.adopt(3, keys(3))
    assert subject.recent_slots(3, 12 - WINDOW + 1, 12) == subject.recent_slots(2, 12 - WINDOW + 1, 12)
    subject.check_integrity()


def test_what_has_left_the_window_is_spoiled_too() -> None:
    """Stands against NaN that a window finds: the first of a key stays it, so that who reads the text anew and rightly
    leaves the next one what was wrong."""
    subject = pool(num_recent=16)
    kept(subject, 1, 5)
    assert subject.recent.num_used < 5
    subject.spoil(keys(5))
    assert not any(subject.recent.keeps(key) for key in keys(5))
    subject.check_integrity()


def test_integrity_names_who_owns_a_window_alone() -> None:
    """Against a window's pages that are lost to the others, of which there are as many as can be needed and no more."""
    subject = pool()
    read(subject, 1, 0, 5)
    subject.check_integrity()
    PagePool.release(subject, 1)
    with pytest.raises(BrokenPages, match=r"sequences \[1\] own pages of layers with a window, and no others"):
        subject.check_integrity()


def test_drafts_in_the_targets_cache_take_places_in_both() -> None:
    """Stands against a draft's keys that layers with a window write over those of another text."""
    subject = pool(num_recent=4)
    read(subject, 1, 0, 5)
    read(subject, 2, 0, 3)
    borrowed = Borrowed(subject)
    borrowed.grow(1, 12)
    assert not set(borrowed.recent_slots(1, 0, 12)) & set(subject.recent_slots(2, 0, 3))
    with pytest.raises(OutOfPages):
        borrowed.grow(1, 20)
    subject.shrink(1, 5)
    assert subject.recent.num_used == 3
