"""One line of JSON for each request, under an id that its answer carries, too: what was asked for, when, what it cost.

Never the text that was asked or answered, nor a key. Must not know bodies or the engine: routes leave in the scope of a
request what it cost.
"""

from __future__ import annotations

import re
import secrets
import time
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tpspec.serve.effort import Effort

EFFORT = "tpspec.effort"  # in a request's scope
HEADER = b"x-request-id"
GIVEN = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # a client's own id, which may not look like more than one line or field
POLLED = frozenset({"/health", "/ready", "/metrics"})  # every few seconds, and of no interest while all is well
MAX_PATH_CHARS = 200


class RequestLog:
    """Around the whole application. write: a line; None writes none, but ids are given all the same."""

    def __init__(self, app: ASGIApp, write: Callable[[str], None] | None) -> None:
        self._app, self._write = app, write
        life = secrets.token_hex(8)
        self._numbers = (f"{life}-{number}".encode() for number in count(1))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number, begin, begun_at, status = self._id(scope), time.monotonic(), datetime.now(UTC), None

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER, number)]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if self._write is not None and not (status == 200 and scope["path"] in POLLED):
                line = _line(scope, number, begun_at, status, time.monotonic() - begin)
                self._write(msgspec.json.encode(line).decode())

    def _id(self, scope: Scope) -> bytes:
        """The client's, if it gave one that is fit to be written down, else a new one."""
        given = [value for name, value in scope["headers"] if name == HEADER]
        return given[0] if len(given) == 1 and GIVEN.fullmatch(given[0]) else next(self._numbers)


def _line(scope: Scope, number: bytes, begun_at: datetime, status: int | None, seconds: float) -> dict[str, Any]:
    """status: None where the client left before there was one."""
    line = {
        "time": begun_at.isoformat(timespec="milliseconds"),
        "request_id": number.decode(),
        "client": (scope.get("client") or [None])[0],
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH_CHARS],
        "status": status,
        "seconds": round(seconds, 4),
    }
    effort: Effort | None = scope.get(EFFORT)
    return line if effort is None else line | {"tokens": effort.tokens, **effort.speculation()}
