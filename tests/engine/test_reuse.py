"""Texts begin with pages that others have read, and only with those that hold what they begin with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from tests.engine.test_scheduler import STOP, Episode
from tpspec.cache.pages import BrokenPages, PagePool
from tpspec.engine.plan import Commit, Plan
from tpspec.engine.scheduler import Scheduler
from tpspec.request import Request
from tpspec.tokens import NO_DRAFT, TokenTree, Verdict

PAGE = 4


def subject(num_pages: int = 32, max_rows: int = 64, max_running: int = 8) -> Scheduler:
    pool = PagePool(num_pages, PAGE)
    return Scheduler(pool, max_rows=max_rows, max_running=max_running, fixed_rows=None, reuses=True)


def step(scheduler: Scheduler, said: int = 7) -> Plan:
    """A round without drafts, in which the target says the same after everything."""
    plan = scheduler.plan({})
    scheduler.commit(plan, [Verdict(case.seq, (), (said,)) for case in plan.cases])
    scheduler.check_integrity()
    return plan


def finish(scheduler: Scheduler) -> list[Plan]:
    plans = []
    while not scheduler.is_idle:
        plans.append(step(scheduler))
    return plans


def rows_read(scheduler: Scheduler, *requests: Request) -> int:
    for request in requests:
        assert scheduler.submit(request) is None
    return sum(plan.num_rows for plan in finish(scheduler))


def test_a_prompt_that_is_known_is_read_from_where_it_parts() -> None:
    """Against reading a conversation anew with every turn. Twelve tokens fill three pages; the fourth is its own."""
    scheduler = subject()
    assert rows_read(scheduler, Request(0, (*range(12), 50, 51), 1)) == 14
    assert rows_read(scheduler, Request(1, (*range(12), 60), 1)) == 1
    assert (scheduler.reuse.num_asked, scheduler.reuse.num_found) == (27, 12)


def test_the_last_token_of_a_prompt_is_always_read() -> None:
    """Against a prompt of whole pages that is all there: a round without rows, and no logits to begin with."""
    scheduler = subject()
    prompt = tuple(range(8))
    rows_read(scheduler, Request(0, prompt, 1))
    scheduler.submit(Request(1, prompt, 1))
    (span,) = step(scheduler).spans
    assert (span.start, span.tokens, span.num_logits) == (4, (4, 5, 6, 7), 1)


def test_what_was_answered_is_known_when_it_comes_back_in_a_prompt() -> None:
    """Against keeping prompts only: the turns of a chat are made of answers, too."""
    scheduler = subject()
    rows_read(scheduler, Request(0, (1, 2, 3), 9))  # 1 2 3 and nine times 7, of which the last was never read
    assert rows_read(scheduler, Request(1, (1, 2, 3, *[7] * 9), 1)) == 4
    assert rows_read(scheduler, Request(2, (1, 2, 3, *[7] * 12), 1)) == 3


def test_an_accepted_path_that_ends_a_text_is_kept_in_its_place() -> None:
    """Against a page whose last slots hold a sibling that was rejected, because who has finished moves nothing."""
    scheduler = subject()
    scheduler.submit(Request(0, (1, 2), 3))
    step(scheduler)
    plan = scheduler.plan({0: TokenTree((10, 11), (-1, -1))})
    commit = scheduler.commit(plan, [Verdict(0, (1,), (11, 9))])
    assert commit.finished == [0]
    assert commit.moves == ([4], [3], [], [])
    assert rows_read(scheduler, Request(1, (1, 2, 7, 11, 9), 1)) == 1


@pytest.mark.parametrize(("salts", "rows"), [(("", ""), 1), (("a", "a"), 1), (("", "a"), 9), (("a", "b"), 9)])
def test_salts_that_differ_share_nothing(salts: tuple[str, str], rows: int) -> None:
    """Against a client who learns from the time of an answer what another was told."""
    scheduler = subject()
    rows_read(scheduler, Request(0, tuple(range(9)), 1, salt=salts[0]))
    assert rows_read(scheduler, Request(1, tuple(range(9)), 1, salt=salts[1])) == rows


def test_a_page_is_known_by_all_that_stands_before_it() -> None:
    """Against a key of a page's own tokens: its keys and values are those of another text."""
    scheduler = subject()
    rows_read(scheduler, Request(0, (1, 2, 3, 4, 5, 6, 7, 8, 9), 1))
    assert rows_read(scheduler, Request(1, (1, 2, 3, 0, 5, 6, 7, 8, 9), 1)) == 9


