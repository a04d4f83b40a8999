"""`/tokenize` and `/detokenize` as vLLM's clients call them."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

HELLO = [{"role": "user", "content": "hello"}]


def _tokenize(front, **fields: object) -> httpx.Response:
    return front.client.post("/tokenize", json=fields)


def test_a_prompt_comes_back_as_ids_and_their_names(front) -> None:
    answer = _tokenize(front, prompt="the bus", return_token_strs=True, model="tiny/talker").json()
    expected = front.engine.tokenizer.encode("the bus")
    assert answer == {
        "count": len(expected.ids),
        "max_model_len": 256,
        "tokens": expected.ids,
        "token_strs": expected.tokens,
    }
    assert _tokenize(front, prompt="the bus").json()["token_strs"] is None


@pytest.mark.parametrize("role", ["user", "developer"])
@pytest.mark.parametrize("add", [True, False])
def test_a_chat_has_the_ids_that_the_engine_is_sent(front, add: bool, role: str) -> None:
    """Clients cut their history by this count: one that differs from the prompt's ends in a refusal."""
    fields = {
        "messages": [{"role": role, "content": [{"type": "text", "text": "hello"}]}],
        "add_generation_prompt": add,
    }
    assert front.post("chat/completions", **fields, max_tokens=1).status_code == 200
    assert _tokenize(front, **fields).json()["tokens"] == list(front.engine.requests[-1].prompt)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200))
def test_any_text_comes_back_as_it_went(front, text: str) -> None:
    ids = _tokenize(front, prompt=text).json()["tokens"]
    assert front.client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "a", "messages": HELLO},
        {"prompt": 1},
        {"prompt": ["a"]},
        {"messages": []},
        {"messages": HELLO, "add_special_tokens": True},
        {"messages": HELLO, "chat_template": "{{ 1 }}"},
        {"prompt": "x " * 100_000},
        {"messages": [{"role": "assistant", "content": "a"}]},
    ],
    ids=str,
)
def test_a_bad_body_is_a_400(front, fields: dict[str, object]) -> None:
    response = _tokenize(front, **fields)
    assert (response.status_code, set(response.json())) == (400, {"error"})


@pytest.mark.parametrize("tokens", [None, "a", [-1], [320], [1.5], [True], [[1]], [1 << 40]], ids=str)
def test_ids_that_are_none_are_a_400(front, tokens: object) -> None:
    response = front.client.post("/detokenize", json={"tokens": tokens})
    assert (response.status_code, set(response.json())) == (400, {"error"})
    assert len(response.content) < 500


def test_what_is_too_long_to_be_read_is_told_how_much_is_served(front) -> None:
    """One token more than there is, it said."""
    told = _tokenize(front, prompt="x" * 100_000).json()["error"]["message"]
    assert told.endswith("this server takes 256, prompt and output together")


def test_nothing_in_is_nothing_out_and_no_place_in_the_queue(front) -> None:
    before = len(front.engine.requests)
    assert _tokenize(front, prompt="").json()["tokens"] == []
    assert front.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert _tokenize(front, prompt="a", model="other").status_code == 404
    assert len(front.engine.requests) == before
