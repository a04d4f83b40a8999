"""Prompt lookup against a search of the whole text, through growth and rollback."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from tpspec.draft.ngram import BELIEF, Ngram, copied
from tpspec.draft.prefix import WINDOW, common_length
from tpspec.draft.protocol import Ask
from tpspec.request import Sampling

FEW = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def ask(tokens: list[int], num_tokens: int = 4, seq: int = 0) -> Ask:
    return Ask(seq, tokens, 1, num_tokens, Sampling())


def searched(tokens: list[int], num_tokens: int, low: int) -> tuple[list[int], int]:
    """What followed the latest earlier place of the longest n-gram that is looked up, one token copied at a time.

    And how many tokens agree there, up to 16.
    """
    for length in (8, 4, 2, 1, low):
        for end in range(len(tokens) - 1, length - 1, -1):
            if low <= length < len(tokens) and tokens[end - length : end] == tokens[-length:]:
                text = list(tokens)
                for i in range(num_tokens):
                    text.append(text[end + i])
                agreed = next((n for n in range(16) if n >= end or tokens[end - n - 1] != tokens[-n - 1]), 16)
                return text[len(tokens) :], agreed
    return [], 0


@given(
    rounds=st.lists(st.tuples(st.integers(0, 12), FEW), min_size=1, max_size=6),
    low=st.integers(1, 5),
    num_tokens=st.integers(0, 9),
)
def test_equals_a_search(rounds: list[tuple[int, list[int]]], low: int, num_tokens: int) -> None:
    """Each round takes some tokens back and adds others: an index that forgets to undo finds what no longer stands."""
    drafter = Ngram(min_match=low, floor=0)
    text: list[int] = []
    for num_back, added in rounds:
        text = text[: max(0, len(text) - num_back)] + added
        (tree,) = drafter.propose([ask(text, num_tokens)])
        assert tree.is_chain
        assert list(tree.tokens) == searched(text, num_tokens, low)[0]


@given(text=FEW, copies=st.integers(1, 3))
def test_the_odds_are_those_of_as_many_tokens_as_agree(text: list[int], copies: int) -> None:
    """A match counted too short is not trusted, one counted too long costs rows; neither shows in any text."""
    text = text * copies
    (tree,) = Ngram(floor=0).propose([ask(text, 3)])
    wanted, agreed = searched(text, 3, 1)
    assert tree.odds is not None or not wanted
    assert list(tree.odds or ()) == pytest.approx([BELIEF[min(agreed + i, 16) - 1] for i in range(len(wanted))])


def test_guesses_that_fail_are_trusted_less_even_when_nobody_verified_them() -> None:
    """A drafter that was throttled to zero would otherwise never be heard of again, or never be silenced."""
    drafter, text = Ngram(floor=0), [1, 2, 3, 4, 5, 1, 2]
    (hopeful,) = drafter.propose([ask(text, 1)])
    for token in range(100, 140):  # each time 1 2 stands there, something else follows
        text += [token, 1, 2]
        (tree,) = drafter.propose([ask(text, 1)])
    assert hopeful.odds is not None
    assert tree.odds is not None
    assert tree.odds[0] < hopeful.odds[0] / 3


def test_what_is_unlikely_is_not_proposed() -> None:
    """Rows of hopeless tokens cost time in every round with a fixed draft length."""
    text = [1, 2, 3, 4, 5, 6, 7, 9, 1]
    sizes = [len(Ngram(floor=floor).propose([ask(text, 6)])[0]) for floor in (0, 10, 20, 30)]
    assert sizes == [6, 3, 1, 0]


def test_the_longest_match_wins_over_a_later_one() -> None:
    text = [1, 2, 3, 7, 9, 3, 8, 1, 2, 3]
    (tree,) = Ngram().propose([ask(text, 1)])
    assert tree.tokens == (7,)


def test_a_period_goes_on_past_the_end() -> None:
    assert copied([5, 1, 2, 3, 1, 2, 3], 4, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    (tree,) = Ngram().propose([ask([4, 4, 4, 4, 4], 6)])
    assert tree.tokens == (4,) * 6


def test_nothing_seen_before_means_silence() -> None:
    trees = Ngram().propose([ask([1, 2, 3], seq=1), ask([], seq=2), ask([5], seq=3)])
    assert [len(tree) for tree in trees] == [0, 0, 0]


def test_sequences_do_not_see_each_other() -> None:
    """One user's prompt proposed to another would leak it through timing."""
    drafter = Ngram()
    drafter.propose([ask([1, 2, 3, 4], seq=1)])
    assert len(drafter.propose([ask([1, 2], seq=2)])[0]) == 0
    drafter.forget(1)
    drafter.forget(99)
    assert len(drafter.propose([ask([1, 2], seq=1)])[0]) == 0


def test_a_round_costs_what_is_new_not_what_there_is() -> None:
    """100 times the text must not be 100 times the work of a round."""

    def seconds(length: int) -> float:
        drafter, text = Ngram(), [i * 7919 % 1009 for i in range(length)]
        drafter.propose([ask(text)])
        best = float("inf")
        for token in range(200):
            text.append(token)
            begin = time.perf_counter()
            drafter.propose([ask(text)])
            best = min(best, time.perf_counter() - begin)
        return best

    assert seconds(100_000) < 10 * seconds(1000)


@given(kept=FEW, old=st.lists(st.integers(0, 2), max_size=WINDOW), new=FEW)
def test_the_common_length_of_short_texts_is_the_common_prefix(kept: list[int], old: list[int], new: list[int]) -> None:
    a, b = kept + old, kept + new
    prefix = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
    if prefix <= WINDOW or len(a) <= WINDOW:
        assert common_length(a, b) == prefix
    else:
        assert common_length(a, b) >= prefix
