"""Slices of a checkpoint's matrices: which rows and columns of which tensor are wanted, in which order, and which of
them are computed as one.

Names and integers; must not know which matrices a model has, how one is stored, nor tensors or shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.published.groups import Bits

Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Place:
    """A slice of a matrix: its module's name, the whole sizes, and which rows and columns.

    picked: which of these rows are wanted at all, one range after the other; None: all. head_order: those are of heads,
    each of which is to be put in this order; None: they stay as they are. expert: the name is that of one tensor with
    the matrices of all experts; this one, of so many; None: of one matrix. upright: those have a row for each output,
    as any matrix; else for each input. scale: what its numbers are multiplied by.
    """

    name: str
    num_outputs: int
    num_inputs: int
    rows: range
    columns: range
    picked: tuple[range, ...] | None = None
    head_order: tuple[int, ...] | None = None
    expert: tuple[int, int] | None = None
    upright: bool = False
    scale: float = 1.0

    @property
    def num_rows(self) -> int:
        """That are wanted."""
        return len(self.rows) if self.picked is None else sum(map(len, self.picked))

    @property
    def is_plain(self) -> bool:
        """Whether it is a matrix of its own, whose rows stay as they are."""
        return self.expert is None and self.scale == 1 and self.picked is None and self.head_order is None

    def as_it_lies(self, outputs: Told, inputs: Told) -> tuple[Told, Told]:
        """Of all experts together: what is of outputs and of inputs in the order in which the tensor has those."""
        return (outputs, inputs) if self.upright else (inputs, outputs)


@dataclass(frozen=True, slots=True)
class Fused:
    """Matrices with the same inputs that are computed as one, the rows of each below those of the one before it.

    biased: they have biases. summed: of one, shards have some columns each, what these give is summed, and one shard
    alone adds the bias. exact: they are not quantized, whatever is asked for. bits: to which they are, if not to those
    that are asked for.
    """

    parts: tuple[Place, ...]
    biased: bool = False
    summed: bool = False
    exact: bool = False
    bits: Bits | None = None

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def num_numbers(self) -> int:
        return self.num_rows * len(self.parts[0].columns)

    def each(self, **fields: Any) -> Fused:
        """With those fields of all parts."""
        return replace(self, parts=tuple(replace(part, **fields) for part in self.parts))

    def reading(self, width: int) -> Fused:
        """The same of matrices with so many inputs, all of which are wanted."""
        return self.each(num_inputs=width, columns=range(width))

    def scaled(self, *scales: float) -> Fused:
        """The first parts multiplied by those."""
        return self._of_first("scale", scales)

    def in_heads(self, *orders: tuple[int, ...] | None) -> Fused:
        """See Place.head_order, of the first parts."""
        return self._of_first("head_order", orders)

    def _of_first(self, field: str, values: Sequence[Any]) -> Fused:
        parts = (replace(part, **{field: value}) for part, value in zip(self.parts, values, strict=False))
        return replace(self, parts=(*parts, *self.parts[len(values) :]))


def numbers_of(heads: range, head_dim: int) -> range:
    """Rows of a matrix that are those heads', of so many numbers each."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def rows_of(name: str, rows: range, size: int, hidden: int) -> Place:
    """Some of the `size` output rows of a matrix that reads the hidden state."""
    return Place(name, size, hidden, rows, range(hidden))


def heads_of(name: str, heads: range, count: int, head_dim: int, hidden: int) -> Place:
    """Those of some of `count` heads, of so many numbers each."""
    return rows_of(name, numbers_of(heads, head_dim), count * head_dim, hidden)


def all_of(name: str, num_outputs: int, num_inputs: int, *, biased: bool = False) -> Fused:
    """All of a matrix."""
    return Fused((rows_of(name, range(num_outputs), num_outputs, num_inputs),), biased)


def summed(name: str, hidden: int, columns: range, size: int, *, biased: bool = False) -> Fused:
    """Some of the `size` input columns of a matrix that gives the hidden state."""
    return Fused((Place(name, hidden, size, range(hidden), columns),), biased, summed=True)


def below(parts: Sequence[Place]) -> tuple[Place, ...]:
    """Of matrices of one name, which are one: each with its rows below those of the one before it."""
    if len({part.name for part in parts}) > 1:
        return tuple(parts)
    total, firsts = sum(part.num_outputs for part in parts), accumulate((part.num_outputs for part in parts), initial=0)
    return tuple(
        replace(part, num_outputs=total, rows=range(first + part.rows.start, first + part.rows.stop))
        for part, first in zip(parts, firsts, strict=False)
    )
