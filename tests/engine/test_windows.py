"""Layers with a window: no row reads a slot that holds anything but what its text says, and none lacks a place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from tests.engine.test_reuse import SharingEpisode, Text
from tests.engine.test_scheduler import text_states
from tpspec.cache.windows import WindowedPool
from tpspec.engine.plan import Commit, Plan
from tpspec.engine.scheduler import Scheduler
from tpspec.engine.text_states import Stateless
from tpspec.published.shape import shape_of
from tpspec.request import Request
from tpspec.tokens import Verdict
from tpspec.topology.caches import recent_of
from tpspec.topology.config import CacheConfig, EngineConfig, ServeConfig


@dataclass
class WindowedEpisode(SharingEpisode):
    """Of a second store, whose slots stand for the last tokens alone."""

    window: int = 1
    recent: dict[int, tuple[str, Text]] = field(default_factory=dict)

    def forward(self, plan: Plan) -> None:
        super().forward(plan)
        for span in plan.spans:
            assert span.held(windowed=True)[0] == max(0, span.start - self.window + 1)
        self.run_spans(plan, self.ranks[0]._pool.recent, self.recent, windowed=True)

    def apply(self, commit: Commit, verdicts: list[Verdict]) -> None:
        moved = [self.recent[slot] for slot in commit.moves.recent_src]
        assert len(commit.moves.recent_src) == len(commit.moves.src)
        super().apply(commit, verdicts)
        self.recent.update(zip(commit.moves.recent_dst, moved, strict=True))


def enough(page_size: int, max_rows: int, max_running: int, window: int) -> int:
    """Pages, as a topology counts them."""
    shape = replace(shape_of("smollm2-135m"), window=window, num_windowed=1)
    cache = CacheConfig(tokens=2**40, page=page_size)
    return recent_of(shape, cache, ServeConfig(max_running=max_running), EngineConfig(max_rows=max_rows)) // page_size


@pytest.mark.parametrize("window", [1, 2, 3, 5, 6])
def test_windows_that_all_begin_at_the_end_of_a_page_find_place(window: int) -> None:
    """The worst case, which chance hardly ever finds: every window touches as many pages as it can, and every row a
    new one."""
    pool = WindowedPool(64, 4, window, enough(4, max_rows=5, max_running=5, window=window))
    for start in range(20):
        for seq in range(5):
            pool.pass_by(seq, start)
        for seq in range(5):
            pool.grow_recent(seq, start + 1)


def test_a_corrupt_text_leaves_nothing_for_another() -> None:
    """Against pages of its beginning, long out of the window, that are had by their keys: chunks are judged by nobody,
    and the row that tells of a NaN in one of the first is the last."""
    pool = WindowedPool(16, 4, 6, 12)
    scheduler = Scheduler(pool, max_rows=8, max_running=2, fixed_rows=None, reuses=True)
    scheduler.submit(Request(0, tuple(range(40)), 4))
    while not scheduler.is_idle:
        plan = scheduler.plan({})
        scheduler.commit(plan, [Verdict(case.seq, (), (), corrupt=True) for case in plan.cases])
        scheduler.check_integrity()
    assert scheduler.num_corrupted == 1
    assert pool._kept == pool.recent._kept == {}


@settings(deadline=None, max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(1, 24),
    page_size=st.sampled_from([1, 2, 4]),
    max_rows=st.integers(1, 24),
    max_running=st.integers(1, 6),
    window=st.integers(1, 12),
    num_kept=st.one_of(st.none(), st.integers(0, 5)),
    worth=st.integers(1, 6),
)
def test_no_row_reads_another_text_and_none_lacks_a_place(
    seed: int,
    num_pages: int,
    page_size: int,
    max_rows: int,
    max_running: int,
    window: int,
    num_kept: int | None,
    worth: int,
) -> None:
    """Against a window's page that is taken too early, a prefix whose window is gone, a path that is moved in one
    kind of layers alone; and against fewer slots than rows can need: there are as many as the sizes promise. num_kept:
    of states, where other layers have some."""
    num_recent = enough(page_size, max_rows, max_running, window)

    def rank() -> Scheduler:
        pool = WindowedPool(num_pages, page_size, window, num_recent)
        states = Stateless() if num_kept is None else text_states(max_running, pool, num_kept, worth)
        return Scheduler(pool, max_rows=max_rows, max_running=max_running, fixed_rows=None, reuses=True, states=states)

    episode = WindowedEpisode(Random(seed), max_rows, max_running, [rank(), rank()], window=window)
    episode.run(num_rounds=25)
    assert all(rank._pool.recent.num_used == 0 for rank in episode.ranks)
