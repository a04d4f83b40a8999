"""Pages that drafts take behind a text: from what is free, for as long as nobody else wants them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tpspec.cache.pages import Borrowed, OutOfPages, PagePool
from tpspec.engine.scheduler import Scheduler
from tpspec.request import Request
from tpspec.tokens import Verdict

PAGE = 4


def a_round(scheduler: Scheduler) -> None:
    plan = scheduler.plan({})
    scheduler.check_integrity()
    scheduler.commit(plan, [Verdict(case.seq, (), (7,)) for case in plan.cases])
    scheduler.check_integrity()


@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    wants=st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=12),
)
def test_nobody_makes_room_for_a_draft(prompts: list[int], wants: list[list[int]]) -> None:
    """Against a draft that holds the page a root needs: who would have to go has done nothing."""
    pools = [PagePool(12, PAGE) for _ in range(2)]
    plain, drafted = (Scheduler(pool, max_rows=16, max_running=4, fixed_rows=None) for pool in pools)
    borrowed = Borrowed(pools[1])
    for seq, size in enumerate(prompts):
        for scheduler in (plain, drafted):
            scheduler.submit(Request(seq, tuple(range(size)), 20))
    for sizes in wants:
        for scheduler in (plain, drafted):
            a_round(scheduler)
        for seq, more in zip(drafted.ready(), sizes, strict=False):
            try:
                borrowed.grow(seq.id, seq.num_tokens + more)
            except OutOfPages:
                continue
            borrowed.shrink(seq.id, 0)
            borrowed.release(seq.id)
            assert len(borrowed.slots(seq.id, 0, seq.num_tokens + more)) == seq.num_tokens + more
    assert drafted.num_preemptions == plain.num_preemptions
    assert [seq.id for seq in drafted.ready()] == [seq.id for seq in plain.ready()]


def test_nothing_is_read_of_a_sequence_that_owns_nothing() -> None:
    """Against a draft that reads a text whose keys and values went with its pages."""
    pool = PagePool(4, PAGE)
    with pytest.raises(OutOfPages):
        Borrowed(pool).grow(0, 1)
    assert pool.num_free == 4
