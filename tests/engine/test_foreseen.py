"""The lead's copy of what was read ahead: the drafter's own answer when all was heard, else a part of it or nothing."""

from __future__ import annotations

import random

from hypothesis import given, strategies as st

from tests.draft.table import Table, ask, expected, next_token
from tpspec.cache.pages import PagePool
from tpspec.draft.ahead import Ahead, Policy
from tpspec.draft.model import ModelDrafter
from tpspec.engine.foreseen import Foreseen
from tpspec.request import Sampling
from tpspec.tokens import Branch, TokenTree
from tpspec.verify.noise import CounterNoise

VOCAB = 11


@given(
    seed=st.integers(0, 10**6), lost=st.sampled_from([0.0, 0.3]), delay=st.integers(0, 4), width=st.sampled_from([1, 3])
)
def test_what_is_found_at_home_is_what_the_drafter_would_answer(seed: int, lost: float, delay: int, width: int) -> None:
    """A branch put under the wrong text would be verified as a draft of another sentence: rows for nothing, and under
    rejection a draw that does not come from its q."""
    chance = random.Random(seed)
    ahead = Ahead(
        ModelDrafter(CounterNoise(), "coupled", VOCAB), Table(), PagePool(200, 4), Policy(ahead=True, width=width)
    )
    home, text, on_the_way = Foreseen(), [1, 2, 3], list[Branch]()
    found = 0
    for _ in range(8):
        asked = ask(0, text, 3)
        ahead.hear(asked)
        home.tell(asked)
        tree = home.tree(0, 3)
        assert tree.tokens == expected(asked)[: len(tree)]
        found += len(tree)
        while not ahead.answers():
            ahead.work()
        for _ in range(chance.randint(0, 6)):
            ahead.work()
        on_the_way += [branch for branch in ahead.branches() if chance.random() >= lost]
        while len(on_the_way) > delay:
            home.learn(on_the_way.pop(0))
        accepted = list(expected(asked))[: chance.randint(0, 3)]
        text = [*text, *accepted, next_token([*text, *accepted], Sampling())]
    assert found or lost or delay or width


def test_a_branch_of_another_text_is_dropped() -> None:
    home = Foreseen()
    home.tell(ask(0, [1, 2]))
    home.learn(Branch(0, 2, (), (5, 6), (0.5, 0.2)))
    home.tell(ask(0, [1, 2, 6]))
    assert len(home.tree(0, 3)) == 0
    home.learn(Branch(0, 2, (5,), (7,), (0.9,)))  # the text went another way
    home.learn(Branch(0, 2, (6,), (8,), (0.9,)))  # this is its way, read before the drafter knew
    home.learn(Branch(0, 4, (), (9,), (0.9,)))  # of a text that nobody has
    home.learn(Branch(1, 2, (), (9,), (0.9,)))
    assert home.tree(0, 3).tokens == (8,)
    home.forget(0)
    assert len(home.tree(0, 3)) == 0


def test_an_answer_mends_a_hole() -> None:
    """One branch lost, and everything below it would be unknown for as long as the drafter is right."""
    home = Foreseen()
    home.tell(ask(0, [1, 2]))
    home.learn(Branch(0, 2, (5, 6), (7,), (0.9,)))  # what comes between was lost
    home.adopt(0, 2, TokenTree.chain([5, 6], odds=[0.8, 0.7]))
    home.learn(Branch(0, 2, (5, 6), (8,), (0.9,)))
    home.tell(ask(0, [1, 2, 5, 6]))
    assert home.tree(0, 3) == TokenTree.chain([8], odds=[0.9])
