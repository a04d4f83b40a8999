"""Trees that are verified whole: when they pay, when they stop, and when they are tried again."""

from __future__ import annotations

from itertools import pairwise

from tpspec.comm.messages import Costs
from tpspec.engine.pace import PROBE_ROUNDS
from tpspec.engine.whole import Whole
from tpspec.request import Sampling
from tpspec.tokens import NO_DRAFT, TokenTree, Verdict
from tpspec.verify.rows import Case

SIZE = 20
COSTS = Costs(round_s=0.01, row_s=0.0004, draft_s=0.0)  # a tree takes nearly as long as a round


def asked_in(pace: Whole, rounds: int, won: int, seq: int = 0) -> list[int]:
    """The rounds in which a tree was asked for, each of which won so many tokens."""
    rounds_with_a_tree = []
    for number in range(rounds):
        wanted = pace.wanted(seq)
        tree = TokenTree.chain([1] * wanted) if wanted else NO_DRAFT
        path = tuple(range(won if wanted else 0))
        pace.learn([Case(seq, 0, tree, (1,), 1, Sampling())], [Verdict(seq, path, (1,) * (len(path) + 1))])
        rounds_with_a_tree += [number] if wanted else []
    return rounds_with_a_tree


def made() -> Whole:
    pace = Whole(SIZE)
    pace.costs = COSTS
    return pace


def test_what_pays_goes_on() -> None:
    assert len(asked_in(made(), 50, won=2)) >= 49


def test_what_does_not_pay_stops_and_is_tried_ever_more_seldom() -> None:
    """`auto` must not lose a round in twenty for ever to a source that never wins."""
    rounds = asked_in(made(), 40 * PROBE_ROUNDS, won=0)
    gaps = [b - a for a, b in pairwise(rounds) if b - a > 1]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 8 * PROBE_ROUNDS
    assert len(rounds) < 20


def test_a_new_sequence_does_not_have_to_find_out_again() -> None:
    pace = made()
    asked_in(pace, 20, won=0)
    assert pace.wanted(99) == 0


def test_what_begins_to_pay_is_found_out() -> None:
    pace = made()
    asked_in(pace, 60, won=0)
    assert len(asked_in(pace, 600, won=6)) > 100


def test_no_tree_is_cut() -> None:
    """A window without its last row teaches nothing."""
    tree = TokenTree.chain([1] * SIZE)
    assert made().cut({3: tree}, 1) == {3: tree}
