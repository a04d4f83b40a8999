"""Slices of a checkpoint's matrices: which rows and columns of which tensor are wanted, and in which order.

Knows names and sizes; must not know how a matrix is stored, nor what is computed with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Place:
    """A slice of a matrix: its module's name, the whole sizes, and which rows and columns.

    head_order: the rows are those of heads, each of which is to be put in this order; None: they stay as they are.
    expert: the name is that of one tensor with the matrices of all experts; this one, of so many; None: of one matrix.
    upright: those have a row for each output, as any matrix; else for each input. alternate: rows are of two matrices
    in turn; those of the first are to be put before those of the second. picked: which of the rows are wanted at all,
    in order; None: see above. scale: what its numbers are multiplied by.
    """

    name: str
    num_outputs: int
    num_inputs: int
    rows: range
    columns: range
    head_order: tuple[int, ...] | None = None
    expert: tuple[int, int] | None = None
    alternate: bool = False
    upright: bool = False
    picked: tuple[int, ...] | None = None
    scale: float = 1.0

    @property
    def num_rows(self) -> int:
        """That are wanted."""
        return len(self.rows) if self.picked is None else len(self.picked)

    @property
    def is_plain(self) -> bool:
        """Whether it is a matrix of its own, whose rows stay as they are."""
        moves = self.picked is not None or self.head_order is not None or self.alternate
        return self.expert is None and self.scale == 1 and not moves

    def as_it_lies(self, outputs: Told, inputs: Told) -> tuple[Told, Told]:
        """Of all experts together: what is of outputs and of inputs in the order in which the tensor has those."""
        return (outputs, inputs) if self.upright else (inputs, outputs)

    def ordered(self) -> Tensor | slice:
        """Which of the rows that were read stands where."""
        if self.picked is not None:
            return torch.tensor(self.picked)
        if self.alternate:
            return torch.arange(len(self.rows)).view(-1, 2).T.flatten()
        return slice(None) if self.head_order is None else in_heads(len(self.rows), self.head_order)


def whole_place(name: str, num_outputs: int, num_inputs: int) -> Place:
    """All of a matrix."""
    return Place(name, num_outputs, num_inputs, range(num_outputs), range(num_inputs))


def numbers_of(heads: range, head_dim: int) -> range:
    """Rows of a matrix that are those heads', of so many numbers each."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def rows_of(name: str, rows: range, size: int, hidden: int) -> Place:
    """Some of the `size` output rows of a matrix that reads the hidden state."""
    return Place(name, size, hidden, rows, range(hidden))


def below(parts: Sequence[Place]) -> Sequence[Place]:
    """Of matrices of one name, which are one: each with its rows below those of the one before it."""
    if len({part.name for part in parts}) > 1:
        return parts
    total, firsts = sum(part.num_outputs for part in parts), accumulate((part.num_outputs for part in parts), initial=0)
    return [
        replace(part, num_outputs=total, rows=range(first + part.rows.start, first + part.rows.stop))
        for part, first in zip(parts, firsts, strict=False)
    ]


def in_heads(num_rows: int, head_order: tuple[int, ...]) -> Tensor:
    """Which of so many rows of heads stands where, if each head is put in that order."""
    starts = torch.arange(0, num_rows, len(head_order))
    return (starts[:, None] + torch.tensor(head_order)).flatten()
