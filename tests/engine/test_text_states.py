"""Texts of models that keep states begin with what others have read, and only where a state of that beginning is."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from tests.engine.test_reuse import SharingEpisode, finish, rows_read, step
from tests.engine.test_scheduler import chain, text_states
from tpspec.cache.pages import PagePool
from tpspec.cache.seats import KeptStates
from tpspec.cache.windows import WindowedPool
from tpspec.engine.plan import Plan
from tpspec.engine.scheduler import Scheduler
from tpspec.engine.text_states import OPENING
from tpspec.model.batch import StateCopy
from tpspec.request import Request
from tpspec.tokens import Verdict

PAGE, WORTH = 4, 8
PROMPT = tuple(range(100, 130))
LAST = (len(PROMPT) - OPENING) // PAGE * PAGE  # tokens of it after which a state is kept


def subject(
    num_kept: int = 4, *, num_pages: int = 64, max_rows: int = 64, max_running: int = 4, pool: PagePool | None = None
) -> Scheduler:
    pool = pool or PagePool(num_pages, PAGE)
    states = text_states(max_running, pool, num_kept, WORTH)
    return Scheduler(pool, max_rows=max_rows, max_running=max_running, fixed_rows=None, reuses=True, states=states)


def test_the_next_turn_of_a_chat_is_read_from_where_its_last_prompt_nearly_ended() -> None:
    """Against reading a conversation anew with every turn. What an answer begins with, the next turn may not have."""
    scheduler = subject()
    rows_read(scheduler, Request(0, PROMPT, 2))
    turn = (*PROMPT[:-3], *range(20))
    assert rows_read(scheduler, Request(1, turn, 1)) == len(turn) - LAST


def test_a_chunk_ends_where_a_state_is_kept_and_the_copy_follows_it() -> None:
    """Against a state that has gone on before it is copied."""
    scheduler = subject()
    scheduler.submit(Request(0, PROMPT, 2))
    plan = scheduler.plan({})
    assert [(span.start, len(span.tokens), span.num_logits) for span in plan.spans] == [(0, LAST, 0)]
    assert scheduler.commit(plan, []).copies == [StateCopy(0, 4, 1)]
    (rest,) = step(scheduler).spans
    assert (rest.start, len(rest.tokens), rest.num_logits) == (LAST, len(PROMPT) - LAST, 1)


def test_who_begins_with_a_state_has_a_copy_before_its_first_round() -> None:
    """Against two texts that go on from one state, and against one that takes a state for fresh."""
    scheduler = subject()
    rows_read(scheduler, Request(0, PROMPT, 1))
    scheduler.submit(Request(1, PROMPT, 1))
    plan = step(scheduler)
    (span,) = plan.spans
    assert plan.copies == (StateCopy(4, 0, 1),)
    assert span.start == LAST
    assert span.carried is not None
    assert (span.carried.slot, span.carried.rows) == (0, (0,))


def test_an_answer_that_comes_back_in_a_prompt_is_known() -> None:
    """Against keeping prompts only: agents say what tools said behind what they have said."""
    scheduler = subject()
    rows_read(scheduler, Request(0, (*PROMPT,), 31))
    text = (*PROMPT, *[7] * 31)
    assert rows_read(scheduler, Request(1, (*text, 1, 2), 1)) <= WORTH + PAGE + 2


def test_a_copy_behind_an_accepted_path_goes_on_with_as_many_rows_as_fill_pages() -> None:
    """Against a copy that stands for more than its pages hold, or stands before another root."""
    scheduler = subject()
    scheduler.submit(Request(0, tuple(range(6)), 20))
    step(scheduler, 8)  # 7 tokens, 6 of them read
    plan = scheduler.plan({0: chain(5)})
    commit = scheduler.commit(plan, [Verdict(0, (0, 1, 2), (500, 501, 502, 9))])
    assert commit.copies == [StateCopy(0, 4, 2)]  # before token 6; the rows of 6 and 7 fill the second page
    text = (0, 1, 2, 3, 4, 5, 8, 500)
    scheduler.cancel(0)  # or its copy would follow it
    scheduler.submit(Request(1, (*text, 3), 1))
    (span,) = scheduler.plan({}).spans
    assert span.carried is not None
    assert (span.start, span.carried.rows) == (8, (0, 1))


def test_a_beginning_that_two_texts_share_is_kept_when_the_second_reads_it() -> None:
    """Against system prompts that every conversation reads anew: nobody knew where the first text's would end."""
    scheduler = subject()
    shared = tuple(range(200, 216))
    rows_read(scheduler, Request(0, (*shared, *range(30)), 1))
    assert rows_read(scheduler, Request(1, (*shared, *range(50, 60)), 1)) == len(shared) + 10
    assert rows_read(scheduler, Request(2, (*shared, *range(70, 80)), 1)) == 10


