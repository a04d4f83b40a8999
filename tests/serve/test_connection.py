"""Clients that begin and do not go on: half a head, half a body, and readers that take nothing; and what is a line."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import suppress

import httpx
import pytest
import uvicorn

from tpspec.serve import connection, wire
from tpspec.serve.connection import Connection
from tpspec.serve.errors import ApiError

HEAD = b"GET / HTTP/1.1\r\nhost: a\r\n"


async def _hello(scope: dict, receive, send) -> None:
    await asyncio.sleep(0.4)  # longer than a head may take: the deadline is for the head alone
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


async def _talk(parts: list[tuple[float, bytes]]) -> bytes:
    """What a server answers to bytes sent after so many seconds each, until it closes or for a while."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(_hello, http=Connection, lifespan="off", log_level="error", ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    answer = b""
    try:
        async with asyncio.timeout(1.4):
            for pause, part in parts:
                await asyncio.sleep(pause)
                writer.write(part)
            while data := await reader.read(1000):
                answer += data
            answer += b"closed"
    except TimeoutError:
        answer += b"open"
    except ConnectionError:
        answer += b"closed"
    finally:
        writer.close()
        server.should_exit = True
        await serving
    return answer


@pytest.mark.parametrize(
    ("parts", "ending"),
    [
        ([], b"closed"),
        ([(0, HEAD)], b"closed"),
        ([(0.1, bytes([byte])) for byte in HEAD[:8]], b"closed"),
        ([(0, HEAD + b"\r\n")], b"hiopen"),
        ([(0, HEAD), (0.1, b"\r\n")], b"hiopen"),
        ([(0, HEAD + b"\r\n"), (0.6, HEAD)], b"hiclosed"),
    ],
    ids=["nothing", "half a head", "a byte at a time", "whole", "in two", "a second that stops"],
)
def test_a_head_that_does_not_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, parts: list[tuple[float, bytes]], ending: bytes
) -> None:
    """uvicorn waits without end, so that a few thousand sockets take every file the server may open."""
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    assert asyncio.run(_talk(parts)).endswith(ending)


def test_a_head_that_is_too_large_is_refused(front) -> None:
    """4 MiB of one header was a way to fill vLLM's memory (CVE-2025-48956)."""
    with suppress(httpx.ReadError, httpx.WriteError):  # the refusal may be lost with what was sent after it
        assert front.client.get("/health", headers={"x-large": "x" * (1 << 20)}).status_code == 400
    assert front.client.get("/health", headers={"x-large": "x" * (1 << 12)}).status_code == 200


def test_a_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    async def half() -> dict:
        if sent.is_set():
            await asyncio.sleep(60)
        sent.set()
        return {"type": "http.request", "body": b"{", "more_body": True}

    monkeypatch.setattr(wire, "BODY_S", 0.05)
    sent = asyncio.Event()
    with pytest.raises(ApiError) as refusal:
        asyncio.run(wire.read_body(half))
    assert refusal.value.status == 408


def test_a_body_that_is_too_much_but_complete_is_refused_at_once() -> None:
    """More of it was waited for: 5 s, for a sender who had sent all there was in one message."""

    async def whole() -> dict:
        if sent.is_set():
            await asyncio.sleep(60)
        sent.set()
        return {"type": "http.request", "body": b'"' * (wire.MAX_QUOTES + 1), "more_body": False}

    async def refused() -> int:
        async with asyncio.timeout(wire.SWALLOW_S / 2):
            with pytest.raises(ApiError) as refusal:
                await wire.read_body(whole)
        return refusal.value.status

    sent = asyncio.Event()
    assert asyncio.run(refused()) == 413