def test_a_prompt_that_is_to_be_scored_is_read_whole() -> None:
    """Against log-probabilities of the prompt that are missing where nobody computed logits."""
    scheduler = subject()
    prompt = tuple(range(9))
    rows_read(scheduler, Request(0, prompt, 1))
    assert rows_read(scheduler, Request(1, prompt, 1, logprobs=0, prompt_logprobs=True)) == 9
    assert (scheduler.reuse.num_asked, scheduler.reuse.num_found) == (9, 0)


def test_requests_that_come_together_read_what_they_share_once() -> None:
    """Against the choices of one prompt, each of which would read all of it in the same rounds."""
    scheduler = subject(num_pages=1024, max_rows=256)
    shared = tuple(range(1000))
    assert rows_read(scheduler, *(Request(i, (*shared, 2000 + i), 1) for i in range(6))) == 1000 + 6


def test_who_shares_nothing_waits_for_nobody() -> None:
    scheduler = subject()
    for i in range(3):
        scheduler.submit(Request(i, tuple(range(10 * i, 10 * i + 9)), 1))
    assert len(step(scheduler).spans) == 3


def test_who_waits_for_an_elder_that_leaves_reads_for_himself() -> None:
    """Against waiting for ever for a page that nobody reads any more."""
    scheduler = subject(max_rows=4)
    for i in range(2):
        scheduler.submit(Request(i, tuple(range(20)), 1))
    assert [span.seq for span in step(scheduler).spans] == [0]
    scheduler.cancel(0)
    assert sum(plan.num_rows for plan in finish(scheduler)) == 16


def test_who_was_preempted_reads_little_again() -> None:
    """Against throwing away what was read when its pages are merely to be had."""
    scheduler = subject(num_pages=8)
    rows = rows_read(scheduler, Request(0, tuple(range(8)), 16), Request(1, tuple(range(50, 58)), 16))
    assert scheduler.num_preemptions == 1
    assert rows < 16 + 2 * 15 + 16  # the prompts, a root a token, and 16 that were cached when its elder needed a page


def test_nothing_is_kept_where_it_is_off() -> None:
    pool = PagePool(8, PAGE)
    scheduler = Scheduler(pool, max_rows=64, max_running=8, fixed_rows=None)
    assert [rows_read(scheduler, Request(i, tuple(range(9)), 1)) for i in range(2)] == [9, 9]
    assert (scheduler.reuse.digest, scheduler.reuse.num_asked) == (0, 0)


def test_what_another_source_has_not_seen_is_not_found() -> None:
    """Against a draft source that takes over and goes on from rows that nobody kept for it."""
    pool = PagePool(8, PAGE)
    scheduler = Scheduler(pool, max_rows=64, max_running=8, fixed_rows=None, reuses=True)
    rows_read(scheduler, Request(0, tuple(range(9)), 1))
    pool.unkeep()
    assert [rows_read(scheduler, Request(i, tuple(range(9)), 1)) for i in (1, 2)] == [9, 1]


def test_texts_that_share_nothing_lie_in_one_piece_however_many_have_been() -> None:
    """Against a cache full of what nobody asks for again, in whose holes every text lies in pieces."""
    scheduler, source = subject(num_pages=256, max_rows=256), Random(3)
    waiting = [
        Request(i, tuple(source.randrange(10**6) for _ in range(source.randint(5, 90))), source.randint(5, 60))
        for i in range(150)
    ]
    while waiting or not scheduler.is_idle:
        while waiting and scheduler.num_running + scheduler.num_waiting < 3:
            scheduler.submit(waiting.pop())
        assert all(len(span.runs) == 1 for span in step(scheduler).spans)


def test_integrity_names_a_page_that_is_shared_and_not_kept() -> None:
    pool = PagePool(4, PAGE)
    pool.grow(1, 4)
    pool.keep(1, 0, b"key")
    assert pool.reach([b"key", b"other"]) == 1
    pool.adopt(2, [b"key"])
    pool.check_integrity()
    pool._num_owners[0] = 1
    with pytest.raises(BrokenPages, match=r"page 0: owned by \[1, 2\], not free, kept; 1 owners were counted"):
        pool.check_integrity()
    pool._num_owners[0] = 2
    del pool._keys[0]
    with pytest.raises(BrokenPages, match=r"page 0: owned by \[1, 2\], not free, not kept"):
        pool.check_integrity()


