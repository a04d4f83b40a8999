"""What the HTTP process does while engines come and go: who waits, what another is told, and when it gives up.

Engines that say what a test wrote; the real process, its real clients, and processes that stand for leads.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from tests.serve.conftest import command_line, wait_until
from tpspec.comm.link import FrontendLink
from tpspec.comm.messages import Cancel, Hello, Ready, Report, Stats, Stop, Submit, ToLead
from tpspec.request import Delta, Logprob, Request, Sampling
from tpspec.serve.answers import Ask, Piece
from tpspec.serve.leads import Leads
from tpspec.serve.metrics import Metrics
from tpspec.serve.requests import MOST_LOST, Exchange, Table
from tpspec.text import Text

GONE = 2**22 + 1  # a pid above any


class Sleeper:
    """A process that can be killed, and stands for the lead or for torchrun."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "600"])
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def sleeper() -> Iterator[Callable[[], Sleeper]]:
    made: list[Sleeper] = []

    def make() -> Sleeper:
        made.append(Sleeper())
        return made[-1]

    yield make
    for one in made:
        one.kill()


# The table, without sockets


@dataclass
class World:
    """Engines one after another, that know each request by its number alone and give it the next of `tokens`."""

    table: Table
    sent: list[ToLead]
    tokens: tuple[int, ...]
    known: dict[int, tuple[Request, int]] = field(default_factory=dict)

    def hear(self) -> None:
        for message in self.sent:
            if isinstance(message, Submit):
                assert message.request.id not in self.known
                self.known[message.request.id] = message.request, len(message.request.begun)
            elif isinstance(message, Cancel):
                del self.known[message.id]
        self.sent.clear()

    def round(self, count: int) -> list[Delta]:
        """What every request gains; nobody has been told of it yet."""
        self.hear()
        deltas = []
        for number, (request, at) in list(self.known.items()):
            tokens = self.tokens[at : min(at + count, request.max_tokens)]
            self.known[number] = request, at + len(tokens)
            ends = at + len(tokens) == min(len(self.tokens), request.max_tokens)
            logprobs = tuple(Logprob(-float(i)) for i in range(at, at + len(tokens)))
            deltas.append(Delta(number, tokens, "length" if ends else None, logprobs=logprobs))
            if ends:
                del self.known[number]
        return deltas

    def die(self) -> None:
        self.table.lose(4)
        self.known.clear()
        self.hear()
        assert not self.known, "a message for an engine that is gone"


def all_of(exchange: Exchange) -> list[Piece]:
    async def collect() -> list[Piece]:
        return [piece async for piece in exchange.pieces() if piece is not None]

    return asyncio.run(collect())


@pytest.fixture(scope="module")
def text(model_folder: Path) -> Text:
    return Text.load(model_folder)


def ask(max_tokens: int, **keys: Any) -> Ask:
    return Ask((5, 6), max_tokens, Sampling(), frozenset({2}), logprobs=0, **keys)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    rounds=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["told", "told", "lost", "late"])), max_size=30),
)
def test_wherever_engines_end_every_token_comes_once(
    text: Text, lengths: list[int], rounds: list[tuple[int, str]]
) -> None:
    """lost: the engine dies with a round that nobody was told of; late: what it said comes when another has begun."""
    words = tuple(text.encode("abcdefghijklmnopqrst"))
    sent: list[ToLead] = []
    table = Table(Metrics("m"), sent.append)
    world = World(table, sent, words)
    exchange = table.open([ask(length) for length in lengths], text)
    for count, fate in [*rounds, *[(1, "told")] * 21]:
        deltas = world.round(count)
        if fate == "told":
            table.read(Report(deltas, Stats()))
            continue
        for flight in exchange.flights:
            flight.num_lost = 0  # how many losses are too many is another test's
        world.die()
        table.resume()
        if fate == "late":
            table.read(Report(deltas, Stats()))
    world.hear()
    assert not world.known
    assert len(table) == 0
    pieces = all_of(exchange)
    for index, length in enumerate(lengths):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == "abcdefghijklmnopqrst"[:length]
        assert mine[-1].finish == "length"
        rated = [rated for piece in mine for rated in piece.rated]
        assert [one.logprob for one in rated] == [Logprob(-float(i)) for i in range(length)]
    assert exchange.effort.tokens == sum(lengths)


