"""What runs, in what order, within which budget; and that no cached token is ever read from the wrong place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tpspec.cache.pages import BrokenPages, PagePool
from tpspec.cache.seats import KeptStates, Seats
from tpspec.engine.plan import Commit, Plan, fair_shares, tally
from tpspec.engine.scheduler import Scheduler
from tpspec.engine.text_states import Stateless, TextStates
from tpspec.model.batch import Span, StateCopy
from tpspec.request import Delta, Request
from tpspec.tokens import NO_DRAFT, NO_TOKEN, Draws, TokenTree, Verdict

STOP, MOST_LEFT, KEPT_LEFT = 99, 6, 5
BUSH = TokenTree((10, 11, 12, 13, 14), (-1, -1, 0, 1, 3))  # two children of the root; 11 - 13 - 14 is the long path


def scheduler(
    *,
    num_pages: int = 32,
    page_size: int = 2,
    max_rows: int = 64,
    max_running: int = 8,
    fixed_rows: int | None = None,
    max_positions: int | None = None,
    states: Stateless | None = None,
) -> Scheduler:
    return Scheduler(
        PagePool(num_pages, page_size),
        max_rows=max_rows,
        max_running=max_running,
        fixed_rows=fixed_rows,
        max_positions=max_positions,
        states=states,
    )


def request(id: int, prompt: int = 3, max_tokens: int = 8) -> Request:
    tokens = tuple(1000 * (id + 1) + i for i in range(prompt))
    return Request(id, tokens, max_tokens, stop_ids=frozenset({STOP}))


def submitted(*requests: Request, **sizes: int) -> Scheduler:
    subject = scheduler(**sizes)
    assert [subject.submit(each) for each in requests] == [None] * len(requests)
    return subject


def plain(plan: Plan) -> list[Verdict]:
    """Nothing is accepted; the target says 7."""
    return [Verdict(case.seq, (), (7,)) for case in plan.cases]


def step(subject: Scheduler, **trees: TokenTree) -> tuple[Plan, Commit]:
    """One round without acceptance; trees are given as s0=..., s1=..."""
    plan = subject.plan({int(name[1:]): tree for name, tree in trees.items()})
    return plan, subject.commit(plan, plain(plan))


def chain(size: int) -> TokenTree:
    return TokenTree.chain(range(500, 500 + size))


# One sequence


def test_a_prompt_runs_in_chunks_and_only_the_last_is_judged() -> None:
    """Against judging every chunk: tokens would be emitted from the middle of the prompt."""
    subject = submitted(request(0, prompt=7), max_rows=3)
    rounds = [step(subject) for _ in range(3)]
    assert [(s.start, len(s.tokens), s.num_logits) for plan, _ in rounds for s in plan.spans] == [
        (0, 3, 0),
        (3, 3, 0),
        (6, 1, 1),
    ]
    assert [len(plan.cases) for plan, _ in rounds] == [0, 0, 1]
    assert [commit.deltas for _, commit in rounds] == [[], [], [Delta(0, (7,))]]


def test_a_verification_span_is_the_root_and_its_tree() -> None:
    subject = submitted(request(0))
    step(subject)
    plan = subject.plan({0: BUSH})
    assert plan.spans == (Span(0, 3, (7, *BUSH.tokens), ((0, 9),), 6, (-1, 0, 0, 1, 2, 4)),)
    (case,) = plan.cases
    assert (case.row, case.tree, case.context, case.num_prompt) == (0, BUSH, [1000, 1001, 1002, 7], 3)
    assert (plan.num_rows, plan.num_logits) == (6, 6)


def test_a_chain_has_no_parents_and_needs_no_moves() -> None:
    """Against treating chains as trees: causal kernels would be lost and slots copied onto themselves."""
    subject = submitted(request(0))
    step(subject)
    plan = subject.plan({0: chain(3)})
    commit = subject.commit(plan, [Verdict(0, (0, 1), (500, 501, 7))])
    assert plan.spans[0].parents is None
    assert commit.moves == ([], [], [], [])
    assert subject.plan({}).spans[0].start == 6


def test_an_accepted_path_moves_behind_the_root() -> None:
    """Against leaving the path where it was drafted: later rows would attend to rejected siblings."""
    subject = submitted(request(0))
    step(subject)
    plan = subject.plan({0: BUSH})
    commit = subject.commit(plan, [Verdict(0, (1, 3, 4), (11, 13, 14, 7))])
    assert commit.moves == ([5, 7, 8], [4, 5, 6], [], [])
    assert commit.deltas == [Delta(0, (11, 13, 14, 7), None, (2, 2, 1), (1, 1, 1))]


def test_pages_of_rejected_tokens_are_free_again() -> None:
    """Against keeping what a tree once needed: wide trees would push other sequences out of the cache."""
    subject = submitted(request(0, max_tokens=20), page_size=1)
    step(subject)
    subject.commit(plan := subject.plan({0: chain(9)}), plain(plan))
    assert subject._pool.num_used == 5


def test_a_tree_for_a_sequence_that_is_behind_is_ignored() -> None:
    """Against judging a tree whose root is not the last row of the chunk."""
    subject = submitted(request(0, prompt=4))
    plan, _ = step(subject, s0=chain(3), s5=chain(2))
    assert (plan.num_rows, plan.cases[0].tree) == (4, NO_DRAFT)


def test_a_tree_is_no_deeper_than_what_may_still_be_emitted() -> None:
    """Against rows that can never be emitted, and against positions beyond what the request was admitted for."""
    subject = submitted(request(0, max_tokens=4))
    step(subject)
    plan, _ = step(subject, s0=chain(9))
    assert len(plan.cases[0].tree) == 2
    plan, _ = step(subject, s0=BUSH)
    assert plan.cases[0].tree == BUSH.pruned(2)
    plan, commit = step(subject, s0=BUSH)
    assert plan.cases[0].tree == NO_DRAFT
    assert commit.finished == [0]


def test_a_stop_token_ends_the_text_and_what_was_accepted_behind_it_is_not_counted() -> None:
    """Against tokens after the end, and against acceptance rates that count what nobody ever saw."""
    subject = submitted(request(0))
    step(subject)
    plan = subject.plan({0: TokenTree.chain((5, STOP, 6))})
    commit = subject.commit(plan, [Verdict(0, (0, 1, 2), (5, STOP, 6, 7))])
    assert commit.deltas == [Delta(0, (5, STOP), "stop", (1, 1, 1), (1, 1, 0))]
    assert (commit.finished, subject.is_idle, subject._pool.num_used) == ([0], True, 0)


def test_max_tokens_ends_the_text_and_a_stop_at_the_limit_is_a_stop() -> None:
    """Against a verdict that is longer than the request allows."""
    for last, finish in ((6, "length"), (STOP, "stop")):
        subject = submitted(request(0, max_tokens=1))
        commit = subject.commit(subject.plan({}), [Verdict(0, (), (last, 4))])
        assert [(delta.tokens, delta.finish) for delta in commit.deltas] == [((last,), finish)]


def test_what_can_never_run_is_refused_with_a_reason() -> None:
    """Against a queue that a request longer than the cache blocks for ever."""
    subject = scheduler(num_pages=4, page_size=4)
    assert subject.capacity_tokens == 16
    assert subject.fits(request(0, prompt=8, max_tokens=8))
    faults = {(9, 8): "do not fit the cache of 16 tokens", (0, 8): "prompt is empty", (3, -1): "at least 0"}
    for (prompt, max_tokens), reason in faults.items():
        delta = subject.submit(request(0, prompt, max_tokens))
        assert delta is not None
        assert delta.finish == "error"
        assert reason in str(delta.error)
    assert subject.is_idle


def test_a_text_longer_than_the_model_was_made_for_is_refused_though_the_cache_has_room() -> None:
    """Against nonsense that is served as text: beyond its positions a model has learnt nothing."""
    subject = scheduler(num_pages=4, page_size=4, max_positions=12)
    assert subject.capacity_tokens == 12
    assert subject.submit(request(0, prompt=8, max_tokens=4)) is None
    refused = subject.submit(request(1, prompt=8, max_tokens=5))
    assert refused is not None
    assert refused.error == "8 prompt tokens and max_tokens 5 are more than the 12 positions of the model"
    assert scheduler(num_pages=4, page_size=4, max_positions=99).capacity_tokens == 16


def test_a_request_as_long_as_the_cache_is_served() -> None:
    """Against headroom that an empty cache cannot give: the request would wait for ever."""
    subject = submitted(request(0, prompt=15, max_tokens=1), num_pages=4, page_size=4)
    assert step(subject)[1].finished == [0]


def test_an_id_that_is_alive_cannot_be_submitted_again() -> None:
    subject = submitted(request(0), request(1), max_running=1)
    step(subject)
    for id in (0, 1):
        with pytest.raises(ValueError, match=f"request {id} was submitted twice"):
            subject.submit(request(id))


def test_a_round_that_could_never_run_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="0 rows"):
        scheduler(fixed_rows=0)


# Many sequences


def test_rows_with_logits_are_numbered_over_all_spans() -> None:
    """Against numbering over all rows: with a chunk in front every verdict would judge a stranger's logits."""
    subject = submitted(request(0), request(1))
    step(subject)
    subject.submit(request(2, prompt=5))
    plan, _ = step(subject, s0=chain(2), s1=BUSH)
    assert [(case.seq, case.row) for case in plan.cases] == [(0, 0), (1, 3), (2, 9)]
    assert [span.num_logits for span in plan.spans] == [3, 6, 1]


