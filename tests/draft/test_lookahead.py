"""Lookahead with a target that is a table: whatever it says after one token is known."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from tests.draft.table import ask, logits_after
from tpspec.draft.lookahead import Lookahead
from tpspec.request import Sampling
from tpspec.tokens import ROOT, TokenTree, Verdict
from tpspec.verify.match import Match
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import Case, RowLogits

PERIOD = 31


def follows(token: int) -> int:
    """What the target says after it: one long cycle, that a short text has not seen."""
    return (token * 3 + 1) % PERIOD


def judged(seq: int, text: list[int], tree: TokenTree) -> Verdict:
    picks = tuple(follows(token) for token in (text[-1], *tree.tokens))
    node, path, tokens = ROOT, [], [picks[0]]
    while (child := next((c for c in tree.children(node) if tree.tokens[c] == tokens[-1]), None)) is not None:
        node = child
        path.append(node)
        tokens.append(picks[node + 1])
    return Verdict(seq, tuple(path), tuple(tokens), picks)


def rounds(drafter: Lookahead, text: list[int], num_tokens: int, number: int) -> list[int]:
    """Tokens won in each round."""
    won = []
    for _ in range(number):
        (tree,) = drafter.propose([ask(0, text, num_tokens)])
        verdict = judged(0, text, tree)
        drafter.observe([verdict], None)
        text += verdict.tokens
        won.append(len(verdict.tokens))
    return won


@given(
    window=st.integers(1, 5),
    level=st.integers(2, 4),
    guesses=st.integers(1, 3),
    num_tokens=st.integers(0, 30),
    prompt=st.lists(st.integers(0, PERIOD - 1), min_size=1, max_size=9),
)
def test_what_the_window_learns_is_what_the_target_says(
    window: int, level: int, guesses: int, num_tokens: int, prompt: list[int]
) -> None:
    """A pick taken from a neighbour's row makes n-grams that nobody ever said."""
    drafter, text = Lookahead(window=window, level=level, guesses=guesses), list(prompt)
    for _ in range(8):
        (tree,) = drafter.propose([ask(0, text, num_tokens)])
        assert len(tree) <= num_tokens
        for node in range(ROOT, len(tree)):
            children = [tree.tokens[child] for child in tree.children(node)]
            assert len({*children}) == len(children)
        verdict = judged(0, text, tree)
        drafter.observe([verdict], None)
        text += verdict.tokens
    for first, grams in drafter._texts[0]._pool.items():
        assert len(grams) <= guesses
        for gram in grams:
            at = [i for i in range(len(prompt)) if prompt[i : i + level] == [first, *gram][: len(prompt) - i]]
            said = [follows(token) for token in (first, *gram[:-1])]
            assert at or said == list(gram)


def test_the_window_pays_before_the_text_repeats_itself() -> None:
    """What it is for: without a window nothing is known of a text that says everything for the first time."""
    text = [1, 20, 7, 11, 25, 9]
    won = rounds(Lookahead(window=5, level=4, guesses=3), text, 32, 8)
    assert 4 in won
    assert len(text) < PERIOD


def test_no_more_room_means_fewer_columns_and_no_harm() -> None:
    drafter = Lookahead()
    assert rounds(drafter, [1, 20, 7], 3, 4)
    assert len(drafter.propose([ask(0, [*range(40)], 3)])[0]) == 3


def test_a_verdict_on_less_or_on_another_source_s_tree_teaches_nothing_wrong() -> None:
    """The scheduler cuts trees, a rule may not know what the target said, and a sequence may be gone."""
    drafter = Lookahead(window=2, level=3, guesses=2)
    drafter.propose([ask(0, [1, 2, 3, 4], 12)])
    drafter.observe([Verdict(0, (), (5,), (5,)), Verdict(7, (), (5,), (5, 6))], None)
    drafter.propose([ask(0, [1, 2, 3, 4, 5], 12)])
    drafter.observe([Verdict(0, (), (6,))], None)
    drafter.observe([Verdict(0, (), (6,), (6, 7, 8, 9, 10, 11))], None)
    assert all(len(column) == 1 for column in drafter._texts[0]._columns)


def test_match_tells_what_the_target_said_at_every_row() -> None:
    tree = TokenTree((4, 5, 6), (ROOT, ROOT, 0))
    text = [1, 2, 3]
    rows = [logits_after([*text, *(tree.tokens[i] for i in tree.path(node))]) for node in range(ROOT, 3)]
    case = Case(0, 0, tree, text, 1, Sampling())
    (verdict,) = Match().judge([case], RowLogits(torch.stack(rows), 11), CounterNoise())
    assert verdict.picks == tuple(int(row.argmax()) for row in rows)
