"""uvicorn's connection with two more deadlines: for the head of a request, and for a reader to take what it is sent.

uvicorn waits for both without end. Must not know what is asked for. Bodies, streams and idle connections have deadlines
of their own (wire.py, uvicorn).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tpspec.serve.wire import SEND_S

if TYPE_CHECKING:
    import asyncio

HEAD_S = 10.0  # from connecting, or from the first byte of a later request, to the end of its head


class Connection(H11Protocol):
    """A client that sends a byte of its head now and then would hold a connection, and with it a file, for ever.

    So would one that reads nothing, with all that waits for it: what is closed is flushed first, however long it takes.
    """

    _head: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()
        self._watch_last_bytes()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._forget_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_last_bytes()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_last_bytes()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._forget_reader()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _watch_last_bytes(self) -> None:
        """What is left when a connection closes may be too little to have paused it."""
        if self.transport.is_closing():
            self._watch_reader()

    def _watch_reader(self) -> None:
        if self._reader is None:
            self._reader = self.loop.call_later(SEND_S, self.transport.abort)

    def _forget_reader(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