def test_a_short_budget_is_shared_fairly_among_trees() -> None:
    """Against first come first served: the oldest would speculate and all others would decode plainly."""
    subject = submitted(*(request(id) for id in range(3)), max_rows=12)
    step(subject)
    plan, _ = step(subject, s0=chain(7), s1=chain(2), s2=chain(7))
    assert [len(case.tree) for case in plan.cases] == [4, 2, 3]
    assert plan.num_rows == 12


def test_trees_leave_rows_for_a_prompt_that_waits() -> None:
    """Against a first token that comes only when somebody else's text has ended."""
    subject = submitted(request(0, max_tokens=30), max_rows=8)
    step(subject)
    subject.submit(request(1, prompt=10))
    plan, _ = step(subject, s0=chain(7))
    assert [(span.seq, len(span.tokens)) for span in plan.spans] == [(0, 4), (1, 4)]


def test_a_fixed_row_count_caps_the_round() -> None:
    subject = submitted(request(0, max_tokens=30), fixed_rows=4)
    step(subject)
    assert step(subject, s0=chain(9))[0].num_rows == 4


def test_no_more_run_than_there_are_rows() -> None:
    """Against sequences that hold pages and starve because the roots of others take every row."""
    subject = submitted(*(request(id) for id in range(5)), max_rows=2)
    step(subject)
    assert (subject.num_running, subject.num_waiting) == (2, 3)
    while not subject.is_idle:
        ready, num_behind = [seq.id for seq in subject.ready()], subject.num_running - len(subject.ready())
        plan, _ = step(subject, **{f"s{id}": chain(5) for id in range(5)})
        assert [span.seq for span in plan.spans][: len(ready)] == ready
        assert len(plan.spans) > len(ready) or not num_behind


