"""A round that is launched before it is known: what is said to a target, and what is known of it on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tpspec.engine.next_round import ANY, NextRound
from tpspec.model.batch import Span
from tpspec.tokens import NO_TOKEN


class Waiting:
    """A target that launches, or cannot."""

    def __init__(self, *, launches: bool) -> None:
        self.launches, self.told = launches, list[tuple[str, list[tuple[int, ...]]]]()

    def launch(self, spans: Sequence[Span]) -> bool:
        self.told.append(("launch", [span.tokens for span in spans]))
        return self.launches

    def release(self, tokens: Sequence[int]) -> None:
        self.told.append(("release", [(token,) for token in tokens]))


def foreseen(*seqs: int) -> list[Span]:
    return [Span(seq, 7, (NO_TOKEN,), ((16 * seq, 8),), 1) for seq in seqs]


@pytest.mark.parametrize("launches", [True, False])
def test_every_rank_knows_the_round_whether_it_could_launch_it_or_not(launches: bool) -> None:
    """Of three texts one does not go on. Stands against a rank whose target keeps taps, say, and that plans another
    round than those whose targets do not; and against a token that has no embedding."""
    target = Waiting(launches=launches)
    subject = NextRound(target, (3, 5, 4), foreseen(3, 4))
    subject.asked()
    subject.drawn([8, 9, NO_TOKEN])
    subject.end()
    assert [(span.seq, span.tokens) for span in subject.spans] == [(3, (8,)), (4, (ANY,))]
    assert target.told == [("launch", [(NO_TOKEN,)] * 2), ("release", [(8,), (ANY,)])][: 1 + launches]


def test_a_round_that_was_given_up_is_none_on_any_rank() -> None:
    """Of rows that had to be asked for more. Stands against a forward of any tokens that passes for the next round."""
    target = Waiting(launches=True)
    subject = NextRound(target, (3,), foreseen(3))
    subject.asked()
    subject.given_up()
    subject.drawn([8])
    assert subject.spans == ()
    assert target.told[1:] == [("release", [(ANY,)])]


def test_what_was_launched_is_released_also_if_nothing_is_drawn() -> None:
    """Stands against a card that waits for ever, and against rows of no token at all."""
    target = Waiting(launches=True)
    subject = NextRound(target, (3,), foreseen(3))
    subject.asked()
    subject.end()
    subject.end()
    assert subject.spans == ()
    assert target.told[1:] == [("release", [(ANY,)])]
