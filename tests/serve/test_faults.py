"""Clients that break off, dawdle, overwhelm or attack, at real sockets: nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import openai
import psutil
import pytest
import uvicorn

from tests.serve.conftest import ANSWER, MODEL, wait_until
from tpspec.serve import wire
from tpspec.serve.connection import Connection
from tpspec.serve.wire import MAX_BODY_BYTES, MAX_COMMAS, EventStream

pytestmark = pytest.mark.alone

MIB = 1 << 20


def begun(url: str, body: bytes) -> socket.socket:
    """A connection over which a completion has been asked for, that reads nothing yet."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def cut_off(client: socket.socket) -> None:
    """As a process that is killed with data unread: RST, and no farewell."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_client_that_is_killed_is_forgotten_within_two_rounds(front, stream: bool, state: str) -> None:
    """Against places that are held for nobody until a text ends, and a queue of the dead."""
    engine = front.engine
    engine.answer, engine.round_s, engine.places = (lambda _: [5] * 250), 0.15, 1
    body = json.dumps({"prompt": "a", "max_tokens": 250, "stream": stream}).encode()
    asked = len(engine.requests)
    clients = [begun(front.url, body)]
    wait_until(lambda: len(engine.requests) == asked + 1)
    if state == "queued":
        clients.append(begun(front.url, body))
        wait_until(lambda: len(engine.requests) == asked + 2)
    wait_until(lambda: front.client.get("/health").json()["running"] == 1)
    killed, at = engine.requests[-1].id, engine.rounds
    cut_off(clients.pop())
    wait_until(lambda: killed in engine.cancelled)
    assert engine.rounds - at <= 2
    for client in clients:
        cut_off(client)


def test_a_reader_of_a_byte_now_and_then_is_left_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a client that takes just enough to be alive: what waits for it is bounded by the socket, it is cut when
    nothing more fits for a while, and who reads beside it reads on."""
    monkeypatch.setattr(wire, "SEND_S", 0.4)
    asyncio.run(asyncio.wait_for(_dawdle(), 30))


async def _dawdle() -> None:
    made, ended = {b"/slow": 0, b"/quick": 0}, asyncio.Event()

    async def events(path: bytes) -> AsyncGenerator[object]:
        for _ in range(2000):
            made[path] += 1
            yield {"text": "x" * 16384 if path == b"/slow" else "x"}
            await asyncio.sleep(0.001)

    async def app(scope: dict, receive, send) -> None:
        path = scope["raw_path"]
        await EventStream(events(path), ended.set if path == b"/slow" else lambda: None)(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_level="error", ws="none"))
    serving = asyncio.create_task(server.serve([listener]))
    dawdler = socket.socket()
    dawdler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    dawdler.connect(listener.getsockname())
    dawdler.sendall(b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n")
    dawdler.setblocking(False)
    reading = asyncio.create_task(_read(listener.getsockname()))
    while not ended.is_set():
        await asyncio.get_running_loop().sock_recv(dawdler, 1)
        await asyncio.sleep(0.05)
    assert made[b"/slow"] * 16384 < 16 * MIB  # what the two kernels' buffers took
    assert (await reading).count(b"data: ") == 2001
    dawdler.close()
    server.should_exit = True
    await serving


async def _read(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /quick HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    answer = await reader.read(-1)
    writer.close()
    return answer


ATTACKS = {
    "ids": b'{"prompt": [' + b"12345, " * (19 * MIB // 7) + b"5]}",
    "as many ids as may be": b'{"prompt": [' + b"12345," * MAX_COMMAS + b"5]}",
    "keys": b'{"prompt": "a"' + b"".join(b', "k%07d": 1' % i for i in range(MIB)) + b"}",
    "as many keys as may be": b'{"prompt": "a"' + b"".join(b', "k%07d": 1' % i for i in range(32000)) + b', "n": 0}',
    "a long text": b'{"prompt": "' + b"the bus " * (MAX_BODY_BYTES // 8 - 8) + b'"}',
    "escapes": b'{"prompt": "' + rb"\u00e9" * (MAX_BODY_BYTES // 6 - 8) + b'"}',
    "surrogates": b'{"prompt": "' + rb"\ud83d\ude00" * (MAX_BODY_BYTES // 12 - 8) + b'"}',
    "deep": b'{"prompt": ' + b"[" * MIB + b"]" * MIB + b"}",
    "objects": b'{"prompt": [' + b"{}," * (MAX_COMMAS - 8) + b"{}]}",
    "a million ids in one text": b'{"prompt": "' + b"a," * (MAX_COMMAS - 8) + b'"}',
}


@contextmanager
def watched(url: str) -> Iterator[list[float]]:
    """Seconds that /health took, asked again and again meanwhile."""
    over, took = threading.Event(), []

    def watch() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not over.wait(0.002):
                begin = time.perf_counter()
                assert client.get("/health").status_code == 200
                took.append(time.perf_counter() - begin)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        wait_until(lambda: took)
        took.clear()
        yield took
        over.set()
        watching.result()


def attacked(url: str, attack: str) -> None:
    with suppress(httpx.WriteError, httpx.ReadError):  # the refusal may be lost on the way
        answer = httpx.post(f"{url}/v1/completions", content=ATTACKS[attack], timeout=60)
        assert answer.status_code in (400, 413), answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_body_made_to_cost_time_is_cheap(front, attack: str) -> None:
    """19 MB of token ids once took a second, in which nobody else had a token, and a million keys nine. Seconds of the
    CPU, for a busy machine has others."""
    process = psutil.Process(front.process.pid)
    memory, before = process.memory_info().rss, sum(process.cpu_times()[:2])
    attacked(front.url, attack)
    assert sum(process.cpu_times()[:2]) - before < 0.5
    assert process.memory_info().rss - memory < 128 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_health_is_answered_within_50_ms_under_attack(front, attack: str) -> None:
    """On a machine that has nothing else to do. Twice: a stall of the machine's own does not come back."""
    worst: list[float] = []
    for _ in range(2):
        with watched(front.url) as took:
            attacked(front.url, attack)
        worst.append(max(took, default=0.0))
    assert min(worst) < 0.05


@pytest.mark.slow
def test_ten_times_what_fits_is_served_in_the_end(front) -> None:
    """Against a queue that grows, and against refusals that a client cannot make anything of: the SDK comes again."""
    front.engine.places, front.engine.per_round = 2, 8
    front.engine.answer = lambda request: list(request.prompt)

    def ask(i: int) -> str:
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=20) as client:
            return client.completions.create(model=MODEL, prompt=f"the bus {i}", max_tokens=99).choices[0].text

    with ThreadPoolExecutor(40) as pool:
        assert list(pool.map(ask, range(60))) == [f"the bus {i}" for i in range(60)]
    wait_until(lambda: front.client.get("/health").json()["in_flight"] == 0)


def test_it_listens_where_ipv6_is_spoken(start_front) -> None:
    """Against an address that is printed without its brackets, and a host that is taken for an IPv4 one."""
    if not socket.has_ipv6:
        pytest.skip("this machine speaks no IPv6")
    front = start_front("--host", "::1")
    assert front.url.startswith("http://[::1]:")
    front.start_engine()
    assert front.complete()["choices"][0]["text"] == ANSWER
    assert "asks nobody for a key" not in front.close()
