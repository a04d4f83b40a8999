"""Replicas under a real Ray: the same answers through its proxy, and requests that go on when a world is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from scripts.serving import free_port
from tests.checkpoints import tiny
from tests.world.test_serving import ENV, ROOT, SOON_S, until

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = pytest.mark.slow
START_S = 300
LONG = 32768  # tokens, which take the tiny model a minute


class Replicas:
    """What launch/ray_serve.py started, with two worlds of a model of one rank."""

    def __init__(self, folder: Path) -> None:
        self.model = str(tiny("smollm2", folder / "model", max_position_embeddings=LONG))
        target = {"model": self.model, "ranks": [0], "dtype": "float32"}
        topology = folder / "topology.yaml"
        topology.write_text(
            json.dumps({"name": "a test", "target": target, "device": "cpu", "cache": {"tokens": LONG}})
        )
        self.port = free_port()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        command = [sys.executable, str(ROOT / "launch" / "ray_serve.py"), str(topology), "--replicas", "2"]
        env = {**ENV, "RAY_USAGE_STATS_ENABLED": "0"}
        self.process = psutil.Popen(
            [*command, "--set", f"serve.port={self.port}"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self._reader.start()

    def worlds(self) -> list[psutil.Process]:
        """The launchers of worlds that are there."""
        found = self.process.children(recursive=True)
        return [process for process in found if "torch.distributed.run" in _command(process)]

    def is_up(self) -> bool:
        """Ray answers, and behind it two worlds do."""
        assert self.process.poll() is None, "".join(self.lines)
        ports = self.ports()
        return len(self.worlds()) == len(ports) == 2 and all(map(_is_ready, [self.port, *ports]))

    def ports(self) -> list[int]:
        """The worlds' own."""
        return [port for server in self.http() for port in _listens(server)]

    def in_flight(self) -> int:
        answers = [httpx.get(f"http://127.0.0.1:{port}/health").json() for port in self.ports()]
        return sum(answer["in_flight"] for answer in answers)

    def http(self) -> list[psutil.Process]:
        """The worlds' processes of that kind, which are nobody's children once their first rank is gone."""
        return [p for p in psutil.process_iter() if "tpspec.serve.http" in (line := _command(p)) and self.model in line]

    def end(self) -> None:
        if self.process.poll() is None:
            for process in [*self.process.children(recursive=True), self.process]:
                process.kill()
        self.process.wait(10)
        self._reader.join(10)
        self.process.stdout.close()
        self.client.close()

    def complete(self, prompt: str) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, "ignore_eos": True})


def _listens(process: psutil.Process) -> list[int]:
    try:
        return [s.laddr.port for s in process.net_connections("inet") if s.status == psutil.CONN_LISTEN]
    except psutil.Error:  # it is ending
        return []


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    started = Replicas(tmp_path_factory.mktemp("ray"))
    until(started.is_up, START_S, "two worlds are ready")
    yield started
    started.end()


def test_a_stream_through_ray_says_what_the_whole_answer_says(replicas: Replicas) -> None:
    """Stands against a proxy that gathers a stream, and one that loses headers or what follows in a path."""
    asked = {"prompt": "the cat", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    whole = replicas.client.post("/v1/completions", json=asked).json()
    told, arrivals = "", []
    with replicas.client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.monotonic())
                told += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert told == whole["choices"][0]["text"]
    assert len({round(at, 3) for at in arrivals}) > 10
    model = replicas.client.get("/v1/models").json()["data"][0]["id"]
    assert replicas.client.get(f"/v1/models/{model}").json()["id"] == model
    refused = replicas.client.post("/v1/completions", json={"prompt": 1.5})
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
    assert len(refused.headers.get_list("date")) == 1


def test_a_client_that_leaves_ray_leaves_the_world_too(replicas: Replicas) -> None:
    """Nobody reads the rest, which would hold pages and rounds for a minute."""
    asked = {"prompt": "the mat", "max_tokens": LONG - 100, "ignore_eos": True, "stream": True}
    with replicas.client.stream("POST", "/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert replicas.in_flight() == 1
    until(lambda: replicas.in_flight() == 0, SOON_S, "nothing is in flight")


def test_a_stream_goes_on_when_its_rank_is_killed(replicas: Replicas) -> None:
    """torchrun starts the rank again, and neither Ray nor the client is told."""
    asked = {"prompt": "the hat", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    whole = replicas.client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    told = ""
    with replicas.client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
        for count, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
            told += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if count == 20:
                for world in replicas.worlds():
                    world.children()[0].kill()
    assert told == whole
    until(replicas.is_up, START_S, "both worlds are ready again")


def test_requests_go_on_when_a_world_is_killed_and_there_are_two_again(replicas: Replicas) -> None:
    killed = replicas.worlds()[0]
    for process in [killed, *killed.children()]:
        process.kill()
    time.sleep(1)  # a request that came in this very moment may be lost
    deadline = time.monotonic() + START_S
    statuses = []
    while not replicas.is_up():
        assert time.monotonic() < deadline
        statuses += [replicas.complete(f"text {len(statuses)}").status_code]
    assert len(statuses) > 10
    assert set(statuses) == {200}
    assert [replicas.complete(f"again {i}").status_code for i in range(8)] == [200] * 8


def test_a_replica_that_is_killed_takes_its_world_along(replicas: Replicas) -> None:
    """Ranks without a launcher would keep their cards, and the world made anew would find none."""
    killed = replicas.worlds()[0]
    world = [killed, *killed.children(recursive=True)]
    killed.parent().kill()
    _, left = psutil.wait_procs(world, 60)
    assert not left
    until(replicas.is_up, START_S, "two worlds are ready again")


def test_told_to_stop_it_leaves_nothing_running(replicas: Replicas) -> None:
    left = [replicas.process, *replicas.process.children(recursive=True), *replicas.http()]
    os.kill(replicas.process.pid, 15)
    assert replicas.process.wait(90) == 0
    _, left = psutil.wait_procs(left, 20)
    assert not left
