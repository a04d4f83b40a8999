"""A source that does not pay falls silent, costs next to nothing then, and is heard again when it does."""

from __future__ import annotations

from itertools import pairwise

from msgspec.structs import replace

from tests.draft.table import VOCAB, Table, ask, next_token
from tpspec.cache.pages import PagePool
from tpspec.comm.messages import Costs
from tpspec.draft.ahead import Ahead, Grown, Policy
from tpspec.draft.model import ModelDrafter
from tpspec.draft.outlook import FIRST_PAUSE, Outlook
from tpspec.verify.noise import CounterNoise

DEAR = Costs(round_s=0.010, row_s=0.0002, draft_s=0.003, rate=100.0)  # a drafted token takes a third of a round


def rounds(num: int, right: float) -> list[int]:
    """How many tokens were drafted in each of so many rounds, where so many of every hundred drafts are right."""
    grown = Grown(Ahead(ModelDrafter(CounterNoise(), "coupled", VOCAB), Table(), PagePool(4000, 4), Policy()))
    text, drafted = [1, 2, 3], []
    for number in range(num):
        (tree,) = grown.propose([replace(ask(0, text, 4), costs=DEAR)])
        drafted.append(len(tree))
        token = next_token(text, ask(0, text, 1).sampling)
        text = [*text, token if (number * 7) % 100 < 100 * right else (token + 1) % VOCAB]
    return drafted


def test_a_source_that_is_seldom_right_is_left_alone() -> None:
    """Against a first token that is always read, for odds that nobody has checked: a third of the speed is lost."""
    drafted = rounds(600, right=0.1)
    assert drafted[0] > 0
    assert sum(map(bool, drafted[100:])) <= 6
    assert any(drafted[100:])


def test_a_source_that_is_often_right_goes_on() -> None:
    assert all(rounds(100, right=0.9))


def test_trials_become_rarer_until_one_pays() -> None:
    """Against a trial every so many rounds for ever, and a pause that outlives its reason."""
    outlook, trials = Outlook(), list[int]()
    for number in range(1000):
        if outlook.tries:
            trials.append(number)
        outlook.answered(drafted=outlook.tries)
    gaps = [after - before for before, after in pairwise([0, *trials])]
    assert gaps[0] == FIRST_PAUSE
    assert all(after > 1.9 * before for before, after in pairwise(gaps))
    outlook.answered(drafted=True)
    for _ in range(FIRST_PAUSE):
        assert not outlook.tries
        outlook.answered(drafted=False)
    assert outlook.tries
