"""Grammars over HTTP: what a client may ask for, what is refused and how soon, and what reaches the engine."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st

from tests.processes import lives
from tests.serve.conftest import Front, wait_until
from tpspec.serve import grammars
from tpspec.serve.errors import ApiError
from tpspec.serve.grammars import (
    COMPILE_S,
    MAX_CHARS,
    MAX_CHOICES,
    MAX_WAITING,
    WORKER,
    Grammars,
    Outcome,
    choice,
    json_schema,
    lark,
    regex,
)

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
SOON_S = 5 * COMPILE_S  # on a busy machine


def nested(depth: int) -> dict[str, Any]:
    return {} if depth == 0 else {"type": "array", "items": nested(depth - 1)}


def workers(front: Front) -> list[psutil.Process]:
    return [child for child in psutil.Process(front.process.pid).children() if WORKER in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["openai", "vllm's old", "as text", "vllm"],
)
def test_a_schema_reaches_the_engine_as_one_grammar(front: Front, fields: dict[str, Any]) -> None:
    front.complete(**fields, n=2)
    assert {request.grammar for request in front.engine.requests[-2:]} == {json_schema(SCHEMA)}


def test_other_constraints_reach_the_engine_and_none_where_none_is_asked_for(front: Front) -> None:
    for fields, grammar in (
        ({"guided_regex": "a/b+"}, regex("a/b+", "")),
        ({"structured_outputs": {"regex": "a"}}, regex("a", "")),
        ({"guided_choice": ["yes", "no\n"]}, choice(["yes", "no\n"], "")),
        ({"guided_grammar": 'start: "a"+'}, lark('start: "a"+', "")),
        ({"response_format": {"type": "json_object"}}, json_schema({"type": "object"})),
        ({"structured_outputs": {"json_object": True}}, json_schema({"type": "object"})),
        ({"response_format": {"type": "text"}}, ""),
    ):
        front.complete(**fields)
        assert front.engine.requests[-1].grammar == grammar
    front.complete(guided_grammar='root ::= "a" | "b" root')  # GBNF, which ranks are spared
    assert front.engine.requests[-1].grammar.startswith("%llguidance")
    front.post("responses", input="a", text={"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}})
    assert front.engine.requests[-1].grammar == json_schema(SCHEMA)


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"guided_json": nested(40)},
    "long": {"guided_json": {"const": "x" * MAX_CHARS}},
    "wide": {"guided_json": {"enum": list(range(MAX_CHOICES + 1))}},
    "too many choices": {"guided_choice": [str(i) for i in range(MAX_CHOICES + 1)]},
    "slow": {"guided_json": {"type": "integer", "multipleOf": 999_983}},
    "round in circles": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "elsewhere": {"guided_json": {"$ref": "http://127.0.0.1:1/schema"}},
    "many properties": {"guided_json": {"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}},
    "no regex": {"guided_regex": "(a"},
    "no grammar": {"guided_grammar": "start: nowhere"},
    "no GBNF": {"guided_grammar": "root ::= ("},
    "no schema": {"guided_json": {"type": "nope"}},
    "impossible": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": []}}}},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_grammar_that_cannot_be_used_is_refused_soon_and_others_are_served(front: Front, fields: Any) -> None:
    """vLLM's engine died of some of these, and xgrammar took 45 s for others."""
    begin, num_requests = time.monotonic(), len(front.engine.requests)
    response = front.post(prompt="a", **fields)
    assert time.monotonic() - begin < SOON_S
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert 0 < len(error["message"]) < 500
    assert len(front.engine.requests) == num_requests
    front.complete(guided_choice=["a"])


def test_the_faults_are_in_the_compilers_words(front: Front) -> None:
    assert "nowhere" in front.post(prompt="a", guided_grammar="start: nowhere").json()["error"]["message"]
    assert "nope" in front.post(prompt="a", guided_json={"type": "nope"}).json()["error"]["message"]


def test_a_worker_that_is_killed_is_replaced(front: Front) -> None:
    front.complete(guided_choice=["first"])
    (worker,) = workers(front)
    worker.kill()
    wait_until(lambda: not lives(worker))
    front.post(prompt="a", guided_choice=["second"])
    front.complete(guided_choice=["third"])
    assert [one.pid for one in filter(lives, workers(front))] != [worker.pid]


