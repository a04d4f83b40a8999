"""The seam every collective goes through. Passed in, never fetched, so two models with two groups share a process.

Knows tensors and purposes; must not know models, requests or rounds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.comm.meeting import Meeting

Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)
NOTE_BYTES = 2048  # of a text that ranks tell each other: an ipc path, or the error of one rank


class Purpose(StrEnum):
    """Why a collective runs. Mandatory, so nothing uncounted can be added."""

    attention = "attention"
    mlp = "mlp"
    norm = "norm"
    pick = "pick"
    logits = "logits"
    draft = "draft"
    control = "control"


class Then(Protocol[Made_co]):
    """What is made of a sum over ranks."""

    def __call__(self, total: Tensor) -> Made_co: ...
    def with_peers(self, x: Tensor, meeting: Meeting) -> Made_co | None:
        """The same of the sum of everybody's x, bit for bit, by a kernel that sums as well; None where there is none.
        Which it is must follow from shapes and types: every rank has to meet the others."""


class Communicator(Protocol):
    """A group of ranks. Every rank calls the same verbs in the same order with tensors of the same shape."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_queued(self) -> bool:
        """Whether collectives of tensors on a card go into its queue and need no host: then they can be recorded."""

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        """The sum over ranks, bitwise the same on each; may reuse x's memory."""

    def all_reduce_then(self, x: Tensor, purpose: Purpose, then: Then[Made]) -> Made:
        """`then` of what all_reduce gives, maybe in one kernel with it."""

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        """[N, *x.shape]: x of every rank, in rank order, the same bytes on each."""


class InTurn:
    """A communicator that knows of no kernel that sums and goes on: first the one, then the other."""

    def all_reduce_then(self: Communicator, x: Tensor, purpose: Purpose, then: Then[Made]) -> Made:
        return then(self.all_reduce(x, purpose))


class OneRank(InTurn):
    """A group of one: nothing to send, nothing to count."""

    rank = 0
    size = 1
    is_queued = True

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        return x

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        return x.unsqueeze(0)


class ForOne:
    """A communicator whose collectives are all for one purpose, whatever the caller takes them to be for."""

    def __init__(self, inner: Communicator, purpose: Purpose) -> None:
        self.rank, self.size, self.is_queued = inner.rank, inner.size, inner.is_queued
        self._inner, self._purpose = inner, purpose

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        return self._inner.all_reduce(x, self._purpose)

    def all_reduce_then(self, x: Tensor, purpose: Purpose, then: Then[Made]) -> Made:
        return self._inner.all_reduce_then(x, self._purpose, then)

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        return self._inner.all_gather(x, self._purpose)


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """The sum of every rank's x, added in rank order in float32 at least, rounded once into `out`.

    No bit depends on where an element stands in the message, as it does in a ring, which adds each chunk in an order
    of its own. Two parts need no wide copy: one addition is rounded once, and a + b is b + a.
    """
    if len(parts) == 2:
        return torch.add(parts[0], parts[1], out=out)
    narrow = out.dtype in (torch.bfloat16, torch.float16)
    total = parts[0].to(torch.float32 if narrow else out.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return out.copy_(total)


def told_by_all(comm: Communicator, note: str) -> list[str]:
    """The note of every rank, in rank order."""
    return [note_in(line) for line in comm.all_gather(as_line(note), Purpose.control)]


def as_line(note: str) -> Tensor:
    """A note in a message of fixed size, padded with zeros."""
    raw = note.encode()
    if len(raw) > NOTE_BYTES:
        raise ValueError(f"a note of {len(raw)} bytes; at most {NOTE_BYTES}")
    return torch.tensor(list(raw.ljust(NOTE_BYTES, b"\0")), dtype=torch.uint8)


def note_in(line: Tensor) -> str:
    return bytes(line.tolist()).rstrip(b"\0").decode()
