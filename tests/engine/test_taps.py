"""Rows of the target by cache slot: what a text is given of its beginning is what the readers of it were told."""

from __future__ import annotations

import torch
from torch import Tensor

from tpspec.engine.plan import Plan
from tpspec.engine.taps import TapStore
from tpspec.model.batch import Span
from tpspec.request import Sampling
from tpspec.tokens import NO_DRAFT, TokenTree, Verdict
from tpspec.verify.rows import Case

TREE = TokenTree((10, 11, 12, 13), (-1, -1, 1, 1))


def plan(span: Span, tree: TokenTree = NO_DRAFT) -> Plan:
    return Plan((span,), (Case(span.seq, 0, tree, (), 0, Sampling()),))


def rows(count: int, first: float) -> Tensor:
    return torch.arange(count, dtype=torch.float32).unsqueeze(1) + first


def test_a_text_is_given_the_rows_of_what_was_accepted_before_it_came() -> None:
    """Stands against the row of a rejected sibling at the place of the accepted node, which moved there; and against
    counting slots from the beginning of a round when the text lies in two pieces."""
    store = TapStore(16)
    chunk = Span(0, 0, (1, 2, 3), ((4, 3),), 0)
    told = store.of_text(plan(chunk), [], rows(3, 100), {}, keeps=True)
    assert (told.rows[0][0], told.rows[0][1].flatten().tolist()) == (0, [100, 101, 102])
    verify = Span(0, 3, (4, *TREE.tokens), ((4, 4), (12, 4)), 5, (-1, 0, 0, 2, 2))
    told = store.of_text(plan(verify, TREE), [Verdict(0, (1, 3), (11, 13, 9))], rows(5, 200), {}, keeps=True)
    assert (told.rows[0][0], told.rows[0][1].flatten().tolist()) == (3, [200, 202, 204])
    follow = Span(1, 6, (7,), ((4, 4), (12, 2), (8, 1)), 1)
    told = store.of_text(plan(follow), [Verdict(1, (), (8,))], rows(1, 300), {1: [4, 5, 6, 7, 12, 13]}, keeps=True)
    assert told.before[1].flatten().tolist() == [100, 101, 102, 200, 202, 204]
    assert (told.rows[1][0], told.rows[1][1].flatten().tolist()) == (6, [300])


def test_a_text_that_gets_no_row_yet_is_told_of_its_beginning_once() -> None:
    """A prompt that is let in may have to wait a round for rows; then it goes on where its beginning ends."""
    store = TapStore(16)
    first = Span(0, 0, (1, 2, 3), ((0, 3),), 0)
    store.of_text(plan(first), [], rows(3, 100), {}, keeps=True)
    other = Span(0, 3, (4,), ((0, 4),), 1)
    told = store.of_text(plan(other), [], rows(1, 200), {1: [0, 1]}, keeps=True)
    assert told.before[1].flatten().tolist() == [100, 101]
    assert 1 not in told.rows
    later = Span(1, 2, (9,), ((0, 2), (8, 1)), 1)
    told = store.of_text(plan(later), [], rows(1, 300), {}, keeps=True)
    assert (told.rows[1][0], told.rows[1][1].flatten().tolist()) == (2, [300])


def test_nobody_is_told_of_who_has_ended_while_his_row_was_launched() -> None:
    """Stands against a source that remembers, for as long as the server runs, texts that it has been told to forget."""
    spans = Span(0, 3, (4,), ((0, 4),), 1), Span(1, 5, (7,), ((8, 6),), 1)
    launched = Plan(spans, (Case(1, 1, NO_DRAFT, (), 0, Sampling()),), gone=(0,))
    told = TapStore(16).of_text(launched, [Verdict(1, (), (9,))], rows(2, 100), {}, keeps=True)
    assert {seq: (start, taps.flatten().tolist()) for seq, (start, taps) in told.rows.items()} == {1: (5, [101])}