@pytest.mark.parametrize(("sizes", "most"), [({"max_rows": 2}, 2), ({"fixed_rows": 4}, 4), ({"max_running": 5}, 5)])
def test_how_many_run_is_told_with_the_rows_that_there_are(sizes: dict[str, int], most: int) -> None:
    """The server was told the topology's number. Where there were fewer rows, requests that only waited were taken for
    those that may be why an engine was lost, and ended with them."""
    assert scheduler(**sizes).max_running == most


def test_admission_is_first_come_first_served() -> None:
    """Against small requests overtaking a large one for ever."""
    subject = submitted(request(0, 6), request(1, 12, 4), request(2, 1, 1), num_pages=8)
    step(subject)
    assert (subject.num_running, subject.num_waiting) == (1, 2)


def test_the_youngest_is_preempted_keeps_its_text_and_returns_first() -> None:
    """Against preempting the oldest (nobody would ever finish) and against text that is lost or said twice."""
    subject = submitted(request(0, 3, 9), request(1, 3, 9), request(2, 1, 1), num_pages=6, max_running=2)
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ran: list[list[int]] = []
    while not subject.is_idle:
        plan, commit = step(subject)
        ran.append(sorted(span.seq for span in plan.spans))
        for delta in commit.deltas:
            texts[delta.id] += delta.tokens
        subject.check_integrity()
    assert subject.num_preemptions == 1
    assert [seqs for seqs, before in zip(ran, [[], *ran], strict=False) if seqs != before] == [[0, 1], [0], [1, 2], [1]]
    assert texts == {0: [7] * 9, 1: [7] * 9, 2: [7]}