def test_log_probabilities_of_a_prompt_that_was_told_in_part_are_not_told_again(text: Text) -> None:
    """A long prompt is read in chunks, and an engine may be lost between two of them."""
    sent: list[ToLead] = []
    table = Table(Metrics("m"), sent.append)
    prompt = tuple(text.encode("abcdef"))
    table.open([Ask(prompt, 4, Sampling(), frozenset(), echo="abcdef", logprobs=0)], text)
    table.read(Report([Delta(1, (), prompt_logprobs=(Logprob(-1.0), Logprob(-2.0)))], Stats()))
    table.lose(4)
    table.resume()
    again = sent[-1]
    assert isinstance(again, Submit)
    assert (again.request.prompt, again.request.num_scored, again.request.begun) == (prompt, 2, ())


def test_without_an_engine_nobody_is_told_and_who_leaves_is_forgotten(text: Text) -> None:
    """Against a cancel that is lost with the engine, after which the next one works for nobody and keeps the pages."""
    sent: list[ToLead] = []
    table = Table(Metrics("m"), sent.append)
    calls = [table.open([ask(9)], text) for _ in range(2)]
    table.lose(4)
    calls.append(table.open([ask(9)], text))
    assert table.num_queued == 3
    calls[0].close()
    assert table.num_queued == 2
    assert [type(message) for message in sent] == [Submit, Submit]
    table.resume()
    assert [message.request.id for message in sent[2:] if isinstance(message, Submit)] == [4, 5]
    calls[1].close()
    assert sent[-1] == Cancel(4)


def test_a_request_that_may_be_why_engines_go_is_not_sent_to_every_one(text: Text) -> None:
    """Against one request that uses up all starts that torchrun has, and takes the others with it."""
    sent: list[ToLead] = []
    table = Table(Metrics("m"), sent.append)
    good, bad = table.open([ask(20)], text), table.open([ask(20)], text)
    for _ in range(MOST_LOST):
        table.read(Report([Delta(good.flights[0].request.id, (5,))], Stats()))
        table.lose(4)
        table.resume()
    assert len(table) == 1
    (last,) = all_of(bad)
    assert last.finish == "error"
    assert last.error is not None
    table.read(Report([Delta(good.flights[0].request.id, (5,), "stop")], Stats()))
    assert sum(piece.num_tokens for piece in all_of(good)) == MOST_LOST + 1


def test_what_only_waited_outlives_any_number_of_engines(text: Text) -> None:
    """Stands against a whole queue that is ended, and told that it was worked on, by the deaths of others' engines."""
    table = Table(Metrics("m"), [].append)
    first, *queue = [table.open([ask(20)], text) for _ in range(4)]
    for _ in range(MOST_LOST):
        table.lose(1)
        table.resume()
    assert all_of(first)[-1].finish == "error"
    table.lose(1)
    assert len(table) == len(queue)


# Who leads


def test_a_lead_that_is_gone_is_missed_once_and_waited_for(sleeper: Callable[[], Sleeper]) -> None:
    torchrun, first, second = sleeper(), sleeper(), sleeper()
    leads = Leads(first.pid, torchrun.pid)
    assert leads.look() == "here"
    assert not leads.greet(Hello(first.pid, 1))
    first.kill()
    assert [leads.look() for _ in range(3)] == ["lost", "away", "away"]
    assert leads.greet(Hello(second.pid, 0))
    assert leads.look() == "here"
    second.kill()
    assert leads.look() == "gone"


@pytest.mark.parametrize("restarts_left", [0, 1])
def test_nobody_is_waited_for_who_cannot_come(sleeper: Callable[[], Sleeper], restarts_left: int) -> None:
    """torchrun gone ends everything, even while ranks that it has lost go on."""
    torchrun, lead = sleeper(), sleeper()
    leads = Leads(lead.pid, torchrun.pid)
    leads.greet(Hello(lead.pid, restarts_left))
    torchrun.kill()
    assert leads.look() == "gone"
    assert Leads(GONE, None).look() == "gone"


# The process


class Lead:
    """A lead whose words are a test's, with a process that can be killed in its place."""

    def __init__(self, endpoint: str, process: Sleeper, restarts_left: int) -> None:
        self._process, self._link = process, FrontendLink(endpoint)
        self.heard: list[ToLead] = []
        self.say(Hello(process.pid, restarts_left))

    def say(self, message: Hello | Ready | Report) -> None:
        self._link.send(message)

    def hear(self, count: int) -> list[ToLead]:
        """Everything so far, once it is so much."""

        def has_come() -> bool:
            self.heard += self._link.poll(0.01)
            return len(self.heard) >= count

        wait_until(has_come)
        return self.heard

    def die(self) -> None:
        self.leave()
        self._process.kill()

    def leave(self) -> None:
        self._link.close()


