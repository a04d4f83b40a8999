"""Requests in flight: which sequences the engine works on for whom, and the text that waits for its reader.

Turns the engine's deltas into pieces of text as they arrive, whether or not anyone reads. What has come of a sequence
outlives the engine: another one goes on from there. Must not know HTTP or JSON.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING

import msgspec

from tpspec.comm.messages import Cancel, Stats, Submit
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
MOST_LOST = 2  # engines that may be lost one after another with a request in flight that none of them gives a token


class Exchange:
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
        """Every piece until all sequences have ended, with None for each pause_s of silence. Closes the exchange."""
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
    """One sequence between Submit and its end. choice: see Ask. tokens, num_scored: what engines have given so far."""

    request: Request
    index: int
    exchange: Exchange
    reader: Reader
    choice: int
    born: float = field(default_factory=time.monotonic)
    last: float | None = None  # when its latest tokens came
    tokens: list[int] = field(default_factory=list)
    num_scored: int = 0
    num_lost: int = 0  # engines since

    def gain(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.num_scored += len(delta.prompt_logprobs)
        if delta.tokens:
            self.num_lost = 0

    def go_on(self, number: int) -> None:
        """As a request to another engine. The number is new, too: what is still said of the old one is of no use."""
        self.request = msgspec.structs.replace(
            self.request, id=number, begun=tuple(self.tokens), num_scored=self.num_scored
        )


class Table:
    """Every flight, by id. Speaks to the lead through `send`, which returns at once.

    Between `lose` and `resume` there is no lead; flights open and close all the same.
    """

    def __init__(self, metrics: Metrics, send: Callable[[ToLead], None]) -> None:
        self._metrics, self._send = metrics, send
        self._flights: dict[int, Flight] = {}
        self._ids = count(1)
        self._collectives = 0  # all of them, by the engine's last report
        self._running = 0  # by the engine's last report, which may not know of those submitted since
        self._is_heard = True
        self.busy_since = 0.0
        self.mean_seconds = 1.0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def num_queued(self) -> int:
        """Requests the engine has not begun: all but what it runs. Never more than have no tokens."""
        silent = sum(flight.last is None for flight in self._flights.values())
        return min(max(0, len(self._flights) - self._running), silent)

    def open(self, asks: Iterable[Ask], text: Text) -> Exchange:
        exchange = Exchange(self)
        for ask in asks:
            self._submit(exchange, ask, text)
        return exchange

    def refuse(self) -> None:
        self._metrics.refused("queue_full")

    def cancel(self, flight: Flight) -> None:
        """Ends a flight that its client no longer wants. Does nothing to one that has ended."""
        if flight.request.id in self._flights:
            self._tell(Cancel(flight.request.id))
            self._end(flight, "abort")

    def lose(self, max_running: int) -> None:
        """The engine is gone and another is to come, for which flights wait; not those that may be why they go.

        max_running: the oldest so many are those that it may have worked on; none else can be why.
        """
        self._is_heard, self._running = False, 0
        self._metrics.engine(Stats())
        for flight in list(islice(self._flights.values(), max_running)):
            flight.num_lost += 1
            if flight.num_lost >= MOST_LOST:
                self._fail(flight, "error", f"the engine was lost {MOST_LOST} times while it worked on this request")

    def resume(self) -> None:
        """Another engine goes on where the last one was lost, with the oldest first."""
        flights, self._flights = list(self._flights.values()), {}
        self._is_heard, self._collectives = True, 0
        for flight in flights:
            flight.go_on(next(self._ids))
            self._flights[flight.request.id] = flight
            self._send(Submit(flight.request))

    def read(self, report: Report) -> None:
        self._metrics.engine(report.stats)
        self._running = report.stats.running
        total = sum(tally.count for tally in report.stats.collectives.values())
        num_collectives, self._collectives = max(0, total - self._collectives), total
        flights = [(flight, delta) for delta in report.deltas if (flight := self._flights.get(delta.id))]
        for exchange in {flight.exchange for flight, delta in flights if delta.tokens}:
            exchange.effort.collectives += num_collectives
        for flight, delta in flights:
            self._advance(flight, delta)

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """The server cannot go on: every reader is told why."""
        for flight in list(self._flights.values()):
            self._fail(flight, reason, error)

    def _tell(self, message: ToLead) -> None:
        if self._is_heard:
            self._send(message)

    def _fail(self, flight: Flight, reason: FinishReason, error: str | None) -> None:
        flight.exchange.put(flight.reader.end(reason, error))
        self._end(flight, reason)

    def _give_up(self, flight: Flight) -> None:
        """Of a flight whose answer cannot be read."""
        self._tell(Cancel(flight.request.id))
        error = "this answer could not be read: a fault of the server"
        flight.exchange.put(Piece(flight.index, finish="error", error=error))
        self._end(flight, "error")

    def _submit(self, exchange: Exchange, ask: Ask, text: Text) -> None:
        request, index = ask.request(next(self._ids)), len(exchange.flights)
        flight = Flight(request, index, exchange, Reader(ask, text, index), ask.choice)
        if not self._flights:
            self.busy_since, self._running = flight.born, 0  # an engine that was idle has not said so
        exchange.flights.append(flight)
        exchange.effort.sequences += 1
        self._flights[request.id] = flight
        self._tell(Submit(request))
        self._metrics.submitted(len(ask.prompt))

    def _advance(self, flight: Flight, delta: Delta) -> None:
        flight.gain(delta)
        try:
            piece = flight.reader.read(delta)
        except Exception:  # noqa: BLE001  of ours, in what one answer holds: the others go on
            traceback.print_exc()
            self._give_up(flight)
            return
        if delta.tokens:
            self._account(flight, delta, piece)
        if delta.tokens or piece.rated or piece.finish:
            flight.exchange.put(piece)
        if piece.finish:
            if delta.finish is None:  # a stop string, of which the engine knows nothing
                self._tell(Cancel(delta.id))
            self._end(flight, piece.finish)

    def _account(self, flight: Flight, delta: Delta, piece: Piece) -> None:
        now = time.monotonic()
        accepted = min(sum(delta.accepted), piece.num_tokens)
        self._metrics.round(delta, piece.num_tokens, accepted)
        if flight.last is None:
            self._metrics.first(now - flight.born)
            flight.exchange.effort.cached += 0 if flight.choice else delta.num_cached
        else:
            self._metrics.between(now - flight.last)
        flight.last = now
        flight.exchange.effort.add(piece.num_tokens, sum(delta.drafted), accepted)
        flight.exchange.effort.thought += piece.num_thought

    def _end(self, flight: Flight, reason: FinishReason) -> None:
        seconds = time.monotonic() - flight.born
        self._metrics.finished(reason, seconds)
        if reason in ("stop", "length"):
            self.mean_seconds += MEAN_WEIGHT * (seconds - self.mean_seconds)
        del self._flights[flight.request.id]


def num_prompt_tokens(asks: Sequence[Ask]) -> int:
    """Prompt tokens of an exchange: the choices of one prompt share it."""
    return sum(len(ask.prompt) for ask in asks if not ask.choice)
