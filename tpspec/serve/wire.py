"""Bodies in and answers out, over ASGI: size and time limits, server-sent events, and noticing a client that left.

Must not know what the bytes mean.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import Response

from tpspec.serve.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine

    from starlette.types import Receive, Scope, Send

MAX_BODY_BYTES = 8 << 20  # more text than any cache here holds
# JSON is read in one go, which nobody else can interrupt: numbers cost 50 ns each, the keys of objects a microsecond.
MAX_COMMAS = 1 << 18
MAX_QUOTES = 1 << 16
FEW_BYTES = 1 << 16  # are read at once, beside nothing
BODY_S = 60.0  # a body that takes longer than this to arrive is not waited for
SWALLOW_S = 5.0  # how long a refused body is still read, so that its sender can read the refusal
SEND_S = 60.0  # a reader who takes nothing for so long has left
# What ends a line for some readers of events (httpx's iter_lines) and needs no escape in JSON: how it is written here.
LINE_ENDS = {one.encode(): f"\\u{ord(one):04x}".encode() for one in "\x85\u2028\u2029"}
T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed its connection, so there is nobody to answer."""


class JsonAnswer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class EventStream(Response):
    """Server-sent events from JSON values (None: a comment that keeps the line open), then [DONE].

    close: called once the stream is over, however it ended. named: events say their type, and the last ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Any], close: Callable[[], None], *, named: bool = False) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._named = events, close, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(receive, self._send_all(send))
        except ClientLeft:
            return
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events):
            async for event in self._events:
                await _send(send, b": keep-alive\n\n" if event is None else self._framed(event))
                await asyncio.sleep(0)  # others go on, and it is noticed who has left
        await _send(send, b"" if self._named else _frame(b"[DONE]"), last=True)

    def _framed(self, event: Any) -> bytes:
        name = b"event: " + event["type"].encode() + b"\n" if self._named else b""
        data = msgspec.json.encode(event)
        for end, escaped in LINE_ENDS.items():
            data = data.replace(end, escaped)
        return name + _frame(data)


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises ApiError: 413 when it is too much, counted as it comes; 408 when it is too slow."""
    chunks: list[bytes] = []
    num_bytes = num_commas = num_quotes = 0
    try:
        async with asyncio.timeout(BODY_S):
            coming = _chunks(receive)
            async for chunk in coming:
                num_bytes += len(chunk)
                num_commas += chunk.count(b",")
                num_quotes += chunk.count(b'"')
                if fault := _excess(num_bytes, num_commas, num_quotes):
                    await _swallow(coming)
                    raise ApiError(413, f"the body {fault}", code="body_too_large")
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, "the body took too long to arrive") from None
    return b"".join(chunks)


async def apart(work: Callable[[], T], num_bytes: int) -> T:
    """What `work` on so many bytes returns; where they are many, beside the event loop."""
    return work() if num_bytes <= FEW_BYTES else await asyncio.to_thread(work)


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first. Raises ClientLeft then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _swallow(chunks: AsyncIterator[bytes]) -> None:
    try:
        async with asyncio.timeout(SWALLOW_S):
            async for _ in chunks:
                pass
    except TimeoutError:
        return


def _excess(num_bytes: int, num_commas: int, num_quotes: int) -> str | None:
    if num_bytes > MAX_BODY_BYTES:
        return f"is larger than {MAX_BODY_BYTES} bytes"
    if num_commas > MAX_COMMAS:
        return f"lists more than {MAX_COMMAS} values"
    return f"holds more than {MAX_QUOTES} quotes" if num_quotes > MAX_QUOTES else None


def _frame(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _send(send: Send, body: bytes, last: bool = False) -> None:
    try:
        async with asyncio.timeout(SEND_S):
            await send({"type": "http.response.body", "body": body, "more_body": not last})
    except TimeoutError:
        raise ClientLeft from None
