"""The whole server as a user starts it: torchrun, two ranks that are not alike, HTTP clients that stay and that leave.

A tiny checkpoint, real processes and sockets. What is slow is starting, so the tests of answers share one server.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil
import pytest
from openai import OpenAI

from scripts.serving import free_port
from tests.checkpoints import tiny
from tests.processes import lives
from tests.slow import slowly

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
START_S = 60
SOON_S = 8  # what must happen at once, on a busy machine
LAYERS = 3
CACHE = 16384
PROMPTS = [f"the cat {'and the hat ' * i}, then {i}" for i in range(8)]


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        time.sleep(0.02)


class Server:
    """A world of two ranks or more, its launcher and its HTTP process."""

    launched_by = "torch.distributed.run"

    def __init__(
        self, topology: Path, *options: str, port: int | None = None, num_ranks: int = 2, restarts: int = 0
    ) -> None:
        self.port, self.num_ranks = free_port() if port is None else port, num_ranks
        launch = [sys.executable, "-m", self.launched_by, "--standalone", "--nproc-per-node", str(num_ranks)]
        launch += ["--max-restarts", str(restarts)]
        command = [*launch, "-m", "tpspec.serve", str(topology), "--set", f"serve.port={self.port}", *options]
        self.launcher = psutil.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.launcher.stdout), daemon=True)
        self._reader.start()
        self.processes: list[psutil.Process] = []

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def ready(self) -> Server:
        try:
            until(lambda: self.launcher.poll() is not None or self._is_ready(), START_S, "the server is ready")
            assert self.launcher.poll() is None, self.output
        except AssertionError:
            self.kill()
            raise
        self.processes = [self.launcher, *self.launcher.children(recursive=True)]
        return self

    def _is_ready(self) -> bool:
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def rank(self, rank: int) -> psutil.Process:
        children = self.launcher.children()
        return next(child for child in children if child.environ().get("RANK") == str(rank))

    def alive(self) -> list[psutil.Process]:
        """What is left of the processes there were when it was ready."""
        return list(filter(lives, self.processes))

    def has_ended(self, seconds: float) -> int:
        """The launcher's exit code; nothing of it may be left after `seconds`."""
        deadline = time.monotonic() + seconds
        while left := self.alive():
            assert time.monotonic() < deadline, f"after {seconds:g} s: {left}\n{self.output}"
            time.sleep(0.02)
        code = int(self.launcher.wait(5))
        self._reader.join(5)
        return code

    def complete(self, **fields: Any) -> dict[str, Any]:
        response = self.client.post("/v1/completions", json={"prompt": PROMPTS[1], "max_tokens": 24} | fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def metric(self, name: str) -> float:
        """The sum over the labels of a metric."""
        response = self.client.get("/metrics")
        assert response.status_code == 200
        values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", response.text, re.MULTILINE)
        assert values, response.text
        return sum(map(float, values))

    def kill(self) -> None:
        self.client.close()
        for process in {*self.processes, self.launcher, *self._children()}:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.launcher.wait(10)
        self._reader.join(5)
        assert self.launcher.stdout is not None
        self.launcher.stdout.close()

    def _children(self) -> list[psutil.Process]:
        try:
            return list(self.launcher.children(recursive=True))
        except psutil.NoSuchProcess:
            return []


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    model = tiny("smollm2", folder / "model", max_position_embeddings=CACHE)
    made = {
        "name": "a test",
        "target": {"model": str(model), "ranks": [0, 1], "dtype": "float32", "weights": [2, 1]},
        "draft": {"source": "ngram", "tokens": 4},
        "device": "cpu",
        "cache": {"tokens": CACHE},
    }
    path = folder / "topology.yaml"
    path.write_text(json.dumps(made))  # JSON is YAML
    return path


@pytest.fixture
def start(topology: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(*options: str, port: int | None = None) -> Server:
        servers.append(Server(topology, *options, port=port))
        return servers[-1]

    yield begin
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def shared(topology: Path) -> Iterator[Server]:
    server = Server(topology)
    yield server.ready()
    server.launcher.terminate()
    server.has_ended(20)
    server.kill()
    assert no_rank_failed(server.output), server.output


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The shared server; whatever a test did to it, it must still answer."""
    yield shared
    assert shared.client.get("/health").status_code == 200
    assert shared.complete(max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


@pytest.fixture(scope="module")
def openai(shared: Server) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{shared.port}/v1", api_key="unused", max_retries=0)


def model_name(server: Server) -> str:
    name: str = server.client.get("/v1/models").json()["data"][0]["id"]
    return name


# Answers

SAMPLED = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}]


@pytest.mark.parametrize("sampling", SAMPLED, ids=["greedy", "seeded"])
def test_a_stream_says_what_the_whole_answer_says(server: Server, openai: OpenAI, sampling: dict[str, Any]) -> None:
    """Stands against characters lost between rounds, noise keyed by request, and a usage that counts chunks."""
    asked: dict[str, Any] = {"model": model_name(server), "prompt": PROMPTS[2], "max_tokens": 40, **sampling}
    whole = openai.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    parts = list(openai.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for part in parts for choice in part.choices) == whole.choices[0].text
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 40


@pytest.mark.parametrize("sampling", SAMPLED, ids=["greedy", "seeded"])
def test_a_streamed_chat_says_what_the_whole_one_says(server: Server, openai: OpenAI, sampling: dict[str, Any]) -> None:
    messages: Any = [{"role": "user", "content": "the cat and the hat"}]
    asked: dict[str, Any] = {"model": model_name(server), "messages": messages, "max_tokens": 40, **sampling}
    whole = openai.chat.completions.create(**asked)
    parts = list(openai.chat.completions.create(**asked, stream=True))
    said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert said == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason


PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "at": {"enum": ["the hat", "the end"]}},
    "required": ["x", "at"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("sampling", SAMPLED)
def test_an_answer_bound_to_a_schema_validates(server: Server, openai: OpenAI, sampling: dict[str, Any]) -> None:
    """With speculation on, streamed or not, and whether or not the model may end its text."""
    bound = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    asked: dict[str, Any] = {"model": model_name(server), "max_tokens": 150, "response_format": bound, **sampling}
    asked["messages"] = [{"role": "user", "content": "the cat and the hat"}]
    choice = openai.chat.completions.create(**asked).choices[0]
    jsonschema.validate(json.loads(choice.message.content), PLACE)
    assert choice.finish_reason == "stop"
    parts = [part.choices[0].delta.content or "" for part in openai.chat.completions.create(**asked, stream=True)]
    assert "".join(parts) == choice.message.content
    endless = openai.chat.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    assert endless.message.content == choice.message.content
    cut = openai.chat.completions.create(**asked, stop="at").choices[0]
    assert cut.message.content == choice.message.content.partition("at")[0]


def test_eight_at_once_get_what_each_gets_alone(server: Server) -> None:
    """Stands against texts that depend on batch mates, and drafts or pages that are another's."""

    def ask(i: int) -> str:
        fields = {"prompt": PROMPTS[i], "temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 30 + 5 * i}
        text: str = server.complete(**fields, ignore_eos=True)["choices"][0]["text"]
        return text

    alone = [ask(i) for i in range(8)]
    assert len(set(alone)) == 8
    rounds = server.metric("tpspec:rounds_total")
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone
    assert server.metric("tpspec:rounds_total") - rounds < sum(30 + 5 * i for i in range(8)) / 2  # they shared rounds


def test_an_answer_tells_its_rounds(server: Server) -> None:
    usage = server.complete(prompt="a b a b a b a b", max_tokens=60, temperature=0, ignore_eos=True)["usage"]
    told = usage["speculation"]
    assert told["rounds"] <= 60
    assert told["drafted"] >= told["accepted"] >= 0
    assert told["tokens_per_round"] == round(60 / told["rounds"], 3)
    assert told["rounds"] + told["accepted"] >= 60


def test_metrics_count_seven_collectives_a_round(server: Server) -> None:
    """2L + 1, on the wire of a real world; rounds that read a prompt in chunks are the only ones without a pick."""
    names = ["tpspec:rounds_total", "tpspec:collectives_total", "tpspec:collective_bytes_total", "tpspec:tokens_total"]
    before = [server.metric(name) for name in names]
    server.complete(max_tokens=50, temperature=0, ignore_eos=True)
    rounds, collectives, num_bytes, tokens = (
        server.metric(name) - was for name, was in zip(names, before, strict=True)
    )
    assert tokens == 50
    assert 0 < rounds <= 50
    assert collectives == (2 * LAYERS + 1) * rounds
    assert num_bytes > 2 * LAYERS * 50 * 72 * 4


# Clients that are wrong


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("completions", b'{"prompt": ', 400, "JSON"),
        ("completions", b"[]", 400, "object"),
        ("completions", b"\xff\xfe", 400, ""),
        ("completions", b'{"prompt": "a", "temperature": -1}', 400, "temperature"),
        ("completions", b'{"prompt": "a", "temperature": NaN}', 400, ""),
        ("completions", b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens"),
        ("completions", b'{"prompt": "a", "max_tokens": "ten"}', 400, "max_tokens"),
        ("completions", b'{"prompt": "a", "top_p": 0}', 400, "top_p"),
        ("completions", b'{"prompt": ""}', 400, "prompt"),
        ("completions", b'{"prompt": [1, 9999]}', 400, "prompt"),
        ("completions", b'{"max_tokens": 5}', 400, "prompt"),
        ("completions", b'{"prompt": "a", "model": "gpt-4"}', 404, "model"),
        ("completions", b'{"prompt": "a", "max_tokens": 999999}', 400, str(CACHE)),
        ("completions", json.dumps({"prompt": "xyzuv" * 4000}).encode(), 400, str(CACHE)),
        ("completions", json.dumps({"prompt": [5] * (CACHE + 1)}).encode(), 400, str(CACHE)),
        ("chat/completions", b'{"messages": []}', 400, "messages"),
        ("chat/completions", b'{"messages": [{"role": "wizard", "content": "a"}]}', 400, "role"),
        ("chat/completions", b'{"prompt": "a"}', 400, "messages"),
    ],
)
def test_a_request_that_is_wrong_is_refused_by_name(
    server: Server, path: str, body: bytes, status: int, said: str
) -> None:
    """Stands against 500, against a world that dies of one client, and against values bent until they fit."""
    headers = {"content-type": "application/json"}
    response = server.client.post(f"/v1/{path}", content=body, headers=headers)
    assert response.status_code == status, response.text
    assert said in response.json()["error"]["message"]


def test_the_longest_prompt_that_fits_is_served(server: Server) -> None:
    """The other side of the refusal, over many chunks."""
    usage = server.complete(prompt=[5, 6, 7, 8] * (CACHE // 16), max_tokens=2)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (CACHE // 4, 2)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_pages_at_once(server: Server, streamed: bool) -> None:
    """Stands against texts for nobody, that fill the cache until nobody else is served."""
    body = {"prompt": "the cat", "max_tokens": CACHE - 100, "ignore_eos": True, "stream": streamed}
    if streamed:
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # kept: httpx hangs up when the iterator is forgotten
            next(lines)
            assert server.metric("vllm:num_requests_running") == 1
            assert server.metric("vllm:kv_cache_usage_perc") > 0
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/v1/completions", json=body, timeout=1.0)
    until(lambda: server.metric("vllm:num_requests_running") == 0, SOON_S, "the request is forgotten")
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.client.get("/health").json()["in_flight"] == 0


# Starting and ending


def test_a_port_in_use_ends_the_second_world_and_not_the_first(server: Server, start: Callable[..., Server]) -> None:
    """Stands against weights that load for minutes before anybody looks at the port, and a world that then hangs."""
    begin = time.monotonic()
    second = start(port=server.port)
    code = int(second.launcher.wait(30))
    second._reader.join(5)
    assert code != 0
    assert time.monotonic() - begin < 25
    ours = [line for line in second.lines if line.startswith("tpspec:")]
    assert ours == [f"tpspec: cannot listen on 127.0.0.1:{server.port}: Address already in use\n"]
    assert traceback_is_torchruns(second.output)


def no_rank_failed(output: str) -> bool:
    """torchrun ends with 1 and a SignalException of its own when it is told to stop, however well its ranks ended."""
    return "exitcode" not in output and "forcefully" not in output and output.count("Traceback") <= 1


def traceback_is_torchruns(output: str) -> bool:
    """torchrun ends with a traceback of its own when a child failed; the ranks' lines carry their rank or ours."""
    return output.count("Traceback") <= 1 and ("Traceback" not in output or "ChildFailedError" in output)


class Stream:
    """A streamed completion that is read in a thread: its lines, and how it ended."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        self._server, self._max_tokens = server, max_tokens
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: len(self.lines) > 5, 20, "the stream runs")

    def _read(self) -> None:
        body = {
            "prompt": "the cat",
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
            "num_drafts": 0,
        }
        try:
            with self._server.client.stream("POST", "/v1/completions", json=body) as response:
                self.lines.extend(line for line in response.iter_lines() if line)
        except httpx.TransportError as error:
            self.error = error

    def has_ended(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the client still waits"

    @property
    def was_whole(self) -> bool:
        return self.error is None and self.lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in self.lines[-2]


def test_sigterm_lets_a_running_stream_finish_and_leaves_no_process(start: Callable[..., Server]) -> None:
    """Stands against answers cut off by every restart, against ranks that obey the launcher's signal at once, and
    against an HTTP process that holds the port."""
    server = start().ready()
    stream = Stream(server, 600)
    assert len(stream.lines) < 400
    server.launcher.terminate()
    stream.has_ended(25)
    assert stream.was_whole, (stream.error, stream.lines[-2:], server.output)
    assert server.has_ended(SOON_S) == 1  # torchrun's own, whenever it is told to stop
    assert no_rank_failed(server.output), server.output
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # the port is free again


@pytest.mark.parametrize(("rank", "when"), [(0, "mid-stream"), (1, "idle"), *slowly((1, "mid-stream"), (0, "idle"))])
def test_a_killed_rank_ends_the_world_within_seconds(start: Callable[..., Server], rank: int, when: str) -> None:
    """Stands against followers that wait for a lead that is gone, a client that waits for ever, a launcher that waits
    30 s for ranks that ignore its signal, and an HTTP process that nobody owns."""
    server = start().ready()
    assert len(server.processes) >= 4  # the launcher, two ranks, HTTP
    stream = Stream(server, CACHE - 100) if when == "mid-stream" else None
    server.rank(rank).kill()
    if stream is not None:
        stream.has_ended(SOON_S)
        assert not stream.was_whole
        assert stream.error is not None or any('"error"' in line for line in stream.lines[-2:])
    assert server.has_ended(SOON_S) != 0
    assert traceback_is_torchruns(server.output), server.output