def test_requests_that_come_together_read_what_they_share_once() -> None:
    """Against the choices of one prompt, each of which would read all of it; the first stops where the others begin."""
    scheduler = subject(num_pages=1024, max_rows=256)
    shared = tuple(range(1000))
    assert rows_read(scheduler, *(Request(i, (*shared, 2000 + i), 1) for i in range(4))) == 1000 + 4


def test_nobody_waits_for_a_beginning_that_is_not_worth_it() -> None:
    """Against two texts that have only a few tokens in common and run after each other on account of them."""
    scheduler = subject()
    for i in range(2):
        scheduler.submit(Request(i, (*range(WORTH - PAGE), *range(10 * i + 10, 10 * i + 20)), 1))
    assert len(step(scheduler).spans) == 2


def test_a_beginning_whose_window_is_gone_is_read_again_from_where_there_is_a_state() -> None:
    """Of a model with states and windows. Against a text that begins where the last window is, and finds no state."""
    scheduler = subject(pool=WindowedPool(64, PAGE, 6, 7), max_rows=8, max_running=2)
    rows_read(scheduler, Request(0, PROMPT, 1))
    rows_read(scheduler, Request(1, tuple(range(60)), 1))  # over what windows had seen
    rows_read(scheduler, Request(2, (*PROMPT[:PAGE], 1, 2), 1))
    assert rows_read(scheduler, Request(3, PROMPT, 1)) == len(PROMPT)
    assert rows_read(scheduler, Request(4, PROMPT, 1)) == len(PROMPT) % PAGE


def test_who_was_preempted_reads_little_again() -> None:
    """Against a text that has to leave and reads all of itself when it is back."""
    scheduler = subject(num_pages=16)
    for i in range(2):
        scheduler.submit(Request(i, tuple(range(100 * i, 100 * i + 16)), 20))
    plans = finish(scheduler)
    assert scheduler.num_preemptions == 1
    starts = [span.start for plan in plans for span in plan.spans if span.seq in plan.admitted]
    assert [start > 0 for start in starts] == [False, False, True]


def test_what_is_corrupt_is_begun_with_by_nobody() -> None:
    """Against a state that is no number, and under whose key it is kept."""
    scheduler = subject()
    scheduler.submit(Request(0, PROMPT, 2))
    step(scheduler)
    plan = scheduler.plan({})
    scheduler.commit(plan, [Verdict(0, (), (), corrupt=True)])
    assert rows_read(scheduler, Request(1, PROMPT, 1)) == len(PROMPT)


def test_without_kept_states_texts_begin_alone_and_chunks_are_whole() -> None:
    scheduler = subject(num_kept=0)
    for i in range(2):
        scheduler.submit(Request(i, PROMPT, 1))
        assert [len(span.tokens) for plan in finish(scheduler) for span in plan.spans] == [len(PROMPT)]
    assert scheduler.reuse.num_asked == 0


def there(key: bytes) -> bool:
    return True


def test_the_longest_unused_state_makes_room() -> None:
    kept = KeptStates(range(5, 7), 1)
    assert [kept.keep(key, (0,), there) for key in (b"a", b"b")] == [5, 6]
    assert kept.use(b"a").slot == 5
    assert kept.keep(b"c", (0, 1), there) == 6
    assert (b"a" in kept, b"b" in kept, b"c" in kept) == (True, False, True)
    kept.drop([b"a", b"b"])
    assert kept.keep(b"d", (0,), there) == 5


