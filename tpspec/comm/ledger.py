"""What the collectives cost, by purpose: how many, how many bytes, how many seconds. Counting is a wrapper.

Must not know what a collective is for beyond its purpose, nor wait for a device: seconds on one are read when they are
known. A group of one is not wrapped: nothing is sent, nothing is counted.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from tpspec.comm.communicator import Made, Purpose
from tpspec.comm.messages import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tpspec.comm.communicator import Communicator, Then
    from tpspec.comm.meeting import Meeting

NOTHING = Tally()

Result = TypeVar("Result")


class _Entry:
    """The running sums of one purpose."""

    __slots__ = ("bytes", "count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self.seconds = 0.0

    def grow(self, count: int, num_bytes: int, seconds: float) -> None:
        self.count += count
        self.bytes += num_bytes
        self.seconds += seconds

    def tally(self) -> Tally:
        return Tally(self.count, self.bytes, self.seconds)


class Ledger:
    """Sums since it was made. rounds: how often `mark_round` was called."""

    def __init__(self) -> None:
        self.rounds = 0
        self._entries = {purpose: _Entry() for purpose in Purpose}
        self._spans: deque[tuple[_Entry, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []

    def add(self, purpose: Purpose, num_bytes: int, seconds: float) -> None:
        self._entries[purpose].grow(1, num_bytes, seconds)

    def begin_span(self) -> torch.cuda.Event:
        """Marks where a collective begins on the current CUDA stream."""
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add_span(self, purpose: Purpose, num_bytes: int, begin: torch.cuda.Event) -> None:
        """Like `add`, for a collective that ends here on the CUDA stream; its seconds follow."""
        self.add(purpose, num_bytes, 0.0)
        self._spans.append((self._entries[purpose], begin, self.begin_span()))

    def enter(self, tallies: Mapping[Purpose, Tally]) -> None:
        """Collectives that ran without passing by here: of a recording that was replayed."""
        for purpose, tally in tallies.items():
            self._entries[purpose].grow(tally.count, tally.bytes, tally.seconds)

    def aside(self, work: Callable[[], object]) -> dict[Purpose, Tally]:
        """What the work would enter, which is left out of the sums; waits for a device until the seconds are known."""
        kept, self._entries = self._entries, {purpose: _Entry() for purpose in Purpose}
        try:
            work()
            if self._spans:
                self._spans[-1][2].synchronize()
            return self.totals()
        finally:
            self._entries = kept

    def mark_round(self) -> None:
        """A round has ended."""
        self.rounds += 1
        self._settle()

    def totals(self) -> dict[Purpose, Tally]:
        """Every purpose that occurred. Seconds of what a device has not finished yet are in a later answer."""
        self._settle()
        return {purpose: entry.tally() for purpose, entry in self._entries.items() if entry.count}

    def since(self, before: Mapping[Purpose, Tally]) -> dict[Purpose, Tally]:
        """What was added to an earlier answer of `totals`."""
        changes = {purpose: _less(tally, before.get(purpose, NOTHING)) for purpose, tally in self.totals().items()}
        return {purpose: change for purpose, change in changes.items() if change != NOTHING}

    def _settle(self) -> None:
        """Reads the events that have happened; in stream order, so the first that has not ends the search."""
        while self._spans and self._spans[0][2].query():  # type: ignore[no-untyped-call]
            entry, begin, end = self._spans.popleft()
            entry.seconds += begin.elapsed_time(end) / 1000
            self._spare += (begin, end)


def _less(tally: Tally, before: Tally) -> Tally:
    return Tally(tally.count - before.count, tally.bytes - before.bytes, tally.seconds - before.seconds)


class Counted:
    """A communicator that writes every collective of another one into a ledger."""

    def __init__(self, inner: Communicator, ledger: Ledger) -> None:
        self.rank, self.size, self.is_queued = inner.rank, inner.size, inner.is_queued
        self._inner, self._ledger = inner, ledger

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        return self._timed(self._inner.all_reduce, x, purpose)

    def all_reduce_then(self, x: Tensor, purpose: Purpose, then: Then[Made]) -> Made:
        """What is made of a sum takes its time only where one kernel does both."""
        if not x.is_cuda:
            return then(self.all_reduce(x, purpose))
        verb = partial(self._inner.all_reduce_then, then=_Apart(then))
        return self._timed(verb, x, purpose)()

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        return self._timed(self._inner.all_gather, x, purpose)

    def _timed(self, verb: Callable[[Tensor, Purpose], Result], x: Tensor, purpose: Purpose) -> Result:
        if x.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return verb(x, purpose)  # nothing runs yet; whoever replays it enters it
            begin_event = self._ledger.begin_span()
            result = verb(x, purpose)
            self._ledger.add_span(purpose, x.nbytes, begin_event)
            return result
        begin = perf_counter()
        result = verb(x, purpose)
        self._ledger.add(purpose, x.nbytes, perf_counter() - begin)
        return result


class _Apart(Generic[Made]):
    """Another, of which what is no part of the sum's own kernel is left for later."""

    def __init__(self, then: Then[Made]) -> None:
        self._then = then

    def __call__(self, total: Tensor) -> Callable[[], Made]:
        return partial(self._then, total)

    def with_peers(self, x: Tensor, meeting: Meeting) -> Callable[[], Made] | None:
        made = self._then.with_peers(x, meeting)
        return None if made is None else lambda: made


def counted(comm: Communicator, ledger: Ledger) -> Communicator:
    """`comm`, counted; a group of one as it is."""
    return comm if comm.size == 1 else Counted(comm, ledger)
