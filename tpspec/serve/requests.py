"""Requests in flight: which sequences the engine works on for whom, and the text that waits for its reader.

Turns the engine's deltas into pieces of text as they arrive, whether or not anyone reads. Must not know HTTP or JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from tpspec.comm.messages import Cancel, Submit
from tpspec.serve.answers import Ask, Piece, Reader
from tpspec.serve.effort import Effort

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from tpspec.comm.messages import Report, ToLead
    from tpspec.request import Delta, FinishReason, Request
    from tpspec.serve.metrics import Metrics
    from tpspec.text import Text

BACKLOG = 16  # pieces per sequence that wait for a slow reader before they are merged
MEAN_WEIGHT = 0.2  # weight of the latest request in the running mean of latencies


class Call:
    """The sequences of one HTTP request and the pieces that wait for it. Bounded: old pieces merge, none is dropped."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._waiting: deque[Piece] = deque()
        self._news = asyncio.Event()
        self.flights: list[Flight] = []
        self.effort = Effort()

    def put(self, piece: Piece) -> None:
        if len(self._waiting) >= BACKLOG * len(self.flights) and (last := self._last(piece.index)):
            last.absorb(piece)
        else:
            self._waiting.append(piece)
        self._news.set()

    async def next(self, timeout_s: float | None = None) -> Piece | None:
        """The oldest piece that waits, or None when none came in time."""
        if not self._waiting:
            self._news.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return None
        return self._waiting.popleft()

    async def pieces(self, pause_s: float | None = None) -> AsyncGenerator[Piece | None]:
        """Every piece until all sequences have ended, with None for each pause_s of silence. Closes the call."""
        num_open = len(self.flights)
        try:
            while num_open:
                piece = await self.next(pause_s)
                num_open -= piece is not None and piece.finish is not None
                yield piece
        finally:
            self.close()

    def close(self) -> None:
        """Whatever still runs is cancelled: nobody is left to read it."""
        for flight in self.flights:
            self._table.cancel(flight)

    def _last(self, index: int) -> Piece | None:
        return next((piece for piece in reversed(self._waiting) if piece.index == index), None)


@dataclass(slots=True, eq=False)
class Flight:
    """One sequence between Submit and its end."""

    request: Request
    index: int
    call: Call
    reader: Reader
    born: float = field(default_factory=time.monotonic)
    last: float | None = None  # when its latest tokens came


class Table:
    """Every flight, by id. Speaks to the lead through `send`, which returns at once."""

    def __init__(self, metrics: Metrics, send: Callable[[ToLead], None]) -> None:
        self._metrics, self._send = metrics, send
        self._flights: dict[int, Flight] = {}
        self._ids = count(1)
        self._collectives = 0  # all of them, by the engine's last report
        self._waiting = 0  # by the engine's last report, and those submitted since
        self.busy_since = 0.0
        self.mean_seconds = 1.0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def num_queued(self) -> int:
        """Requests the engine has not begun. Its word is stale while it idles, so never more than have no tokens."""
        return min(self._waiting, sum(flight.last is None for flight in self._flights.values()))

    def open(self, asks: Iterable[Ask], text: Text) -> Call:
        call = Call(self)
        for ask in asks:
            self._submit(call, ask, text)
        return call

    def refuse(self) -> None:
        self._metrics.refused("queue_full")

    def cancel(self, flight: Flight) -> None:
        """Ends a flight that its client no longer wants. Does nothing to one that has ended."""
        if flight.request.id in self._flights:
            self._send(Cancel(flight.request.id))
            self._end(flight, "abort")

    def read(self, report: Report) -> None:
        self._metrics.engine(report.stats)
        self._waiting = report.stats.waiting
        total = sum(tally.count for tally in report.stats.collectives.values())
        num_collectives, self._collectives = max(0, total - self._collectives), total
        flights = [(flight, delta) for delta in report.deltas if (flight := self._flights.get(delta.id))]
        for call in {flight.call for flight, delta in flights if delta.tokens}:
            call.effort.collectives += num_collectives
        for flight, delta in flights:
            self._advance(flight, delta)

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """The server cannot go on: every reader is told why."""
        for flight in list(self._flights.values()):
            flight.call.put(Piece(flight.index, flight.reader.flush(), finish=reason, error=error))
            self._end(flight, reason)

    def _submit(self, call: Call, ask: Ask, text: Text) -> None:
        request, index = ask.request(next(self._ids)), len(call.flights)
        flight = Flight(request, index, call, Reader(ask, text, index))
        if not self._flights:
            self.busy_since = flight.born
        call.flights.append(flight)
        call.effort.sequences += 1
        self._flights[request.id] = flight
        self._waiting += 1
        self._send(Submit(request))
        self._metrics.submitted(len(ask.prompt))

    def _advance(self, flight: Flight, delta: Delta) -> None:
        piece = flight.reader.read(delta)
        if delta.tokens:
            self._account(flight, delta, piece.num_tokens)
        if delta.tokens or piece.rated or piece.finish:
            flight.call.put(piece)
        if piece.finish:
            if delta.finish is None:  # a stop string, of which the engine knows nothing
                self._send(Cancel(delta.id))
            self._end(flight, piece.finish)

    def _account(self, flight: Flight, delta: Delta, num_tokens: int) -> None:
        now = time.monotonic()
        accepted = min(sum(delta.accepted), num_tokens)
        self._metrics.round(delta, num_tokens, accepted)
        if flight.last is None:
            self._metrics.first(now - flight.born)
        else:
            self._metrics.between(now - flight.last)
        flight.last = now
        flight.call.effort.add(num_tokens, sum(delta.drafted), accepted)

    def _end(self, flight: Flight, reason: FinishReason) -> None:
        seconds = time.monotonic() - flight.born
        self._metrics.finished(reason, seconds)
        if reason in ("stop", "length"):
            self.mean_seconds += MEAN_WEIGHT * (seconds - self.mean_seconds)
        del self._flights[flight.request.id]


def num_prompt_tokens(asks: Sequence[Ask], num_choices: int) -> int:
    """Prompt tokens of a call: the choices of one prompt share it."""
    return sum(len(ask.prompt) for ask in asks[::num_choices])
