"""Suffix trees without trees, against a search of the whole text."""

from __future__ import annotations

import time
from math import prod

from hypothesis import given, strategies as st

from tests.draft.table import ask
from tpspec.draft.suffix import Suffix
from tpspec.tokens import ROOT, TokenTree

FEW = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def tree_of(drafter: Suffix, tokens: list[int], num_tokens: int = 4, seq: int = 0) -> TokenTree:
    (tree,) = drafter.propose([ask(seq, tokens, num_tokens)])
    return tree


def stood_after_the_last(text: list[int], length: int) -> set[tuple[int, ...]]:
    """What follows each earlier place of the last token, read on into itself past the end."""
    found = set()
    for place in (at for at in range(1, len(text)) if text[at - 1] == text[-1]):
        read = list(text)
        for i in range(length):
            read.append(read[place + i])
        found.add(tuple(read[len(text) :]))
    return found


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[above] for above in tree.path(node)) for node in range(len(tree))]


@given(rounds=st.lists(FEW, min_size=1, max_size=4))
def test_a_tree_holds_what_stood_there_and_nothing_else(rounds: list[list[int]]) -> None:
    """A place that is looked up one off, or before it is known, proposes what never stood there."""
    drafter, text = Suffix(9, min_odds=0), []
    for added in rounds:
        text += added
        found = paths(tree_of(drafter, text, 12))
        assert len({*found}) == len(found)
        assert {*found} <= {path for length in range(1, 13) for path in stood_after_the_last(text, length)}
        assert bool(found) == bool(stood_after_the_last(text, 1))


@given(text=FEW, copies=st.integers(1, 3), branches=st.integers(1, 3), num_tokens=st.integers(0, 12))
def test_nodes_stand_best_first_and_siblings_differ(
    text: list[int], copies: int, branches: int, num_tokens: int
) -> None:
    """What does not pay is cut from the end: it must be the worst."""
    tree = tree_of(Suffix(branches), text * copies, num_tokens)
    assert len(tree) <= num_tokens
    odds = tree.odds or ()
    worth = [prod(odds[above] for above in tree.path(node)) for node in range(len(tree))]
    assert worth == sorted(worth, reverse=True)
    for node in range(ROOT, len(tree)):
        siblings = [tree.tokens[child] for child in tree.children(node)]
        assert len({*siblings}) == len(siblings) <= branches


def test_the_frequent_wins_over_the_latest() -> None:
    assert tree_of(Suffix(), [1, 2, 9, 1, 2, 8, 1, 2, 7, 1, 3, 6, 1], 1).tokens == (2,)


def test_who_agrees_longer_wins_over_the_frequent() -> None:
    text = [5, 6, 7, 8, 1, 4, 0, 1, 2, 9, 1, 2, 5, 6, 7, 8, 1]
    assert tree_of(Suffix(), text, 1).tokens == (4,)


def test_a_period_goes_on_past_the_end() -> None:
    assert tree_of(Suffix(), [4, 4, 4, 4, 4], 6).tokens == (4,) * 6


def test_an_answer_that_has_ended_is_known_to_others_and_its_prompt_is_not() -> None:
    """Answers follow one another's turns of phrase; but what somebody asked is his own."""
    drafter = Suffix(min_odds=0)
    tree_of(drafter, [1, 2, 3, 4, 5], seq=1)  # the prompt is 1
    assert not tree_of(drafter, [3], seq=2)
    drafter.forget(1)
    assert tree_of(drafter, [3], seq=3).tokens == (4, 5)
    assert not tree_of(drafter, [1], seq=4)
    private = Suffix(min_odds=0, kept_tokens=0)
    tree_of(private, [1, 2, 3, 4, 5], seq=1)
    private.forget(1)
    assert not tree_of(private, [3], seq=3)


def test_one_answer_does_not_go_on_with_the_next() -> None:
    drafter = Suffix()
    for seq, answer in enumerate(([0, 5, 6], [0, 7, 8])):
        tree_of(drafter, answer, seq=seq)
        drafter.forget(seq)
    assert tree_of(drafter, [6], seq=9).tokens == ()


def test_of_the_answers_as_many_tokens_are_kept_as_wanted() -> None:
    """A server that runs for weeks must not keep all it ever said."""
    drafter = Suffix(kept_tokens=20)
    for seq in range(9):
        tree_of(drafter, [0, 10 * seq, 10 * seq + 1, 10 * seq + 2], seq=seq)
        drafter.forget(seq)
    known = [bool(tree_of(drafter, [10 * seq], seq=100 + seq)) for seq in range(9)]
    assert known == sorted(known)
    assert 2 <= sum(known) <= 5


def test_guesses_that_fail_are_trusted_less() -> None:
    drafter, text = Suffix(min_odds=0), [1, 2, 3, 4, 5, 1, 2]
    hopeful = tree_of(drafter, text, 1)
    for token in range(100, 140):
        text += [token, 1, 2]
        tree = tree_of(drafter, text, 1)
    assert tree.odds is not None
    assert hopeful.odds is not None
    assert tree.odds[0] < hopeful.odds[0] / 3


def test_what_is_unlikely_is_not_proposed() -> None:
    sizes = [len(tree_of(Suffix(min_odds=odds), [1, 2, 3, 4, 5, 6, 7, 9, 1], 6)) for odds in (0, 10, 60)]
    assert sizes[0] == 6
    assert sizes[0] > sizes[1] > sizes[2] == 0


def test_a_round_costs_what_is_new_not_what_there_is() -> None:
    """100 times the text must not be 100 times the work of a round."""

    def seconds(length: int) -> float:
        drafter, text = Suffix(), [i * 7919 % 97 for i in range(length)]
        tree_of(drafter, text)
        best = float("inf")
        for token in range(97):
            text.append(token)
            begin = time.perf_counter()
            tree_of(drafter, text)
            best = min(best, time.perf_counter() - begin)
        return best

    assert seconds(100_000) < 10 * seconds(1000)
