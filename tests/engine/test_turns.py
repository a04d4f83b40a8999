"""Who runs when, and which way is best: nobody is left out, and the better way is found and kept."""

from __future__ import annotations

from hypothesis import given, strategies as st

from tpspec.engine.turns import LONG_ROUNDS, TRIAL_ROUNDS, Trials, Turns


@given(st.lists(st.sets(st.integers(0, 9)), min_size=4, max_size=40))
def test_everybody_runs_in_one_of_two_rounds(rounds: list[set[int]]) -> None:
    """A sequence that joined the half that just ran, or whose half is never called, would stand still."""
    turns = Turns()
    before: set[int] = set()
    ran: set[int] = set()
    for ready in rounds:
        turn = set(turns.next(sorted(ready)))
        assert turn <= ready
        assert bool(turn) == bool(ready)
        for seq in ready & before:
            assert seq in turn | ran
        before, ran = ready - turn, turn


def test_halves_are_as_even_as_can_be() -> None:
    turns = Turns()
    halves = [turns.next([1, 2, 3, 4, 5]) for _ in range(4)]
    assert sorted(map(len, halves[:2])) == [2, 3]
    assert halves[:2] == halves[2:]
    assert sorted([*halves[0], *halves[1]]) == [1, 2, 3, 4, 5]


def test_one_sequence_runs_in_every_round() -> None:
    turns = Turns()
    assert [turns.next([7]) for _ in range(3)] == [[7]] * 3


def test_the_best_way_is_found_kept_and_left_when_it_is_no_longer_best() -> None:
    trials, rates = Trials(3), [1.0, 3.0, 2.0]
    ways = []
    for _ in range(3 * TRIAL_ROUNDS + LONG_ROUNDS):
        ways.append(trials.way)
        trials.add(int(rates[trials.way]), 1.0)
    assert ways == [0] * TRIAL_ROUNDS + [1] * TRIAL_ROUNDS + [2] * TRIAL_ROUNDS + [1] * LONG_ROUNDS
    rates = [1.0, 1.0, 5.0]
    for _ in range(4 * LONG_ROUNDS):
        ways.append(trials.way)
        trials.add(int(rates[trials.way]), 1.0)
    assert ways[-LONG_ROUNDS // 2 :].count(2) > LONG_ROUNDS // 3


def test_a_single_way_is_never_left() -> None:
    trials = Trials(1)
    for _ in range(3 * LONG_ROUNDS):
        trials.add(1, 0.1)
        assert trials.way == 0