def test_a_tree_is_cut_to_the_pages_left_and_preempts_nobody() -> None:
    """Against speculation that throws another sequence's cache away."""
    subject = submitted(request(0, 3, 9), request(1, 3, 9), num_pages=6)
    step(subject)
    plan, _ = step(subject, s0=chain(7), s1=chain(7))
    assert [len(case.tree) for case in plan.cases] == [4, 0]
    assert subject.num_preemptions == 0


def test_a_cancelled_sequence_leaves_at_once_wherever_it_is() -> None:
    """Against pages held for a client that has gone, and against verdicts for it that arrive afterwards."""
    subject = submitted(*(request(id) for id in range(3)), max_running=2)
    plan = subject.plan({})
    subject.cancel(0)
    subject.cancel(2)
    subject.cancel(77)
    subject.check_integrity()
    commit = subject.commit(plan, plain(plan))
    assert [delta.id for delta in commit.deltas] == [1]
    assert (subject.num_running, subject.num_waiting) == (1, 0)


def test_ready_are_those_that_can_use_a_tree() -> None:
    """Against drafting for prompts that are still being read."""
    subject = submitted(request(0), request(1, prompt=9), max_rows=6)
    step(subject)
    (ready,) = subject.ready()
    assert (ready.id, ready.tokens, ready.num_prompt) == (0, [1000, 1001, 1002, 7], 3)
    assert (ready.remaining, ready.output, ready.sampling) == (7, [7], request(0).sampling)


def ahead_of(subject: Scheduler, plan: Plan, **drawn: int) -> list[Span]:
    """What is foreseen of the next round, once tokens have been drawn; given as s0=..."""
    return [replace(span, tokens=(drawn.get(f"s{span.seq}", 7),)) for span in subject.foresee(plan)]


def test_a_plain_round_is_known_before_the_verdicts_of_the_one_before_it() -> None:
    """All but its tokens; who has his last token drawn is not in it. Against rows that a round computes once more."""
    subject = submitted(request(0), request(1, max_tokens=3))
    step(subject)
    step(subject)
    plan = subject.plan({})
    ahead = ahead_of(subject, plan)
    assert ahead == [Span(0, 5, (7,), ((0, 6),), 1)]
    subject.commit(plan, plain(plan))
    assert subject.plan({0: chain(3)}, (), ahead).spans == tuple(ahead)


def test_rows_of_who_has_ended_meanwhile_are_passed_over() -> None:
    """Against a case of somebody who is gone, and against rows that are counted from another place than they have."""
    subject = submitted(request(0), request(1))
    step(subject)
    ahead = ahead_of(subject, plan := subject.plan({}), s0=STOP)
    subject.commit(plan, [Verdict(0, (), (STOP,)), Verdict(1, (), (7,))])
    plan = subject.plan({}, (), ahead)
    assert (plan.spans, plan.gone) == (tuple(ahead), (0,))
    assert [(case.seq, case.row) for case in plan.cases] == [(1, 1)]
    assert [(span.seq, span.start, span.tokens) for span in subject.foresee(plan)] == [(1, 5, (NO_TOKEN,))]


def test_who_comes_waits_for_no_more_than_the_round_that_has_been_launched() -> None:
    """Against texts that go on launching, round after round, while somebody waits who would have a place."""
    subject = submitted(request(0))
    step(subject)
    ahead = ahead_of(subject, plan := subject.plan({}))
    subject.submit(request(1))
    subject.commit(plan, plain(plan))
    plan = subject.plan({}, (), ahead)
    assert [span.seq for span in plan.spans] == [0]
    assert subject.foresee(plan) == []
    subject.commit(plan, plain(plan))
    assert [span.seq for span in subject.plan({}).spans] == [0, 1]


def test_a_round_that_is_not_the_one_foreseen_is_planned_anew() -> None:
    """Against rows that another text, or a later token of the same, would take for its own."""
    subject = submitted(request(0))
    step(subject)
    ahead = ahead_of(subject, plan := subject.plan({}), s0=8)
    subject.commit(plan, plain(plan))
    assert subject.plan({}, (), ahead).spans == (Span(0, 4, (7,), ((0, 5),), 1),)
    assert subject.plan({0: chain(2)}, (), ahead).num_rows == 3


