"""Several sources in order: who is asked, and what becomes of what two of them say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from tests.draft.table import ask
from tpspec.comm.messages import Costs
from tpspec.draft.cascade import Cascade, merged, promise
from tpspec.draft.protocol import Ask, Needs, Taps
from tpspec.tokens import NO_DRAFT, ROOT, Draws, TokenTree, Verdict, path_odds

DEAR = Costs(round_s=1.0, row_s=0.25, draft_s=0.0, rate=1.0)  # a row takes what a quarter of a token takes


class Says:
    """A source that says one thing, and remembers for whom."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree, self.asked = tree, list[int]()
        self.needs = Needs(gives_odds=tree.odds is not None or not tree, gives_q=tree.draws is not None)

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        self.asked += [ask.seq for ask in asks]
        return [self.tree] * len(asks)

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None: ...
    def forget(self, seq: int) -> None: ...


def chain(tokens: Sequence[int], odds: float) -> TokenTree:
    return TokenTree.chain(tokens, odds=[odds] * len(tokens))


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Siblings differ; no node is likelier, with all above it, than one before it."""
    nodes = sorted(draw(st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=8)), key=len)
    kept: list[tuple[int, ...]] = []
    for node in nodes:
        if len(node) == 1 or node[:-1] in kept:
            kept.append(node)
    odds = draw(st.lists(st.sampled_from([0.1, 0.5, 0.9, 1.0]), min_size=len(kept), max_size=len(kept)))
    parents = tuple(kept.index(node[:-1]) if len(node) > 1 else ROOT for node in kept)
    return TokenTree(tuple(node[-1] for node in kept), parents, odds=tuple(odds))


def texts(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Of what each node would have the text go on with, the odds of its last token."""
    return {tuple(tree.tokens[at] for at in tree.path(node)): odds for node, odds in enumerate(tree.odds or ())}


@given(trees(), trees(), st.integers(0, 16))
def test_of_two_trees_the_likeliest_futures_are_kept(one: TokenTree, other: TokenTree, most: int) -> None:
    """Stands against a future that is verified twice, a child without its parent, and odds of the less sure source."""
    both, said = merged(one, other, most), [texts(one), texts(other)]
    assert both.is_sound
    all_said = {text: max(each.get(text, 0.0) for each in said) for each in said for text in each}
    assert len(both) == len(texts(both)) == min(most, len(all_said))
    assert texts(both).items() <= all_said.items()
    paths = path_odds(both.parents, both.odds or ())
    assert all(first >= second for first, second in pairwise(paths))
    whole = merged(one, other, 99)
    assert both == whole.pruned(most)


def test_who_comes_later_is_asked_where_others_promise_less_than_he_usually_wins() -> None:
    """One token that looked like a match kept a head silent that is right twice as often."""
    sure, unsure = chain([1, 2, 3, 4], 0.9), chain([1], 0.2)
    for first, is_enough in ((sure, True), (unsure, False), (NO_DRAFT, False)):
        head = Says(chain([5, 6], 0.8))
        (tree,) = Cascade([Says(first), head], merges=True).propose([ask(7, [1, 2], 8)])
        assert head.asked == ([] if is_enough else [7])
        assert texts(tree) == (texts(first) if is_enough else texts(first) | texts(head.tree))


def test_a_source_that_wins_nothing_is_asked_only_where_others_are_silent() -> None:
    weak = Says(chain([5], 0.01))
    cascade = Cascade([Says(chain([1], 0.3)), weak], merges=True)
    for _ in range(60):
        cascade.propose([ask(0, [1], 8)])
    assert len(weak.asked) < 30
    before = len(weak.asked)
    silent = Cascade([Says(NO_DRAFT), weak], merges=True)
    for _ in range(60):
        silent.propose([ask(0, [1], 8)])
    assert len(weak.asked) == before + 60


def test_without_trees_the_better_of_two_is_taken_whole() -> None:
    """`draft.tree: chain` keeps its word."""
    weak, good = chain([1, 2], 0.3), chain([5, 6], 0.8)
    for order in ([weak, good], [good, weak]):
        assert Cascade([Says(tree) for tree in order]).propose([ask(0, [1], 8)]) == [good]


@pytest.mark.parametrize("blind", [TokenTree.chain([5]), TokenTree.chain([5], [Draws((5, 6), (0.5, 0.5))], [0.8])])
def test_what_was_drawn_or_has_no_odds_is_neither_mixed_nor_judged(blind: TokenTree) -> None:
    """The law of rejection holds for drafts that are judged by the q they came from, whatever they are."""
    weak = chain([1], 0.01)
    for first, second in ((weak, blind), (blind, weak)):
        says = [Says(first), Says(second)]
        assert Cascade(says, merges=True).propose([ask(0, [1], 8)]) == [first]
        assert not says[1].asked
    assert Cascade([Says(NO_DRAFT), Says(blind)], merges=True).propose([ask(0, [1], 8)]) == [blind]


def test_what_a_tree_promises_is_less_what_its_rows_take() -> None:
    tree = chain([1, 2, 3], 0.5)
    assert promise(tree, None) == pytest.approx(0.5 + 0.25 + 0.125)
    assert promise(tree, DEAR) == pytest.approx(0.25)
    assert promise(NO_DRAFT, DEAR) == 0.0
