"""The state of the server: loading, ready, stalled, restarting or stopping, and whether there is room for a request.

Must not know HTTP routes or JSON bodies of requests. Health means progress: a process that exists is not enough.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from tpspec.comm.messages import Ready, Report, Stats
from tpspec.serve.errors import ApiError

if TYPE_CHECKING:
    from tpspec.comm.messages import ToFrontend
    from tpspec.serve.requests import Table
    from tpspec.text import Text

Phase = Literal["loading", "ready", "stalled", "restarting", "stopping"]
MAX_RETRY_S = 60


class State:
    """What the process knows of the engine and of itself. Ready needs both the engine's word and our tokenizer.

    Without an engine, but with another to come, requests are taken as before, and wait.
    """

    def __init__(self, table: Table, max_queued: int, stall_s: float) -> None:
        self.table, self._max_queued, self._stall_s = table, max_queued, stall_s
        self.text: Text | None = None
        self.stopping = self._is_lost = False
        self._ready: Ready | None = None
        self._stats = Stats()
        self._heard = time.monotonic()

    @property
    def phase(self) -> Phase:
        if self.stopping:
            return "stopping"
        if self.text is None or self._ready is None:
            return "loading"
        if self._is_lost:
            return "restarting"
        return "stalled" if self.silent_s > self._stall_s else "ready"

    @property
    def cache_tokens(self) -> int | None:
        return None if self._ready is None else self._ready.cache_tokens

    @property
    def silent_s(self) -> float:
        """Seconds since the engine was heard of, while it has work; 0 while it has none."""
        return time.monotonic() - max(self._heard, self.table.busy_since) if len(self.table) else 0.0

    @property
    def is_full(self) -> bool:
        return self.table.num_queued >= self._max_queued

    def hear(self, message: ToFrontend) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Ready):
            self._ready = message
            if self._is_lost:
                self._is_lost = False
                self.table.resume()
        elif isinstance(message, Report):
            self._stats = message.stats
            self.table.read(message)

    def lose(self) -> None:
        """The engine is gone, and another is to come."""
        if self._ready is not None and not self._is_lost:
            self._is_lost, self._stats = True, Stats()
            self.table.lose(self._ready.max_running)

    def serving(self) -> tuple[Text, int]:
        """The tokenizer and the cache's size. Raises ApiError (503) while there is nothing to serve with."""
        if self.stopping:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after=10)
        if self.text is None or self._ready is None:
            raise ApiError(503, "the model is still loading", code="loading", retry_after=5)
        return self.text, self._ready.cache_tokens

    def admit(self) -> None:
        """Raises ApiError (429) when the queue is full, with a guess at when it will not be."""
        if self.is_full:
            self.table.refuse()
            queued = self.table.num_queued
            wait = queued * self.table.mean_seconds / max(1, self._stats.running)
            message = f"the queue is full ({queued} requests wait); try again later"
            raise ApiError(429, message, code="queue_full", retry_after=round(min(max(wait, 1), MAX_RETRY_S)))

    def health(self) -> dict[str, Any]:
        return {
            "status": self.phase,
            "rounds": self._stats.rounds,
            "silent_s": round(self.silent_s, 3),
            "in_flight": len(self.table),
            "running": self._stats.running,
            "queued": self.table.num_queued,
            "ranks": None if self._ready is None else self._ready.num_ranks,
        }