Text = tuple[int, ...]


@dataclass
class SharingEpisode(Episode):
    """Requests that begin alike; a slot holds what its whole text was when it was written, and the salt."""

    written: dict[int, tuple[str, Text]] = field(default_factory=dict)
    num_rated: Counter[int] = field(default_factory=Counter)

    def submit(self) -> None:
        id = len(self.requests)
        known = self.random.choice([(), *map(tuple, self.texts.values())])
        begin = known[: self.random.randint(0, len(known))]
        new = tuple(self.random.randrange(3) for _ in range(self.random.randint(1, 8)))
        request = Request(
            id,
            (*begin, *new),
            self.random.randint(1, 12),
            stop_ids=frozenset({STOP}),
            logprobs=0,
            prompt_logprobs=self.random.random() < 0.1,
            salt=self.random.choice(["", "", "a"]),
        )
        self.requests[id] = request
        answers = [rank.submit(request) for rank in self.ranks]
        if answers[0] is None:
            self.alive.append(id)
            self.texts[id] = list(request.prompt)

    def check_logits(self, plan: Plan, trees: dict[int, TokenTree]) -> None: ...

    def forward(self, plan: Plan) -> None:
        self.run_spans(plan, self.ranks[0]._pool, self.written, windowed=False)
        self.take_in(plan)
        for owed in plan.owed:
            self.num_rated[owed.seq] += len(owed.prompt)

    def run_spans(self, plan: Plan, pool: PagePool, store: dict[int, tuple[str, Text]], *, windowed: bool) -> None:
        """Every key that is read was written for this very beginning; no page is written that another can read."""
        trees = {case.seq: case.tree for case in plan.cases}
        writes: dict[int, tuple[str, Text]] = {}
        for span in plan.spans:
            salt, text = self.requests[span.seq].salt, tuple(self.texts[span.seq])
            begin, runs = span.held(windowed=windowed)
            slots = [slot for first, count in runs for slot in range(first, first + count)]
            assert [store[slot] for slot in slots[: span.start - begin]] == [
                (salt, text[: position + 1]) for position in range(begin, span.start)
            ]
            own = slots[span.start - begin :]
            assert own == span.own_slots(windowed=windowed)
            assert not {slot // pool.page_size for slot in own} & set(pool._keys)
            tree = trees.get(span.seq, NO_DRAFT)
            known = [text[: span.start + row + 1] for row in range(len(span.tokens) - len(tree))]
            drafts = [(*text, *(tree.tokens[at] for at in tree.path(node))) for node in range(len(tree))]
            for slot, content in zip(own, [*known, *drafts], strict=True):
                assert slot not in writes
                writes[slot] = salt, content
        store.update(writes)

    def apply(self, commit: Commit, verdicts: list[Verdict]) -> None:
        moved = [self.written[slot] for slot in commit.moves.src]
        super().apply(Commit(commit.deltas, finished=commit.finished), verdicts)
        self.written.update(zip(commit.moves.dst, moved, strict=True))
        for request in (self.requests[id] for id in commit.finished):
            assert self.num_rated[request.id] == request.prompt_logprobs * (len(request.prompt) - 1)


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(1, 24),
    page_size=st.integers(1, 4),
    max_rows=st.integers(1, 24),
    max_running=st.integers(1, 6),
)
def test_no_text_reads_what_was_written_for_another_beginning(
    seed: int, num_pages: int, page_size: int, max_rows: int, max_running: int
) -> None:
    """Against every bug of sharing that shows only in combination: a page evicted under its owner or written by two, a
    key of drafts that were rejected, a chain that goes on from another salt, two ranks that evict differently."""

    def rank() -> Scheduler:
        pool = PagePool(num_pages, page_size)
        return Scheduler(pool, max_rows=max_rows, max_running=max_running, fixed_rows=None, reuses=True)

    episode = SharingEpisode(Random(seed), max_rows, max_running, [rank(), rank()])
    episode.run(num_rounds=25)
    one, other = (rank.reuse for rank in episode.ranks)
    assert (one.digest, one.num_asked, one.num_found) == (other.digest, other.num_asked, other.num_found)