def test_nothing_is_foreseen_of_rounds_with_drafts_chunks_or_states() -> None:
    """Nor where a cache has no room for one more token of each: that would preempt somebody."""
    subject = submitted(request(0, prompt=5), max_rows=3)
    assert subject.foresee(subject.plan({})) == []
    subject = submitted(request(0))
    step(subject)
    assert subject.foresee(subject.plan({0: chain(2)})) == []
    subject = submitted(request(0), request(1), num_pages=11, page_size=1)
    step(subject)
    step(subject)
    assert subject.foresee(subject.plan({})) == []
    subject.check_integrity()
    pool = PagePool(8, 2)
    subject = scheduler(num_pages=8, states=text_states(1, pool))
    subject.submit(request(0))
    step(subject)
    assert subject.foresee(subject.plan({})) == []


def test_integrity_names_pages_of_nobody_and_missing_pages() -> None:
    subject = submitted(request(0))
    step(subject)
    subject._pool.grow(5, 2)
    with pytest.raises(BrokenPages, match="sequence 5 is not running"):
        subject.check_integrity()
    subject._pool.release(5)
    subject._pool.shrink(0, 2)
    with pytest.raises(BrokenPages, match="sequence 0: 3 of 4 cached in 2 slots"):
        subject.check_integrity()


