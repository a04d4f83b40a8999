"""What a round is to do, and what it did: what the scheduler says to everybody else. Integers only, no decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tpspec.model.batch import Moves

if TYPE_CHECKING:
    from tpspec.model.batch import Span, StateCopy
    from tpspec.request import Delta
    from tpspec.tokens import TokenTree
    from tpspec.verify.rows import Case


@dataclass(frozen=True, slots=True)
class Owed:
    """A span whose request wants log-probabilities, with so many alternatives, of every token it gains.

    prompt: tokens of the prompt that follow the rows from `row` on, one each. `row` counts as that of a case.
    """

    seq: int
    row: int
    prompt: tuple[int, ...]
    num_top: int


class Plan(msgspec.Struct, frozen=True):
    """One round. `row` of a case counts the rows that have logits: over the spans, their last num_logits rows.

    admitted: sequences that begin to be read in it, or begin again. copies: of states, before it. gone: sequences that
    have spans and have ended since those were foreseen: nobody asks for what becomes of their rows.
    """

    spans: tuple[Span, ...]
    cases: tuple[Case, ...]
    admitted: tuple[int, ...] = ()
    owed: tuple[Owed, ...] = ()
    copies: tuple[StateCopy, ...] = ()
    gone: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum([len(span.tokens) for span in self.spans])

    @property
    def num_logits(self) -> int:
        return sum([span.num_logits for span in self.spans])


class Commit(msgspec.Struct, frozen=True):
    """What a round changed. finished: ids of sequences that are gone, whose last delta is among `deltas`.

    moves, copies: of cache slots and of states, before the next round.
    """

    deltas: list[Delta] = []
    moves: Moves = msgspec.field(default_factory=lambda: Moves([], [], [], []))
    copies: list[StateCopy] = []
    finished: list[int] = []


def fair_shares(wants: list[int], total: int) -> list[int]:
    """`total` split so that nobody gets more than he wants, and who gets less than that gets as much as any other.

    Max-min fairness; what does not divide goes to the first. Depends on the sizes only.
    """
    if sum(wants) <= total:
        return [*wants]
    shares = [0] * len(wants)
    modest_first = sorted(range(len(wants)), key=lambda i: (wants[i], -i))
    for served, i in enumerate(modest_first):
        shares[i] = min(wants[i], total // (len(wants) - served))
        total -= shares[i]
    return shares


def tally(tree: TokenTree, num_accepted: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draft tokens verified and accepted, by depth, both as long as the tree is deep."""
    if not tree:
        return (), ()
    drafted = [1] * len(tree)
    if not tree.is_chain:
        depths = tree.depths()
        drafted = [depths.count(depth) for depth in range(1, max(depths) + 1)]
    return tuple(drafted), (1,) * num_accepted + (0,) * (len(drafted) - num_accepted)
