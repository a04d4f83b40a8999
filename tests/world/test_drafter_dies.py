"""A server whose drafter is killed, stopped and left: requests go on as if nothing had happened, and it comes back.

Real processes, signals and clients under load; the drafter is the target itself, so that what it proposes is accepted.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.checkpoints import tiny
from tests.slow import slowly
from tests.world.test_serving import CACHE, SOON_S, Server, Stream, no_rank_failed, until

pytestmark = pytest.mark.alone

START_S = 45  # imports, and on a busy machine in the lowest class of the scheduler
STOPPED_S = 3.0
ASKS: list[dict[str, Any]] = [
    {"prompt": "the cat and the hat", "temperature": 0},
    {"prompt": "there, then, and again", "temperature": 0.8, "seed": 5},
]
PLACEMENTS: dict[str, tuple[dict[str, int], int]] = {"dedicated": ({"dedicated": 2}, 3), "gaps": ({"gaps": 1}, 2)}


@pytest.fixture(params=["dedicated", *slowly("gaps")])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    placement, num_ranks = PLACEMENTS[request.param]
    model = str(tiny("smollm2", tmp_path / "model", max_position_embeddings=CACHE))
    made = {
        "name": "a test",
        "target": {"model": model, "ranks": [0, 1], "dtype": "float32"},
        "draft": {"source": "model", "model": model, "placement": placement, "tokens": 4},
        "pipeline": {"policy": "fan_out"},
        "device": "cpu",
        "cache": {"tokens": CACHE},
        "link": {"latency_us": 1000, "gbytes_per_s": 5, "emulate": True},  # gaps to draft in, whatever the machine
    }
    path = tmp_path / "topology.yaml"
    path.write_text(json.dumps(made))
    server = Server(path, num_ranks=num_ranks)
    yield server.ready()
    server.kill()


class Load:
    """Clients that ask the same again and again, and expect the same."""

    def __init__(self, server: Server) -> None:
        self.failures: list[object] = []
        self.num_answers = 0
        self._stop = threading.Event()
        self._server, expected = server, [self._text(server.client, ask | {"num_drafts": 0}) for ask in ASKS]
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") == 0
        clients = zip(ASKS, expected, strict=True)
        self._threads = [threading.Thread(target=self._run, args=client, daemon=True) for client in clients]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "a request hangs"

    def _run(self, ask: dict[str, Any], expected: str) -> None:
        with httpx.Client(base_url=self._server.client.base_url, timeout=20) as client:
            while not self._stop.is_set():
                try:
                    text = self._text(client, ask)
                except (httpx.HTTPError, KeyError) as error:
                    self.failures.append(error)
                    return
                self.num_answers += 1
                if text != expected:
                    self.failures.append((text, expected))

    def _text(self, client: httpx.Client, ask: dict[str, Any]) -> str:
        response = client.post("/v1/completions", json=ask | {"max_tokens": 100, "ignore_eos": True})
        text: str = response.json()["choices"][0]["text"]
        return text


def drafter(server: Server) -> psutil.Process:
    """The drafter's process, whichever it is now."""
    found: list[psutil.Process] = []
    until(lambda: found.extend(drafters(server)) or found, SOON_S, "a drafter runs")
    return found[0]


def drafters(server: Server) -> Iterator[psutil.Process]:
    for child in server.launcher.children(recursive=True):
        try:
            if "tpspec.roles.drafter" in child.cmdline():
                yield child
        except psutil.Error:
            continue


def drafts_are_accepted(server: Server, seconds: float) -> None:
    accepted: Callable[[], float] = lambda: server.metric("vllm:spec_decode_num_accepted_tokens_total")  # noqa: E731
    before = accepted()
    until(lambda: accepted() > before + 20, seconds, "drafts are accepted")


def test_a_drafter_that_is_killed_or_stopped_costs_speed_only(server: Server) -> None:
    """Stands against a world that ends with its drafter, rounds that wait for one that is gone, and a target that must
    be restarted to have its drafter back."""
    with Load(server) as load:
        drafts_are_accepted(server, START_S)
        first = drafter(server)
        first.kill()
        until(lambda: drafter(server).pid != first.pid, SOON_S, "another is started")
        drafts_are_accepted(server, START_S)
        until(lambda: server.metric("tpspec:drafter_away") == 0, SOON_S, "it is not away")
        silences = server.output.count("has not answered")

        second = drafter(server)
        second.suspend()
        time.sleep(STOPPED_S)
        until(lambda: server.metric("tpspec:drafter_away") == 1, SOON_S, "the drafter is known to be away")
        answers = load.num_answers
        until(lambda: load.num_answers > answers + 1, SOON_S, "requests are answered without it")
        second.resume()
        until(lambda: server.metric("tpspec:drafter_away") == 0, SOON_S, "the drafter is back")
        drafts_are_accepted(server, SOON_S)
        assert drafter(server).pid == second.pid
    assert load.failures == []
    assert server.output.count("the drafter died (exit code -9)") == 1
    assert server.output.count("has not answered") == silences + 1 <= 2

    # And it is stopped again when the server ends: told to, with a stream to finish, or by the death of the guard.
    second.suspend()
    server.processes.append(second)
    if server.num_ranks == 3:
        server.rank(2).kill()
        assert server.has_ended(SOON_S) != 0
        return
    stream = Stream(server, 300)
    server.launcher.terminate()
    stream.has_ended(SOON_S)
    assert stream.was_whole, (stream.error, stream.lines[-2:], server.output)
    server.has_ended(SOON_S)
    assert no_rank_failed(server.output), server.output