def test_a_grammar_is_compiled_once(front: Front) -> None:
    front.complete(guided_choice=["once"])
    (worker,) = workers(front)
    worker.suspend()
    try:
        front.complete(guided_choice=["once"])
    finally:
        worker.resume()


class Compiled(Grammars):
    """Takes its time, and counts."""

    def __init__(self, outcome: Outcome) -> None:
        self.num_refused = 0
        super().__init__(Path(), self._count)
        self.outcome, self.asked = outcome, list[str]()

    def _count(self) -> None:
        self.num_refused += 1

    async def _ask(self, text: str) -> Outcome:
        self.asked.append(text)
        await asyncio.sleep(0.05)
        return self.outcome


def test_a_grammar_that_many_ask_for_at_once_is_compiled_once() -> None:
    """Stands against a 429 for the 17th of one schema, while the queue is empty; one who leaves ends it for nobody."""

    async def ask_together() -> list[object]:
        waiters = [asyncio.create_task(made.checked("a")) for _ in range(3 * MAX_WAITING)]
        await asyncio.sleep(0.01)
        waiters[0].cancel()
        return await asyncio.gather(*waiters, return_exceptions=True)

    made = Compiled(Outcome("A", None))
    left, *others = asyncio.run(ask_together())
    assert isinstance(left, asyncio.CancelledError)
    assert (others, made.asked, made.num_refused) == (["A"] * (3 * MAX_WAITING - 1), ["a"], 0)


def test_only_so_many_different_grammars_wait_and_the_others_are_counted() -> None:
    async def ask_together() -> list[object]:
        asked = (made.checked(str(i)) for i in range(MAX_WAITING + 2))
        return await asyncio.gather(*asked, return_exceptions=True)

    made = Compiled(Outcome("A", None))
    answers = asyncio.run(ask_together())
    assert [getattr(one, "status", one) for one in answers] == ["A"] * MAX_WAITING + [429] * 2
    assert made.num_refused == 2


def test_what_nobody_waits_for_any_more_ends_with_the_server() -> None:
    async def ask_and_end() -> None:
        waiter = asyncio.create_task(made.checked("a"))
        await asyncio.sleep(0.01)
        waiter.cancel()
        await made.end()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    made = Compiled(Outcome("A", None))
    asyncio.run(ask_and_end())


def test_a_grammar_that_took_too_much_is_tried_again_but_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against two seconds and a new worker for each repeat."""

    async def ask_thrice() -> None:
        for pause in (0, 0, 0.3):
            await asyncio.sleep(pause)
            with pytest.raises(ApiError, match="too slow"):
                await made.checked("a")

    monkeypatch.setattr(grammars, "FAULT_S", 0.2)
    made = Compiled(grammars._failed("too slow"))
    asyncio.run(ask_thrice())
    assert made.asked == ["a"] * 2


def test_requests_refused_for_their_grammars_are_in_the_metrics(front: Front) -> None:
    front.complete(guided_choice=["begun"])
    (worker,) = workers(front)
    worker.suspend()
    try:
        with ThreadPoolExecutor(MAX_WAITING + 1) as pool:
            jobs = [pool.submit(front.post, prompt="a", guided_choice=[str(i)]) for i in range(MAX_WAITING + 1)]
            wait_until(lambda: any(job.done() and job.result().status_code == 429 for job in jobs))
            assert 'reason="grammars_full"} 1.0' in front.client.get("/metrics").text
            worker.resume()
    finally:
        worker.resume()


@given(st.text("ab/\\\n\"'.", max_size=8))
def test_any_pattern_is_a_grammar_or_a_fault_of_its_own(pattern: str) -> None:
    """Stands against a pattern that ends the grammar's text early and goes on in its language."""
    text = regex(pattern, "")
    assert text.startswith("start: /")
    assert "\n" not in text


def test_limits_name_the_field() -> None:
    with pytest.raises(ApiError, match="tools: should be nested at most"):
        json_schema(nested(40), "tools")
