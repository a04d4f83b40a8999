"""Whatever comes, goes and drafts: pages come back, ranks stay alike, and every text is the one it is alone."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.checkpoints import tiny
from tests.draft.liar import Liar
from tests.worlds import Told, serve, topology
from tpspec.comm.messages import Cancel, Submit, ToLead
from tpspec.draft.protocol import Drafter
from tpspec.engine.engine import Engine
from tpspec.errors import WorldFailure
from tpspec.request import Request, Sampling
from tpspec.tokens import Verdict
from tpspec.verify.noise import Noise
from tpspec.verify.rows import Case, Listener, RowLogits, Rule

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=7),
    Sampling(temperature=1.2, top_k=30, top_p=0.9, min_p=0.01, seed=-4),
    Sampling(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 3.0}, seed=11),
]
LONGEST = 40  # tokens of an answer
PROMPTS = [3, 20, 47, 90]  # their lengths


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    folder = tiny("smollm2", tmp_path_factory.mktemp("draft"), num_hidden_layers=1)
    shutil.copy(target / "tokenizer.json", folder)
    return folder


def prompt(length: int) -> tuple[int, ...]:
    source = random.Random(length)
    phrase = [source.randrange(3, 263) for _ in range(7)]
    return tuple((phrase * length)[:length])


@pytest.fixture(scope="module")
def alone(target: Path) -> dict[tuple[int, int], list[int]]:
    """The longest text of each prompt and sampling, each in a world of its own. A shorter one is its beginning."""
    wanted = [(length, sampling) for length in PROMPTS for sampling in range(len(SAMPLINGS))]
    return {
        (length, sampling): serve(topology(target), [Request(0, prompt(length), LONGEST, SAMPLINGS[sampling])]).tokens[
            0
        ]
        for length, sampling in wanted
    }


@dataclass(frozen=True)
class Client:
    """One request: when it comes, what it wants, and when it leaves if it does not wait for the end."""

    arrives: int
    length: int
    sampling: int
    max_tokens: int
    leaves_after: int | None
    stops_at: int | None  # the index of the token in its text that it calls a stop token
    num_drafts: int | None

    def request(self, number: int, text: list[int]) -> Request:
        stop_ids = frozenset() if self.stops_at is None else frozenset({text[self.stops_at]})
        return Request(
            number,
            prompt(self.length),
            self.max_tokens,
            SAMPLINGS[self.sampling],
            stop_ids,
            num_drafts=self.num_drafts,
        )

    def expected(self, text: list[int]) -> tuple[list[int], str]:
        """What it gets when it stays, and how that ends."""
        own = text[: self.max_tokens]
        if self.stops_at is not None and text[self.stops_at] in own:
            return own[: own.index(text[self.stops_at]) + 1], "stop"
        return own, "length"


CLIENTS = st.builds(
    Client,
    arrives=st.integers(1, 25),
    length=st.sampled_from(PROMPTS),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    max_tokens=st.integers(1, LONGEST),
    leaves_after=st.none() | st.integers(0, 12),
    stops_at=st.none() | st.integers(0, LONGEST - 1),
    num_drafts=st.none() | st.integers(0, 7),
)


@dataclass(frozen=True)
class House:
    """pages: from one text at a time with preemptions to plenty. rows: from a root each to a whole prompt at once."""

    source: str
    pages: int
    page: int
    rows: int
    running: int
    weights: tuple[float, float]


HOUSES = st.builds(
    House,
    source=st.sampled_from(["none", "ngram", "model", "liar"]),
    pages=st.integers(9, 24),
    page=st.sampled_from([8, 16]),
    rows=st.integers(6, 64),
    running=st.integers(1, 6),
    weights=st.sampled_from([(1.0, 1.0), (1.0, 2.0)]),
)


def schedule(requests: dict[int, Request], clients: list[Client]) -> dict[int, list[ToLead]]:
    """By round. A cancellation may come in the round of its request, and long after its end."""
    messages: dict[int, list[ToLead]] = {}
    for number, client in enumerate(clients):
        messages.setdefault(client.arrives, []).append(Submit(requests[number]))
        if client.leaves_after is not None:
            messages.setdefault(client.arrives + client.leaves_after, []).append(Cancel(number))
    return messages


def nothing_is_left(engine: Engine) -> None:
    engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0
    assert engine.is_idle


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(house=HOUSES, clients=st.lists(CLIENTS, min_size=1, max_size=7))
def test_any_traffic_leaves_no_page_behind_and_no_text_changed(
    target: Path, draft: Path, alone: dict[tuple[int, int], list[int]], house: House, clients: list[Client]
) -> None:
    """Stands against pages of the cancelled and the preempted, drafts told to the wrong text, noise keyed by place in
    the batch, and two ranks that hear of a departure in different rounds: a digest would differ, or a shape."""
    texts = [alone[client.length, client.sampling] for client in clients]
    requests = {i: client.request(i, text) for i, (client, text) in enumerate(zip(clients, texts, strict=True))}
    engines: dict[int, Engine] = {}
    told = serve(
        topology(
            target,
            2,
            target={"weights": house.weights},
            draft={"source": house.source if house.source != "liar" else "none", "model": str(draft)},
            cache={"tokens": house.pages * house.page, "page": house.page},
            serve={"max_running": house.running},
            engine={"max_rows": house.rows},
        ),
        messages=schedule(requests, clients),
        drafter=(lambda: Liar(300)) if house.source == "liar" else None,
        begin=engines.__setitem__,
        watch=nothing_is_left,
    )
    assert engines[0].digest == engines[1].digest
    for number, (client, text) in enumerate(zip(clients, texts, strict=True)):
        judge(told, number, client, text, capacity=house.pages * house.page)


def judge(told: Told, number: int, client: Client, text: list[int], capacity: int) -> None:
    got, finish = told.tokens.get(number, []), told.finish.get(number)
    expected, ending = client.expected(text)
    if client.length + client.max_tokens > capacity and finish == "error":
        assert got == []
    elif finish is None:
        assert client.leaves_after is not None
        assert got == expected[: len(got)]
    else:
        assert (got, finish) == (expected, ending)


class Altered:
    """A rule that lets another judge and then says something else."""

    name = "altered"
    draws_at_once = False

    def __init__(self, inner: Rule) -> None:
        self._inner = inner

    def judge(
        self, cases: Sequence[Case], rows: RowLogits, noise: Noise, listener: Listener | None = None
    ) -> list[Verdict]:
        verdicts = self._inner.judge(cases, rows, noise)
        return [Verdict(v.seq, v.path, (*v.tokens[:-1], (v.tokens[-1] + 1) % 263)) for v in verdicts]


def alter_verdicts(rank: int, engine: Engine) -> None:
    if rank == 1:
        engine.rule = Altered(engine.rule)


def leak_a_page(rank: int, engine: Engine) -> None:
    if rank == 1:
        engine.pool.grow(99, 1)


def tamper_with_digest(field: str) -> Callable[[int, Engine], None]:
    """A bit flips in what one rank believes it did: only the check itself can notice."""

    def begin(rank: int, engine: Engine) -> None:
        if rank != 1:
            return
        account = engine._account

        def altered(*args: object) -> None:
            account(*args)  # type: ignore[arg-type]
            engine.digest[field] += 1

        engine._account = altered  # type: ignore[method-assign]

    return begin


@pytest.mark.parametrize(
    ("field", "begin"),
    [
        ("verdicts", alter_verdicts),
        ("rows", leak_a_page),  # the next page it takes is another one
        *((field, tamper_with_digest(field)) for field in ("rows", "verdicts", "pages", "drafts")),
    ],
)
def test_a_rank_that_diverged_stops_the_world_and_names_the_field(
    target: Path, field: str, begin: Callable[[int, Engine], None]
) -> None:
    """Stands against ranks that go on with different texts, or hang in a collective of different shapes."""
    with pytest.raises(WorldFailure, match=f"diverged from the lead in its {field} .*before round 2"):
        serve(topology(target, 2), [Request(0, prompt(20), 20, SAMPLINGS[1])], begin=begin)


def test_ranks_that_draft_differently_are_found_before_they_verify(target: Path) -> None:
    """Stands against a drafter with state of its own, such as a clock: the rows of the next round would differ."""
    vocabs = iter([200, 211])

    def drafter() -> Drafter:
        return Liar(next(vocabs))

    with pytest.raises(WorldFailure, match="diverged from the lead in its drafts"):
        serve(topology(target, 2), [Request(0, prompt(20), 20, SAMPLINGS[1])], drafter=drafter)