def test_a_reader_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose reader sleeps would hold its pages for as long as the socket lives."""
    closed: list[str] = []

    async def events() -> AsyncGenerator[object]:
        try:
            while True:
                yield {"a": 1}
        finally:
            closed.append("events")

    async def quiet() -> dict:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def full(message: dict) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    monkeypatch.setattr(wire, "SEND_S", 0.05)
    asyncio.run(asyncio.wait_for(wire.EventStream(events(), lambda: closed.append("call"))({}, quiet, full), 10))
    assert closed == ["events", "call"]


def test_no_text_ends_a_line_within_an_event() -> None:
    """Stands against JSON that breaks off: httpx's iter_lines splits at what Unicode calls the end of a line, too."""
    said = "a\u2028b\u2029c\x85d\x0be\x1cf\r\n"

    async def events() -> AsyncGenerator[object]:
        yield {"text": said}

    async def quiet() -> dict:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    sent = list[bytes]()

    async def send(message: dict) -> None:
        sent.append(message.get("body", b""))

    asyncio.run(wire.EventStream(events(), lambda: None)({}, quiet, send))
    event, *_ = b"".join(sent).decode().splitlines()
    assert json.loads(event.removeprefix("data: ")) == {"text": said}


def test_nothing_is_said_of_a_reader_who_leaves_while_events_wait(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio wrote `socket.send() raised exception.` to the server's log at the fifth event that stood behind another:
    none of them let it notice that the connection was gone."""

    async def until_nobody_reads() -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        reader, over = socket.create_connection(listener.getsockname()), asyncio.Event()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed, it is reset at once
        told = list[int]()

        async def events() -> AsyncGenerator[object]:
            reader.close()
            for number in range(50):
                told.append(number)
                yield {"a": number}

        async def app(scope: dict, receive, send) -> None:
            await wire.EventStream(events(), over.set)(scope, receive, send)

        server = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_level="error", ws="none"))
        serving = asyncio.create_task(server.serve([listener]))
        reader.sendall(HEAD + b"\r\n")
        await asyncio.wait_for(over.wait(), 10)
        server.should_exit = True
        await serving
        return len(told)

    assert asyncio.run(until_nobody_reads()) < 50
    assert not caplog.records


def _whole(size: int):
    async def app(scope: dict, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * size})

    return app


async def _endless(scope: dict, receive, send) -> None:
    async def events() -> AsyncGenerator[object]:
        while True:
            yield {"a": "x" * 1000}
            await asyncio.sleep(0)

    await wire.EventStream(events(), lambda: None)(scope, receive, send)


async def _ignored(app, request: bytes) -> bool:
    """Whether a server gives up, within 3 s, a client that sends a request and reads nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    config = uvicorn.Config(app, http=Connection, lifespan="off", log_level="error", ws="none", timeout_keep_alive=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(listener.getsockname())
    try:
        client.sendall(request)
        async with asyncio.timeout(3):
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            while server.server_state.connections:
                await asyncio.sleep(0.01)
        return True
    except TimeoutError:
        return False
    finally:
        client.close()
        server.should_exit = True
        await serving


@pytest.mark.parametrize(
    ("app", "more"),
    [(_whole(1 << 20), b""), (_endless, b""), (_whole(40_000), b""), (_whole(40_000), b"connection: close\r\n")],
    ids=["much", "a stream", "less than pauses a writer", "and closes"],
)
def test_a_reader_that_takes_nothing_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, app, more: bytes
) -> None:
    """Stands against a handler that ends while its socket stays: it is flushed before it closes, for ever."""
    monkeypatch.setattr(connection, "SEND_S", 0.3)
    monkeypatch.setattr(wire, "SEND_S", 0.3)
    assert asyncio.run(_ignored(app, HEAD + more + b"\r\n"))
    assert "without completing" not in caplog.text


def test_a_reader_that_pauses_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a deadline that outlives the pause it was set for."""

    async def read() -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(_whole(8 << 20), http=Connection, lifespan="off", log_level="error", ws="none")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(HEAD + b"\r\n")
        await asyncio.sleep(0.2)
        num_bytes = len(await reader.readexactly(8 << 20))
        await asyncio.sleep(0.6)
        writer.write(HEAD + b"\r\n")
        num_bytes += len(await reader.readexactly(8 << 20))
        writer.close()
        server.should_exit = True
        await serving
        return num_bytes

    monkeypatch.setattr(connection, "SEND_S", 0.5)
    assert asyncio.run(asyncio.wait_for(read(), 10)) == 16 << 20
