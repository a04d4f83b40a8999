"""Rows of a forward: which tokens of which sequences run, where their keys and values live, who may look at whom.

Integers only. A span is a run of committed tokens that are not cached yet, followed, once it reaches the root, by the
nodes of a tree; so a prompt chunk, a plain decode step and a verification are one thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """How a text with a state (cache/states.py) goes on. slot: where that is. rows: of those that its last forward left
    there, which the text has kept, in order: the root, and a path behind it. num_certain: rows of the span that will
    not be taken back, the first ones; what follows the last of them is a tree."""

    slot: int
    rows: tuple[int, ...]
    num_certain: int

    @classmethod
    def alone(cls, start: int, num_rows: int) -> Carried:
        """Of a text that has the first slot, and whose rows are all certain: so many, after `start` others."""
        return cls(0, (0,) if start else (), num_rows)


class Span(msgspec.Struct, frozen=True):
    """Rows of one sequence.

    start: tokens of the sequence already cached. tokens: the rows' token ids. runs: (first slot, count) pieces of the
    slots of positions [0, start + len(tokens)), in order; row i is written at slot of start + i.
    parents: None for a chain; else for each row the row it follows (row 0 follows the cache: -1), parents[i] < i.
    num_logits: the last num_logits rows need logits (0 for a prompt chunk that does not reach the root).
    recent: of layers with a window, where those have slots of their own: pieces of the slots of the last positions, as
    many as the rows see.
    carried: of a model that keeps states; None there: all rows are certain, the first begins the text, and nothing is
    kept of it.
    """

    seq: int
    start: int
    tokens: tuple[int, ...]
    runs: Runs
    num_logits: int
    parents: tuple[int, ...] | None = None
    recent: Runs | None = None
    carried: Carried | None = None

    def positions(self) -> list[int]:
        """Absolute position of every row: the root's plus its depth."""
        if self.parents is None:
            return list(range(self.start, self.start + len(self.tokens)))
        positions: list[int] = []
        for parent in self.parents:
            positions.append(self.start if parent < 0 else positions[parent] + 1)
        return positions

    def num_chained(self) -> int:
        """Rows, the first ones, that follow each other, and that all others follow."""
        if self.parents is None:
            return len(self.tokens)
        in_line = next((row for row, parent in enumerate(self.parents) if parent != row - 1), len(self.tokens))
        return min(self.parents[in_line:], default=in_line - 1) + 1

    def held(self, *, windowed: bool) -> tuple[int, Runs]:
        """Where layers with or without a window have the span: its slots from some position on, and that position."""
        if self.recent is None or not windowed:
            return 0, self.runs
        return self.start + len(self.tokens) - sum(count for _, count in self.recent), self.recent

    def own_slots(self, *, windowed: bool = False) -> list[int]:
        """Slot of every row, in layers with or without a window: those of the last len(tokens) positions."""
        slots: list[int] = []
        missing = len(self.tokens)
        for first, count in reversed(self.held(windowed=windowed)[1]):
            taken = min(count, missing)
            slots = [*range(first + count - taken, first + count), *slots]
            missing -= taken
            if not missing:
                break
        return slots


def lines(parents: Sequence[int]) -> list[list[int]]:
    """Rows from the first of a tree down to each of its leaves."""
    inner, found = set(parents), list[list[int]]()
    for leaf in range(len(parents)):
        if leaf not in inner:
            line = [leaf]
            while parents[line[-1]] >= 0:
                line.append(parents[line[-1]])
            found.append(line[::-1])
    return found


def along(span: Span, rows: Sequence[int]) -> Span:
    """The chain that these rows of a span's tree are, behind what is cached; of attention alone."""

    def kept(windowed: bool) -> Runs:
        position, held = span.held(windowed=windowed)
        cached: list[tuple[int, int]] = []
        for first, count in held:
            if position < span.start:
                cached.append((first, min(count, span.start - position)))
            position += count
        own = span.own_slots(windowed=windowed)
        return (*cached, *((own[row], 1) for row in rows))

    recent = None if span.recent is None else kept(windowed=True)
    tokens = tuple(span.tokens[row] for row in rows)
    return msgspec.structs.replace(span, tokens=tokens, runs=kept(windowed=False), parents=None, recent=recent)


def with_tokens(spans: Sequence[Span], tokens: Sequence[int]) -> list[Span]:
    """Spans of one row, each with a token of these."""
    return [msgspec.structs.replace(span, tokens=(token,)) for span, token in zip(spans, tokens, strict=True)]


class Moves(NamedTuple):
    """Copy slot src[i] to dst[i] for all i, every source read before it is written, before the next forward.

    recent_src, recent_dst: the same of layers with a window, where those have slots of their own.
    """

    src: list[int]
    dst: list[int]
    recent_src: list[int]
    recent_dst: list[int]


class StateCopy(NamedTuple):
    """Of the state in a slot, and the first num_left rows beside it, to another."""

    source: int
    target: int
    num_left: int


def paths(parents: Sequence[int]) -> list[int]:
    """Of each of at most 64 rows a bit for each row on its path, itself among them; as int64."""
    made: list[int] = []
    for row, parent in enumerate(parents):
        made.append(1 << row | (made[parent] if parent >= 0 else 0))
    return [bits - (1 << 64) if bits >> 63 else bits for bits in made]
