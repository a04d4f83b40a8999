"""Under a grammar the law is the target's among what the grammar allows, at the bonus token too, whatever drafts.

The grammar of these tests, of letters a and b, lets no two b stand together: behind one it leaves no choice.
"""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.laws.exact import distance
from tests.laws.letters import END, constraint
from tests.laws.tiny import (
    MANY,
    PLAIN,
    PROMPT,
    TRUNCATED,
    VOCAB,
    certain_chain,
    certain_tree,
    coupled_chain,
    law_after,
    sampled_chain,
    sampled_tree,
    silent,
    speculative_law,
)
from tpspec.request import Sampling
from tpspec.tokens import ROOT, TokenTree
from tpspec.verify import RULES, rule
from tpspec.verify.allowed import Constraint
from tpspec.verify.rows import Case

A, B = 0, 1
APART = "(a|ba)*"
EXACT = 1e-12
PAIRS = [(name, drafter) for name in RULES for drafter in (silent, certain_chain, certain_tree)]
PAIRS += [("match", coupled_chain), ("rejection", sampled_chain), ("rejection", sampled_tree)]


def may_come(text: tuple[int, ...]) -> list[bool]:
    """By the grammar, said plainly; no token ends these texts."""
    return [True, text[-1:] != (B,), False]


def plain_law(wanted: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The softmax over what may come is the law given that nothing else does; truncation is of what is left."""
    law = {}
    for text in product(range(VOCAB), repeat=length):
        odds = 1.0
        for i, token in enumerate(text):
            banned = {i: -1e4 for i, ok in enumerate(may_come(text[:i])) if not ok}
            bias = {i: wanted.logit_bias.get(i, 0.0) + banned.get(i, 0.0) for i in range(VOCAB)}
            probs = law_after(PROMPT + text[:i], len(PROMPT), msgspec.structs.replace(wanted, logit_bias=bias))
            odds *= float(np.where(probs < 1e-300, 0.0, probs)[token])
        law[text] = odds
    return law


def bound_law(name: str, drafter, wanted: Sampling, length: int, kind: type[Constraint] = Constraint):
    return speculative_law(rule(name), drafter, wanted, length, bound=lambda: constraint(APART, kind, stop_ids=()))


@pytest.mark.parametrize("wanted", [PLAIN, MANY, TRUNCATED[3]], ids=["plain", "penalties", "truncated"])
@pytest.mark.parametrize(("name", "drafter"), PAIRS)
def test_a_grammar_keeps_the_law_of_the_target_among_what_it_allows(name: str, drafter, wanted: Sampling) -> None:
    """Stands against a bonus token or a draft's row without its mask, and a mask of the root at every row."""
    length = 3 if drafter is certain_chain else 2
    assert distance(bound_law(name, drafter, wanted, length), plain_law(wanted, length)) < EXACT


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("drafter", [silent, certain_tree])
def test_temperature_zero_is_the_best_that_is_allowed(name: str, drafter) -> None:
    assert distance(bound_law(name, drafter, Sampling(), 4), plain_law(Sampling(), 4)) < EXACT


class Wasteful(Constraint):
    """Drops drawn tokens for their value."""

    def draft(self, output, tree):
        fits = self.fitting(output, TokenTree(tree.tokens, tree.parents))
        return tree.pruned(len(fits)) if tree.is_chain else tree


def test_a_drawn_token_that_is_cut_for_its_value_would_bend_the_law() -> None:
    """The reason why `fitting` keeps it; and that these tests would notice."""
    assert distance(bound_law("rejection", sampled_chain, PLAIN, 2, Wasteful), plain_law(PLAIN, 2)) > 1e-3


TREES = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1, exclude_max=True)), max_size=7).map(
    lambda nodes: TokenTree(
        tuple(token for token, _ in nodes), tuple(int(place * (i + 1)) - 1 for i, (_, place) in enumerate(nodes))
    )
)
PATTERNS = st.sampled_from([APART, "(a|b)*", "ab", "a?b?a?b", "(ab){2,3}", "a|bb(a|b)", ""])


@settings(max_examples=60, deadline=None)
@given(pattern=PATTERNS, output=st.lists(st.integers(0, 1), max_size=3), tree=TREES, is_asked=st.booleans())
def test_a_row_depends_on_its_path_alone(pattern: str, output: list[int], tree: TokenTree, is_asked: bool) -> None:
    """Stands against a matcher that is not rolled back, or that what was asked of it before has changed."""
    bound = constraint(pattern)
    if is_asked:
        bound.draft(output, tree)
    rows = bound.allowed(output, tree)
    for node in range(ROOT, len(tree)):
        path = [tree.tokens[above] for above in tree.path(node)]
        fresh = constraint(pattern)
        stands = fresh.keep([], [*output, *path]).tokens == (*output, *path) and END not in path
        expected = fresh.allowed([*output, *path], TokenTree())[0] if stands else None
        assert (rows[node + 1] is None) == (expected is None)
        assert expected is None or rows[node + 1].tolist() == expected.tolist()


@settings(max_examples=40, deadline=None)
@given(pattern=PATTERNS, output=st.lists(st.integers(0, 1), max_size=3), tree=TREES)
def test_a_draft_is_cut_where_no_draw_can_reach_it_and_nowhere_else(
    pattern: str, output: list[int], tree: TokenTree
) -> None:
    rows = constraint(pattern).allowed(output, tree)
    reached = [ids is not None for ids in rows]
    right = [
        node
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True))
        if reached[parent + 1] and rows[parent + 1][token]
    ]
    assert constraint(pattern).fitting(output, tree) == tree.only(right)


@settings(max_examples=40, deadline=None)
@given(pattern=PATTERNS, output=st.lists(st.integers(0, 1), max_size=3))
def test_what_is_drafted_because_nothing_else_may_come_is_that(pattern: str, output: list[int]) -> None:
    tree = constraint(pattern).draft(output, TokenTree())
    for node, ids in enumerate(constraint(pattern).allowed(output, tree)[:-1]):
        assert [i for i, ok in enumerate(ids) if ok] == [tree.tokens[node]]


def test_texts_end_where_nothing_can_follow_and_break_where_no_row_was_masked() -> None:
    assert constraint("ab|abb").keep([], (A, B)) == ((A, B), None)
    assert constraint("ab|abb").keep([], (A, B, END, A)) == ((A, B, END), "stop")
    assert constraint("ab|abb", stop_ids=()).keep([], (A, B, END)) == ((A, B), "error")
    assert constraint("ab|abb").keep([A], (B, B, A)) == ((B, B), "stop")  # without a stop token
    assert constraint("ab|abb").keep([], (A, A)) == ((A,), "error")
    assert constraint("ab").keep([B], (A,)) == ((), "error")  # the text that began elsewhere is another grammar's
    assert constraint("ab").keep([A, B], (A,)) == ((), "stop")
    assert constraint("a(b|a)*", stop_ids={END, B}).keep([], (A, B)) == ((A, B), "stop")  # a stop token of the text


def test_a_minimum_gives_way_to_a_grammar_that_allows_nothing_else() -> None:
    """Otherwise no token is left to draw at the end of a text that can be no longer."""
    ends = frozenset({A, END})
    long = msgspec.structs.replace(PLAIN, min_tokens=4, withheld=ends)
    for pattern, withheld in (("ba*", frozenset()), ("b(a|b)*", ends)):
        case = Case(0, 0, TokenTree(), (*PROMPT, B), len(PROMPT), long, constraint(pattern, stop_ids=ends))
        assert case.draws()[0].withheld == withheld
