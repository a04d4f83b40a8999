"""A rank is killed or stopped under load: torchrun starts the world again, and every text is what it would have been.

Real worlds, signals and clients. What is slow is starting, so a world dies several times.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import httpx
import psutil
import pytest

from tests.checkpoints import tiny
from tests.world.test_serving import CACHE, SOON_S, START_S, Server, until
from tpspec.errors import UserError, WorldFailure

pytestmark = pytest.mark.alone

RESTART_S = 60  # imports, on a busy machine
HANG_S = 2
LENGTH = 800
ASKS: list[dict[str, Any]] = [
    {"prompt": "the cat and the hat", "temperature": 0},
    {"prompt": "there, then, and again", "temperature": 0.8, "seed": 5, "num_drafts": 0},
    {"prompt": "a b a b", "temperature": 0.7, "seed": 6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]
ASKS[2] |= {"logprobs": 2, "presence_penalty": 0.1, "min_tokens": LENGTH - 50}
FATES = [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)]


class World(Server):
    """A server whose ranks may be started again, by what `launch/serve` starts."""

    launched_by = "tpspec.launch"

    def __init__(self, *given: Any, **named: Any) -> None:
        self._others = set(Path(gettempdir()).glob("tpspec-*"))  # some of a process that had one's number before it
        super().__init__(*given, **named)

    def died(self) -> None:
        """What there is by now belongs to it, too."""
        self.processes = list({*self.processes, *self._children()})

    def until_restarted(self, times: int) -> None:
        until(lambda: self.metric("tpspec:world_restarts_total") == times, RESTART_S, "the ranks are started again")
        until(self._is_ready, START_S, "the server is ready again")
        self.died()

    def left_over(self) -> list[Path]:
        pids = [self.launcher.pid, *(process.pid for process in self.processes)]
        found = {folder for pid in pids for folder in Path(gettempdir()).glob(f"tpspec-{pid}-*")}
        return sorted(found - self._others)


class Answer:
    """One request in a thread: text, and what else is to be the same however it came."""

    def __init__(self, server: Server, ask: dict[str, Any], *, streamed: bool = True) -> None:
        self._server, self._ask = server, {"max_tokens": LENGTH, "ignore_eos": True} | ask
        self.text, self.finish, self.error = "", "", ""
        self.ids: list[str] = []
        self.logprobs: list[float] = []
        self.num_parts = 0
        self._thread = threading.Thread(target=self._stream if streamed else self._whole, daemon=True)
        self._thread.start()

    def wait(self, seconds: float = RESTART_S) -> Answer:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the client still waits"
        return self

    def begun(self) -> Answer:
        until(lambda: self.num_parts > 10, 20, "the stream runs")
        assert not self.finish
        return self

    def is_as(self, other: Answer) -> bool:
        return (
            (self.text, self.finish, self.ids, self.error) == (other.text, other.finish, other.ids, "")
            and self.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            and bool(self.text)
        )

    def _stream(self) -> None:
        client = self._server.client
        with client.stream("POST", "/v1/completions", json=self._ask | {"stream": True}, timeout=100) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _whole(self) -> None:
        self._take(self._server.client.post("/v1/completions", json=self._ask, timeout=100).json())

    def _take(self, part: dict[str, Any]) -> None:
        if "error" in part:
            self.error = part["error"]["message"]
            return
        (choice,) = part["choices"]
        self.num_parts += 1
        self.text += choice["text"]
        self.finish = choice["finish_reason"] or ""
        self.ids += (choice["logprobs"] or {}).get("tokens", [])
        self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("survival")
    tiny("smollm2", folder / "model", max_position_embeddings=CACHE)
    return folder


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def begin(restarts: int, placement: str | dict[str, int] = "inline", num_ranks: int = 2) -> World:
        model = str(folder / "model")
        source = {"source": "ngram"} if placement == "inline" else {"source": "model", "model": model}
        made = {
            "name": "a test",
            "target": {"model": model, "ranks": [0, 1], "dtype": "float32", "weights": [2, 1]},
            "draft": source | {"placement": placement, "tokens": 4},
            "engine": {"hang_s": HANG_S},
            "device": "cpu",
            "cache": {"tokens": CACHE},
        }
        path = folder / "topology.yaml"
        path.write_text(json.dumps(made))
        worlds.append(World(path, num_ranks=num_ranks, restarts=restarts))
        world = worlds[-1].ready()
        assert isinstance(world, World)
        return world

    yield begin
    for world in worlds:
        world.kill()


def begun(world: World) -> list[Answer]:
    streams = [Answer(world, ask) for ask in ASKS]
    return [stream.begun() for stream in streams]


def strike(world: World, rank: int, how: signal.Signals) -> None:
    world.died()
    world.rank(rank).send_signal(how)
    until(lambda: world.client.get("/health").json()["status"] == "restarting", HANG_S + SOON_S, "the loss is noticed")


def test_texts_go_on_through_a_death_and_a_hang_until_no_start_is_left(start: Callable[..., World]) -> None:
    """Stands against streams that break off, tokens that come twice or are drawn anew, penalties that forget what was
    said, requests lost because nobody was there, and work for clients who have left."""
    world = start(restarts=2)
    truth = [Answer(world, ask).wait() for ask in ASKS]
    streams = begun(world)
    whole = Answer(world, ASKS[0], streamed=False)
    until(lambda: world.client.get("/health").json()["running"] == 4, SOON_S, "all run")

    strike(world, 0, signal.SIGKILL)
    assert (world.client.get("/health").status_code, world.client.get("/ready").status_code) == (503, 503)
    with pytest.raises(httpx.ReadTimeout):
        world.client.post("/v1/completions", json={"prompt": "a", "max_tokens": CACHE - 9}, timeout=0.3)
    newcomer = Answer(world, ASKS[1])
    for answer, expected in zip([*streams, whole, newcomer], [*truth, truth[0], truth[1]], strict=True):
        assert answer.wait().is_as(expected), answer.error
    world.until_restarted(1)
    until(lambda: world.metric("vllm:num_requests_running") == 0, SOON_S, "nobody is worked for")
    assert world.metric("vllm:kv_cache_usage_perc") == 0

    streams = begun(world)
    strike(world, 1, signal.SIGSTOP)
    assert all(answer.wait().is_as(expected) for answer, expected in zip(streams, truth, strict=True))
    world.until_restarted(2)
    assert world.output.count(f"rank 1 hangs: its process has not run for {HANG_S} s") == 1

    last = Answer(world, {"prompt": "the cat", "max_tokens": CACHE - 100, "num_drafts": 0}).begun()
    world.rank(1).kill()
    assert last.wait(SOON_S).error == "the engine stopped"
    assert world.has_ended(SOON_S) == WorldFailure.exit_code
    assert "Traceback" not in world.output, world.output
    assert world.left_over() == []


def test_a_port_in_use_is_said_once_however_often_ranks_may_be_started(folder: Path) -> None:
    """What is wrong at the first start would be wrong at all of them; torchrun starts the ranks for any exit code."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made = {"name": "a test", "target": {"model": str(folder / "model"), "ranks": [0]}, "device": "cpu"}
        path = folder / "alone.yaml"
        path.write_text(json.dumps(made))
        world = World(path, port=taken.getsockname()[1], num_ranks=1, restarts=3)
        assert world.launcher.wait(START_S) == UserError.exit_code
        world._reader.join(5)
        world.kill()
    assert world.output.count("Address already in use") == 1
    assert "Traceback" not in world.output
    assert world.left_over() == []


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_read_is_said_once(folder: Path, tmp_path: Path) -> None:
    """Only the HTTP process reads it, and when it has, the ranks are there already."""
    model = shutil.copytree(folder / "model", tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    made = {"name": "a test", "target": {"model": str(model), "ranks": [0]}, "device": "cpu"}
    (tmp_path / "topology.yaml").write_text(json.dumps(made))
    world = World(tmp_path / "topology.yaml", num_ranks=1, restarts=3)
    assert world.launcher.wait(START_S) == UserError.exit_code
    world._reader.join(5)
    world.kill()
    assert world.output.count("cannot read the tokenizer") == 1, world.output


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["inline", {"gaps": 1}, {"dedicated": 2}], ids=["inline", "gaps", "dedicated"])
def test_every_rank_may_die_in_every_way(start: Callable[..., World], placement: Any) -> None:
    """And a drafter of its own comes back with the world, as new."""
    fates = FATES + ([(2, signal.SIGKILL)] if placement == {"dedicated": 2} else [])
    world = start(restarts=len(fates), placement=placement, num_ranks=3 if placement == {"dedicated": 2} else 2)
    truth = [Answer(world, ask).wait() for ask in ASKS]
    for times, (rank, how) in enumerate(fates, start=1):
        streams = begun(world)
        strike(world, rank, how)
        for answer, expected in zip(streams, truth, strict=True):
            assert answer.wait().is_as(expected), (rank, how, answer.error)
        world.until_restarted(times)
    world.launcher.terminate()
    assert world.has_ended(30) == 0
    assert "Traceback" not in world.output
    assert world.left_over() == []