def test_a_state_whose_pages_are_gone_makes_room_first() -> None:
    kept = KeptStates(range(2), 1)
    assert [kept.keep(key, (0,), there) for key in (b"a", b"b")] == [0, 1]
    assert kept.keep(b"c", (0,), lambda key: key != b"b") == 1


def test_trails_do_not_crowd_beginnings_out_nor_these_them() -> None:
    """Against a system prompt that all share, whose state goes because sixteen long answers are being written."""
    kept = KeptStates(range(4), 1)
    kept.keep(b"system", (0,), there)
    for number in range(8):
        kept.keep(b"trail %d" % number, (0,), there, trail=True)
    assert [key for key in (b"system", b"trail 5", b"trail 6", b"trail 7") if key in kept] == [
        b"system", b"trail 5", b"trail 6", b"trail 7",
    ]  # fmt: skip
    kept.use(b"trail 5")  # somebody begins with it
    kept.drop_trail(b"trail 5")
    kept.drop_trail(b"trail 6")
    for number in range(8):
        kept.keep(b"prompt %d" % number, (0,), there)
    assert b"trail 7" in kept
    assert b"system" not in kept


def test_where_nothing_is_shared_any_more_no_state_is_kept() -> None:
    """Against a comparison of sources that stops at the first long prompt: it has every one of them read it."""
    scheduler = subject()
    scheduler.reuse.is_on = False
    for i in range(2):
        assert rows_read(scheduler, Request(i, PROMPT, 40)) == len(PROMPT) + 39


def test_a_path_that_is_longer_than_a_copy_leaves_one_at_an_earlier_page() -> None:
    """Against answers that leave none because their drafts are long and right: six rows fill two pages, five fit."""
    scheduler = subject()
    scheduler.submit(Request(0, tuple(range(6)), 20))
    step(scheduler, 8)
    plan = scheduler.plan({0: chain(5)})
    commit = scheduler.commit(plan, [Verdict(0, (0, 1, 2, 3, 4), (500, 501, 502, 503, 504, 9))])
    assert commit.copies == [StateCopy(0, 4, 2)]


@pytest.mark.parametrize(("salts", "is_known"), [(("a", "a"), True), (("a", "b"), False)])
def test_salts_that_differ_share_no_states(salts: tuple[str, str], is_known: bool) -> None:
    """Against a client who learns from the time of an answer what another was told."""
    scheduler = subject()
    rows_read(scheduler, Request(0, PROMPT, 1, salt=salts[0]))
    read = rows_read(scheduler, Request(1, PROMPT, 1, salt=salts[1]))
    assert read == len(PROMPT) - LAST * is_known


@dataclass
class StatefulEpisode(SharingEpisode):
    """A slot's state is of the tokens it has taken in, with the salt of their text."""

    num_spared: int = 0

    def forward(self, plan: Plan) -> None:
        assert all(span.carried is not None for span in plan.spans)
        self.num_spared += sum(span.start for span in plan.spans if span.seq in plan.admitted)
        super().forward(plan)


@settings(deadline=None, max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(1, 24),
    page_size=st.integers(1, 4),
    max_rows=st.integers(1, 24),
    max_running=st.integers(1, 6),
    num_kept=st.integers(0, 5),
    worth=st.integers(1, 6),
)
def test_no_text_goes_on_from_the_state_of_another(
    seed: int, num_pages: int, page_size: int, max_rows: int, max_running: int, num_kept: int, worth: int
) -> None:
    """Against every bug of kept states that shows only in combination: a copy made too late, of a slot that has been
    given away, of rows that were not kept, under the key of another beginning; or a text that waits for ever."""

    def rank() -> Scheduler:
        pool = PagePool(num_pages, page_size)
        states = text_states(max_running, pool, num_kept, worth)
        return Scheduler(pool, max_rows=max_rows, max_running=max_running, fixed_rows=None, reuses=True, states=states)

    episode = StatefulEpisode(Random(seed), max_rows, max_running, [rank(), rank()])
    episode.run(num_rounds=25)
    assert episode.num_spared == 0 or num_kept > 0