class Front:
    """The HTTP process with room for one queued request, and the folder in which leads find it."""

    def __init__(self, model_folder: Path, folder: Path, sleeper: Callable[[], Sleeper]) -> None:
        folder.mkdir(mode=0o700)
        self.folder, self._sleeper = folder, sleeper
        self.torchrun, first = sleeper(), sleeper()
        options = ["--parent", str(first.pid), "--launcher", str(self.torchrun.pid), "--folder", str(folder)]
        command = command_line(model_folder, *options, "--max-queued", "2")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        place = json.loads(self.process.stdout.readline())
        self._endpoint = place["endpoint"]
        self.client = httpx.Client(base_url=place["url"], timeout=20)
        self._leads = [Lead(self._endpoint, first, 1)]
        self.lead.say(Ready(100, 2, 4))
        wait_until(lambda: self.status == "ready")

    @property
    def lead(self) -> Lead:
        return self._leads[-1]

    @property
    def status(self) -> str:
        return str(self.client.get("/health").json()["status"])

    def another_lead(self, restarts_left: int = 0) -> None:
        self._leads.append(Lead(self._endpoint, self._sleeper(), restarts_left))

    def complete(self) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "the bus", "max_tokens": 4})

    def close(self) -> str:
        self.client.close()
        for lead in self._leads:
            lead.leave()
        self.process.terminate()
        return self.process.communicate(timeout=20)[1]


@pytest.fixture
def front(model_folder: Path, tmp_path: Path, sleeper: Callable[[], Sleeper]) -> Iterator[Front]:
    front = Front(model_folder, tmp_path / "run", sleeper)
    yield front
    front.close()
    assert not front.folder.exists()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def begun(front: Front, pool: ThreadPoolExecutor, words: tuple[int, ...]) -> Future[httpx.Response]:
    """A request with two of its tokens."""
    answer = pool.submit(front.complete)
    (submit,) = front.lead.hear(1)
    assert isinstance(submit, Submit)
    front.lead.say(Report([Delta(submit.request.id, words[:2])], Stats(running=1)))
    wait_until(lambda: front.client.get("/health").json()["running"] == 1)
    return answer


def test_what_was_in_flight_goes_on_and_what_comes_meanwhile_waits(
    front: Front, pool: ThreadPoolExecutor, tokenizer: Tokenizer
) -> None:
    """A queue that is full stays full: the engine is away, not the limit."""
    words = tuple(tokenizer.encode("abcd").ids)
    first = begun(front, pool, words)
    front.lead.die()
    wait_until(lambda: front.status == "restarting")
    assert front.client.get("/health").status_code == front.client.get("/ready").status_code == 503
    assert front.client.get("/health").json()["running"] == 0  # what the engine that is gone said is no news
    others = [pool.submit(front.complete) for _ in range(2)]
    wait_until(lambda: front.client.get("/health").json()["in_flight"] == 3)
    refused = front.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")

    front.another_lead()
    front.lead.say(Ready(100, 2, 4))
    wait_until(lambda: front.status == "ready")
    requests = [message.request for message in front.lead.hear(3) if isinstance(message, Submit)]
    assert [request.begun for request in requests] == [words[:2], (), ()]
    front.lead.say(Report([Delta(r.id, words[len(r.begun) :], "length") for r in requests], Stats()))
    assert {answer.result().json()["choices"][0]["text"] for answer in [first, *others]} == {"abcd"}
    assert first.result().json()["usage"]["completion_tokens"] == 4
    assert 'tpspec:world_restarts_total{model_name="tiny/talker"} 1.0' in front.client.get("/metrics").text
    assert "1 requests wait until torchrun has started it again (1 left)" in front.close()


@pytest.mark.parametrize("who", ["the last lead", "torchrun"])
def test_readers_are_told_when_no_engine_will_come(
    front: Front, pool: ThreadPoolExecutor, tokenizer: Tokenizer, who: str
) -> None:
    """Against clients who wait for ever, and a process that nobody owns."""
    answer = begun(front, pool, tuple(tokenizer.encode("abcd").ids))
    if who == "torchrun":
        front.torchrun.kill()
        assert front.lead.hear(2)[-1] == Stop(4)
    else:
        front.lead.die()
        wait_until(lambda: front.status == "restarting")
        front.another_lead()
        front.lead.die()  # while it loads
    begin = time.monotonic()
    assert answer.result().json()["error"]["code"] == "engine_error"
    assert front.process.wait(10) == 4
    assert time.monotonic() - begin < 5