@pytest.mark.slow
@pytest.mark.parametrize("when", ["away", "loading", "draining", "twice"])
def test_a_stop_ends_everything_whatever_else_is_going_on(start: Callable[..., World], when: str) -> None:
    """Stands against an HTTP process that waits for a world nobody starts any more, and one that nobody owns."""
    world = start(restarts=2)
    answer = Answer(world, {"prompt": "a", "max_tokens": 4000 if when == "draining" else CACHE - 9, "num_drafts": 0})
    answer.begun()
    if when in ("away", "loading"):
        strike(world, 1, signal.SIGKILL)
    if when == "loading":
        old = {process.pid for process in world.processes}
        until(lambda: {p.pid for p in world._children()} - old, RESTART_S, "new ranks")
        time.sleep(2)
    world.died()
    world.launcher.send_signal(signal.SIGINT if when == "loading" else signal.SIGTERM)  # as Ctrl-C does
    if when == "draining":
        time.sleep(0.5)
        world.rank(1).kill()
    if when == "twice":
        time.sleep(1)
        world.launcher.terminate()
    answer.wait(40)
    assert world.has_ended(30) == 0
    assert "Traceback" not in world.output
    assert world.left_over() == []


@pytest.mark.slow
def test_a_world_that_idles_notices_a_rank_that_is_stopped(start: Callable[..., World]) -> None:
    """Against a server that is well until somebody asks it something."""
    world = start(restarts=1)
    world.rank(1).send_signal(signal.SIGSTOP)
    world.until_restarted(1)
    assert Answer(world, ASKS[0]).wait().finish == "length"


@pytest.mark.slow
def test_an_http_process_that_is_killed_is_started_again(start: Callable[..., World]) -> None:
    """Its clients are lost, and nobody else; the port is free for the next."""
    world = start(restarts=1)
    http = next(p for p in psutil.Process(world.rank(0).pid).children() if "tpspec.serve.http" in p.cmdline())
    http.kill()
    time.sleep(1)
    until(world._is_ready, START_S + RESTART_S, "it serves again")
    assert Answer(world, ASKS[0]).wait().finish == "length"


@pytest.mark.slow
def test_many_streams_are_all_there_again(start: Callable[..., World]) -> None:
    """Against an order, or ids, that mix up who gets what."""
    world = start(restarts=1)
    asks = [{"prompt": f"{i} the cat {'and ' * i}", "temperature": 0.8 * (i % 2), "seed": i} for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        truth = list(pool.map(lambda ask: Answer(world, ask).wait(), asks))
    streams = [Answer(world, ask) for ask in asks]
    until(lambda: all(stream.num_parts > 5 for stream in streams), 20, "all run")
    strike(world, 1, signal.SIGKILL)
    assert all(answer.wait().is_as(expected) for answer, expected in zip(streams, truth, strict=True))
