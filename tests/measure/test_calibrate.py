"""Trials: rounds of set lengths on every rank, timed by the lead, without a trace in the pairs beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.checkpoints import tiny
from tests.draft.liar import Liar
from tests.worlds import serve, topology
from tpspec.comm.messages import Stats, Tally
from tpspec.draft.protocol import Ask
from tpspec.engine.engine import Engine
from tpspec.engine.hosts import Gathered, InlineHost
from tpspec.measure.calibrate import LENGTHS, MOST, Filled, Timed, filled, trials
from tpspec.measure.savings import Turn, schedule
from tpspec.request import Delta, Request, Sampling
from tpspec.tokens import TokenTree


@given(
    texts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40).map(tuple), min_size=1, max_size=30),
    spare=st.integers(1, 200),
)
def test_every_trial_can_be_served(texts: list[tuple[int, ...]], spare: int) -> None:
    capacity = max(map(len, texts)) + spare
    made = trials(texts, capacity)
    assert len({trial.id for trial in made}) == len(made) <= MOST
    for trial in made:
        assert trial.id < 0
        assert trial.prompt
        assert trial.max_tokens >= 1
        assert len(trial.prompt) + trial.max_tokens <= capacity


@given(num_prompts=st.integers(1, 40), num_trials=st.integers(0, MOST))
def test_each_trial_runs_once_between_the_pairs_and_none_after_the_last(num_prompts: int, num_trials: int) -> None:
    given_trials = [Request(-1 - i, (1,), 4) for i in range(num_trials)]
    made = schedule(num_prompts, given_trials)
    assert [turn for turn in made if isinstance(turn, Request)] == given_trials
    pairs = [turn.index for turn in made if isinstance(turn, Turn)][2:]
    assert pairs == [index for index in range(num_prompts) for _ in range(2)]
    assert all(isinstance(turn, Turn) for turn in made[-2:])


@given(proposed=st.integers(0, 10), wanted=st.integers(0, 10), text=st.integers(1, 5))
def test_a_trial_gets_as_many_drafts_as_it_wants(proposed: int, wanted: int, text: int) -> None:
    """The source's own first, then ids that exist."""
    own = list(range(100, 100 + proposed))
    tree = filled(TokenTree.chain(own), Ask(-1, tuple(range(text)), text, wanted, Sampling()))
    assert len(tree) == wanted
    assert list(tree.tokens[:proposed]) == own[:wanted]
    assert set(tree.tokens[proposed:]) <= set(range(text))


class Elsewhere(InlineHost):
    """A host whose drafts come late, by the lead alone, and are shorter than what was asked for."""

    def take(self) -> dict[int, TokenTree]:
        return {}

    def gather(self, ready: Sequence[int]) -> Gathered:
        return Gathered({seq: tree.pruned(1) for seq, tree in self._trees.items()})


def test_drafts_that_come_as_news_are_filled_up_too() -> None:
    """Against a trial whose rounds are as short as what a remote drafter was in time for."""
    host = Filled(Elsewhere(Liar(300)))
    asks = [Ask(seq, (5, 6, 7), 3, 8, Sampling()) for seq in (-1, 1)]
    for length in LENGTHS:
        host.ask(asks)
        assert len(host.take()[-1]) == length
        news = host.gather([-1, 1]).trees
        assert len(news[1]) == 1
        assert len(news.get(-1, host.take()[-1])) == length


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rounds_have_the_lengths_in_turn_and_other_requests_are_left_alone(model: Path, num_ranks: int) -> None:
    """Against ranks that count turns apart (the world would stop), and a trial's drafts in a pair."""

    def fill(rank: int, engine: Engine) -> None:
        engine.host = Filled(engine.host)

    trial, plain = Request(-1, (5, 6, 7), 24, num_drafts=max(LENGTHS)), Request(1, (8, 9, 8, 9), 12, num_drafts=0)
    told = serve(topology(model, num_ranks, draft={"source": "ngram"}), [trial, plain], begin=fill)
    drafted = [sum(delta.drafted) for delta in told.deltas if delta.id == -1]
    assert drafted[1 : 1 + len(LENGTHS)] == list(LENGTHS)  # the prompt's own round has none
    assert not any(delta.drafted for delta in told.deltas if delta.id == 1)
    alone = serve(topology(model, num_ranks), [plain])
    assert told.tokens[1] == alone.tokens[1]


def test_a_sample_is_a_round_with_the_drafting_that_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the prompt's round in the fit, and against drafts booked to the round that verified them."""
    moments = iter([10.0, 11.0, 13.0])
    monkeypatch.setattr("tpspec.measure.calibrate.perf_counter", lambda: next(moments))

    def stats(forward_s: float, drafting_s: float, count: int) -> Stats:
        tally = Tally(count, 0, count / 100)
        return Stats(forward_s=forward_s, drafting_s=drafting_s, collectives={"mlp": tally, "pick": tally})

    timed = Timed()
    timed.begin(Request(-1, (1, 2, 3), 9))
    timed.add(Delta(-1, (4,)), stats(1.0, 0.1, 5))
    timed.add(Delta(-1, (5, 6), drafted=(1, 1), accepted=(1, 0)), stats(1.7, 0.3, 15))
    timed.add(Delta(-1, (7,), drafted=(1,), accepted=(0,)), stats(2.0, 0.3, 20))
    (sample,) = timed.samples()
    assert (sample.rows, sample.context, sample.reduces, sample.num_drafted) == (3, 3, 10, 1)
    assert (sample.step_s, sample.draft_s) == (pytest.approx(0.7), pytest.approx(0.2))
    assert (sample.reduce_s, sample.host_s) == (pytest.approx(0.1), pytest.approx(0.1))