# The pieces


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 40))
def test_shares_are_max_min_fair_and_waste_nothing(wants: list[int], total: int) -> None:
    shares = fair_shares(wants, total)
    assert sum(shares) == min(total, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    short = [share for share, want in zip(shares, wants, strict=True) if share < want]
    assert all(share >= max(shares) - 1 for share in short)


def test_a_tree_cut_by_depth_keeps_the_numbers_of_its_nodes_and_its_draws() -> None:
    """Against renumbering: the drafter reads the accepted path in the tree it proposed."""
    draws = tuple(Draws((row,), (1.0,)) for row in range(6))
    tree = TokenTree(BUSH.tokens, BUSH.parents, draws)
    assert tree.up_to_depth(2) == TokenTree(BUSH.tokens[:4], BUSH.parents[:4], draws[:5])
    assert tree.up_to_depth(9) is tree
    assert len(tree.up_to_depth(0)) == 0


def test_the_tally_counts_siblings_as_drafted_and_one_of_them_as_accepted() -> None:
    assert tally(BUSH, 2) == ((2, 2, 1), (1, 1, 0))
    assert tally(NO_DRAFT, 0) == ((), ())


# The whole, at random


def text_states(max_running: int, pool: PagePool, num_kept: int = 0, worth: int = 1) -> TextStates:
    kept = KeptStates(range(max_running, max_running + num_kept), KEPT_LEFT)
    return TextStates(Seats(max_running, MOST_LEFT), kept, pool, worth)


@dataclass
class Episode:
    """A world of two ranks, a store of keys and a law that accepts at random.

    It keeps its own record of every text, and of what was written into every slot, and compares both with what the
    schedulers do.
    """

    random: Random
    max_rows: int
    max_running: int
    ranks: list[Scheduler]
    requests: dict[int, Request] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)
    alive: list[int] = field(default_factory=list)  # in order of arrival
    slots: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # slot -> sequence, position, token
    states: dict[int, list[int]] = field(default_factory=dict)  # seat -> the tokens that its state has taken in
    left: dict[int, tuple[int, ...]] = field(default_factory=dict)  # seat -> those of the rows beside it
    ahead: list[Span] = field(default_factory=list)  # whose rows have been read and written before their round
    num_ahead: int = 0

    def submit(self) -> None:
        id = len(self.requests)
        prompt = tuple(self.random.randrange(50) for _ in range(self.random.randint(1, 14)))
        new = Request(id, prompt, self.random.randint(1, 12), stop_ids=frozenset({STOP}))
        self.requests[id] = new
        answers = [rank.submit(new) for rank in self.ranks]
        assert all((answer is None) == rank.fits(new) for answer, rank in zip(answers, self.ranks, strict=True))
        if answers[0] is None:
            self.alive.append(id)
            self.texts[id] = list(prompt)

    def cancel(self) -> None:
        id = self.random.randrange(len(self.requests) + 1)
        for rank in self.ranks:
            rank.cancel(id)
        if id in self.alive:
            self.alive.remove(id)

    def tree(self) -> TokenTree:
        size = self.random.randint(0, 9)
        tokens = tuple(STOP if self.random.random() < 0.03 else self.random.randrange(50) for _ in range(size))
        if self.random.random() < 0.5:
            return TokenTree.chain(tokens)
        return TokenTree(tokens, tuple(self.random.randrange(-1, node) for node in range(size)))

    def verdict(self, seq: int, tree: TokenTree) -> Verdict:
        node = self.random.randrange(-1, len(tree))
        path = tuple(tree.path(node))
        last = STOP if self.random.random() < 0.03 else self.random.randrange(50)
        return Verdict(seq, path, (*(tree.tokens[i] for i in path), last))

    def round(self) -> None:
        drafts = self.random.random() < 0.6
        trees = {id: self.tree() for id in self.requests if drafts and self.random.random() < 0.8}
        plan, other = (rank.plan(trees, (), self.ahead) for rank in self.ranks)
        assert plan == other
        self.check_budget(plan)
        self.check_logits(plan, trees)
        self.copy(plan.copies)
        if plan.spans == tuple(self.ahead):
            self.num_ahead += bool(self.ahead)
        else:
            self.forward(plan)
        foreseen, other_foreseen = (rank.foresee(plan) for rank in self.ranks)
        assert foreseen == other_foreseen
        if self.random.random() < 0.05:
            self.cancel()
        verdicts = [self.verdict(case.seq, case.tree) for case in plan.cases]
        self.look_ahead(foreseen, verdicts)
        commit, other_commit = (rank.commit(plan, verdicts) for rank in self.ranks)
        assert commit == other_commit
        self.apply(commit, verdicts)
        self.copy(commit.copies)
        for rank in self.ranks:
            rank.check_integrity()

    def look_ahead(self, foreseen: list[Span], verdicts: list[Verdict]) -> None:
        """Rows of the next round are read and written as soon as its tokens are drawn."""
        drawn = {verdict.seq: verdict.tokens for verdict in verdicts}
        assert all(len(drawn[span.seq]) == 1 for span in foreseen)
        self.ahead = [replace(span, tokens=drawn[span.seq]) for span in foreseen]
        texts = self.texts
        self.texts = texts | {span.seq: [*texts[span.seq], *span.tokens] for span in self.ahead}
        self.forward(Plan(tuple(self.ahead), ()))
        self.texts = texts

    def check_budget(self, plan: Plan) -> None:
        seqs = [span.seq for span in plan.spans if span not in self.ahead or span.seq in self.alive]
        assert plan.num_rows <= self.max_rows
        assert len(seqs) == len(set(seqs)) <= self.ranks[0].num_running <= self.max_running
        assert all(span.tokens for span in plan.spans)
        assert not self.alive or self.alive[0] in seqs  # the oldest moves in every round

    def check_logits(self, plan: Plan, trees: dict[int, TokenTree]) -> None:
        rows = [
            (span.seq, token) for span in plan.spans if span.num_logits for token in span.tokens[-span.num_logits :]
        ]
        ended = {span.seq for span in self.ahead} - set(self.alive)
        judged = []
        for case in plan.cases:
            assert case.context == self.texts[case.seq]
            assert case.tree in (NO_DRAFT, trees.get(case.seq, NO_DRAFT).pruned(len(case.tree)))
            emitted = len(case.context) - case.num_prompt
            assert max(case.tree.depths(), default=0) < self.requests[case.seq].max_tokens - emitted
            judged += [(case.seq, token) for token in (case.context[-1], *case.tree.tokens)]
            assert rows[case.row] == (case.seq, case.context[-1])
        assert [row for row in rows if row[0] not in ended] == judged

    def forward(self, plan: Plan) -> None:
        """Read what every row would read, then write what every row would write."""
        places = [[slot for first, n in span.runs for slot in range(first, first + n)] for span in plan.spans]
        flat = [slot for slots in places for slot in slots]
        assert len(flat) == len(set(flat))
        for span, slots in zip(plan.spans, places, strict=True):
            text = self.texts[span.seq]
            assert len(slots) == span.start + len(span.tokens)
            cached = [self.slots[slot] for slot in slots[: span.start]]
            assert cached == [(span.seq, position, text[position]) for position in range(span.start)]
            num_committed = len(span.tokens) - max(span.num_logits - 1, 0)
            assert list(span.tokens[:num_committed]) == text[span.start : span.start + num_committed]
        self.take_in(plan)
        for span, slots in zip(plan.spans, places, strict=True):
            written = zip(slots[span.start :], span.positions(), span.tokens, strict=True)
            self.slots.update({slot: (span.seq, position, token) for slot, position, token in written})

    def take_in(self, plan: Plan) -> None:
        """What states and the rows beside them stand for is the text before the span, and never more."""
        carried = [(span, span.carried) for span in plan.spans if span.carried is not None]
        seats = [one.slot for _, one in carried]
        assert len(carried) in (0, len(plan.spans))
        assert len(seats) == len(set(seats))
        for span, one in carried:
            before = [*self.states[one.slot], *(self.left[one.slot][row] for row in one.rows)] if span.start else []
            assert before == self.texts[span.seq][: span.start]
            certain, self.left[one.slot] = span.tokens[: one.num_certain - 1], span.tokens[one.num_certain - 1 :]
            self.states[one.slot] = before + list(certain)
            assert self.states[one.slot] == self.texts[span.seq][:-1][: len(self.states[one.slot])]
            assert len(self.left[one.slot]) <= MOST_LEFT

    def copy(self, copies: Sequence[StateCopy]) -> None:
        for source, target, num_left in copies:
            assert num_left <= KEPT_LEFT
            self.states[target], self.left[target] = self.states[source], self.left[source][:num_left]

    def apply(self, commit: Commit, verdicts: list[Verdict]) -> None:
        moved = [self.slots[slot] for slot in commit.moves.src]
        assert len(commit.moves.dst) == len(set(commit.moves.dst))
        self.slots.update(zip(commit.moves.dst, moved, strict=True))
        judged = {verdict.seq: verdict.tokens for verdict in verdicts if verdict.seq in self.alive}
        assert [delta.id for delta in commit.deltas] == list(judged)
        for delta in commit.deltas:
            self.receive(delta, judged[delta.id])
        assert commit.finished == [delta.id for delta in commit.deltas if delta.finish]

    def receive(self, delta: Delta, judged: tuple[int, ...]) -> None:
        """Word by word, what a client would take from the verdict."""
        request, text = self.requests[delta.id], self.texts[delta.id]
        before, finish = len(text), None
        for token in judged:
            text.append(token)
            finish = (
                "stop" if token == STOP else "length" if len(text) == len(request.prompt) + request.max_tokens else None
            )
            if finish:
                self.alive.remove(delta.id)
                break
        assert (list(delta.tokens), delta.finish) == (text[before:], finish)
        assert all(done <= tried for done, tried in zip(delta.accepted, delta.drafted, strict=True))
        assert len(delta.tokens) - 1 <= sum(delta.accepted) <= len(delta.tokens)

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            if self.random.random() < 0.4:
                self.submit()
            if self.random.random() < 0.05:
                self.cancel()
            self.round()
        for _ in range(40 * len(self.requests)):  # generous: a round for every token of every request, and recomputing
            if all(rank.is_idle for rank in self.ranks):
                break
            self.round()
        assert self.alive == []
        for rank in self.ranks:
            assert rank.is_idle
            assert rank._pool.num_used == 0


@settings(deadline=None, max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(1, 24),
    page_size=st.integers(1, 4),
    max_rows=st.integers(1, 24),
    max_running=st.integers(1, 6),
    fixed=st.booleans(),
    keeps_states=st.booleans(),
)
def test_no_token_is_lost_doubled_or_read_from_the_wrong_slot(
    seed: int, num_pages: int, page_size: int, max_rows: int, max_running: int, fixed: bool, keeps_states: bool
) -> None:
    """Against every bug of paging, preemption, tree compaction, states and budgets that shows only in combination."""

    def rank() -> Scheduler:
        limits = {"max_rows": 64, "fixed_rows": max_rows} if fixed else {"max_rows": max_rows}
        states = text_states(max_running, PagePool(num_pages, page_size)) if keeps_states else None
        return scheduler(num_pages=num_pages, page_size=page_size, max_running=max_running, states=states, **limits)

    Episode(Random(seed), max_rows, max_running, [rank(), rank()]).run(num_rounds=25)
