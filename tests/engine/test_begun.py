"""A text that one engine began and another ends: wherever the first was lost, it is what one engine makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from tests.checkpoints import tiny
from tests.worlds import Told, serve, topology
from tpspec.grammar import regex
from tpspec.request import Delta, Logprob, Request, Sampling

PHRASE = (17, 80, 33, 151, 9, 64, 222, 12, 5)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=7),
    Sampling(temperature=0.9, seed=3, top_k=40, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.4),
    Sampling(temperature=0.8, seed=9, min_tokens=20, withheld=frozenset({40, 41})),
]
REQUESTS = [
    Request(i, PHRASE * (1 + 2 * i) + (i,), 24 + 2 * i, sampling, frozenset({40, 41}), logprobs=i % 2 or None)
    for i, sampling in enumerate(SAMPLINGS)
]
KEYS: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "n-grams": {"draft": {"source": "ngram", "tokens": 4}},
    "a model over two ranks": {"num_ranks": 2, "draft": {"source": "model", "tokens": 3}},
    "chunks": {"draft": {"source": "ngram", "tokens": 4}, "engine": {"max_rows": 12}},
    "preemptions": {"draft": {"source": "ngram", "tokens": 4}, "cache": {"tokens": 128, "page": 16}},
    "a fixed number of rows": {"draft": {"source": "ngram", "tokens": 4}, "deterministic": True},
}
GRAMMAR = regex("[a-z]{30}[0-9]+")
REQUESTS.append(Request(len(REQUESTS), PHRASE, 30, SAMPLINGS[1], frozenset({2}), grammar=GRAMMAR))
Truth = dict[str, Told]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def truth() -> Truth:
    return {}


def world(model: Path, name: str, requests: list[Request]) -> Told:
    keys = dict(KEYS[name])
    if keys.get("draft", {}).get("source") == "model":
        keys["draft"] = keys["draft"] | {"model": str(model)}
    return serve(topology(model, keys.pop("num_ranks", 1), **keys), requests)


def told_before(told: Told, request: Request, share: float) -> list[Delta]:
    """What a client had when the first engine was lost, that much of it; never the end."""
    deltas = [delta for delta in told.deltas if delta.id == request.id]
    return deltas[: int(share * len(deltas))]


def rest_of(request: Request, deltas: list[Delta]) -> Request:
    """As the server asks another engine for it."""
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    num_scored = sum(len(delta.prompt_logprobs) for delta in deltas)
    return msgspec.structs.replace(request, id=100 + request.id, begun=tokens, num_scored=num_scored)


def assert_alike(found: list[Logprob], expected: list[Logprob]) -> None:
    assert [one.own for one in found] == pytest.approx([one.own for one in expected], abs=1e-4)


@pytest.mark.parametrize("name", KEYS)
@settings(max_examples=6, deadline=None)
@given(shares=st.lists(st.floats(0, 0.999), min_size=len(REQUESTS), max_size=len(REQUESTS)))
def test_wherever_an_engine_is_lost_the_next_one_ends_its_texts(
    model: Path, truth: Truth, name: str, shares: list[float]
) -> None:
    """Stands against noise, penalties, stops and grammars that count from the restart, and tokens or log-probabilities
    that come twice."""
    if name not in truth:
        truth[name] = world(model, name, REQUESTS)
    whole = truth[name]
    assert (whole.stats[-1].preemptions > 0) == (name == "preemptions")
    heard = [told_before(whole, request, share) for request, share in zip(REQUESTS, shares, strict=True)]
    again = [rest_of(request, deltas) for request, deltas in zip(REQUESTS, heard, strict=True)]
    rest = world(model, name, again)
    for request, before in zip(again, heard, strict=True):
        number = request.id - 100
        assert [*request.begun, *rest.tokens[request.id]] == whole.tokens[number]
        assert rest.finish[request.id] == whole.finish[number]
        after = [delta for delta in rest.deltas if delta.id == request.id]
        found = [one for delta in [*before, *after] for one in delta.logprobs]
        assert_alike(found, [one for delta in whole.deltas if delta.id == number for one in delta.logprobs])


@settings(max_examples=6, deadline=None)
@given(share=st.floats(0, 0.999))
def test_log_probabilities_of_a_prompt_go_on_where_they_stopped(model: Path, share: float) -> None:
    """A long prompt is told of in chunks; what has been told is not told again, nor read for it."""
    request = Request(0, PHRASE * 6, 4, logprobs=1, prompt_logprobs=True)
    made = topology(model, engine={"max_rows": 10})
    whole = serve(made, [request])
    before = told_before(whole, request, share)
    rest = serve(made, [rest_of(request, before)])
    found = [one for delta in [*before, *rest.deltas] for one in delta.prompt_logprobs]
    assert_alike(found, [one for delta in whole.deltas for one in delta.prompt_logprobs])
    assert [token for delta in [*before, *rest.deltas] for token in delta.tokens] == whole.tokens[0]
