"""`/v1/responses` as OpenAI's own client asks for it: whole, as a stream that adds up to the same, and with tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.conftest import ANSWER, MODEL, Front, prompt_of, say, wait_until

LOOK: Any = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "strict": False,
    "parameters": {"type": "object"},
}
CALLS = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "日本"}}\n</tool_call>'


@pytest.fixture
def server(tool_front: Front) -> Iterator[Front]:
    tool_front.engine.reset()
    yield tool_front
    tool_front.engine.reset()
    wait_until(lambda: tool_front.client.get("/health").json()["in_flight"] == 0)


def plain(value: Any) -> Any:
    """What has to be alike in two answers: all but ids, times, and what only the client itself adds."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, openai.BaseModel):
        value = value.to_dict()
    changing = ("id", "call_id", "created_at", "usage", "metrics", "parsed", "parsed_arguments")
    return {k: plain(v) for k, v in value.items() if k not in changing} if isinstance(value, dict) else value


def test_text_is_told_whole(server: Front, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 300, "metadata": {"a": "b"}}
    response = client.responses.create(model=MODEL, input="hello", instructions="Be brief.", store=True, **fields)
    assert (response.output_text, response.status, response.error) == (ANSWER, "completed", None)
    assert (response.store, response.object, response.incomplete_details) == (False, "response", None)
    assert {name: getattr(response, name) for name in fields} == fields
    request = server.engine.requests[-1]
    assert (request.sampling.temperature, request.sampling.top_p, request.max_tokens) == (0.5, 0.9, 300)
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.total_tokens) == (len(request.prompt), usage.input_tokens + usage.output_tokens)
    assert prompt_of(server) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hello", max_output_tokens=3)
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(model=MODEL, input="hello", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == response.output_text


@pytest.mark.parametrize("per_round", [1, 4, 400])
@pytest.mark.parametrize("calls", [False, True])
def test_a_stream_adds_up_to_the_whole(server: Front, client: openai.OpenAI, per_round: int, calls: bool) -> None:
    """OpenAI's client puts it together from the events; every id, index and number has to fit."""
    server.engine.per_round = per_round
    if calls:
        say(server, CALLS)
    fields: dict[str, Any] = {"model": MODEL, "input": "hello", "tools": [LOOK]}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert plain(final) == plain(whole)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == whole.output_text == ("I look." if calls else ANSWER)


def test_calls_are_items_beside_the_message(server: Front, client: openai.OpenAI) -> None:
    say(server, CALLS)
    said, called = client.responses.create(model=MODEL, input="hello", tools=[LOOK]).output
    assert (said.type, called.type) == ("message", "function_call")
    assert (called.name, json.loads(called.arguments), called.status) == ("look", {"at": "日本"}, "completed")


def test_an_answer_with_its_calls_and_their_results_goes_back_in(server: Front, client: openai.OpenAI) -> None:
    """As clients do who keep the conversation themselves: the output of one response is input of the next."""
    say(server, CALLS)
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "what is there?"}]}]
    said, called = client.responses.create(model=MODEL, input=asked, tools=[LOOK]).output
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "fog"}
    client.responses.create(model=MODEL, input=[*asked, said, called, result], tools=[LOOK])
    assert prompt_of(server).partition("<|im_end|>\n")[2] == (
        "<|im_start|>user\nwhat is there?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALLS}<|im_end|>\n"
        "<|im_start|>tool\nfog<|im_end|>\n<|im_start|>assistant\n"
    )


def test_events_say_their_type_and_the_last_one_ends_the_stream(server: Front) -> None:
    with server.client.stream("POST", "/v1/responses", json={"input": "a", "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [one["type"] for one in data]
    assert len(lines) == 2 * len(data)


def test_an_engine_that_fails_is_told(server: Front, client: openai.OpenAI) -> None:
    server.engine.error = "logits are not finite"
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.responses.create(model=MODEL, input="a")
    last = list(client.responses.create(model=MODEL, input="a", stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.status, last.response.error.message) == ("failed", "logits are not finite")


CALL = {"type": "function_call", "call_id": "c", "name": "f"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an earlier response": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "in the background": ({"background": True}, "background"),
    "a conversation": ({"conversation": "c"}, "conversation"),
    "reasoning": ({"reasoning": {"effort": "high"}}, "reasoning"),
    "words in plenty": ({"text": {"verbosity": "high"}}, "text.verbosity"),
    "much thought": ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    "thoughts of all turns": ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    "a cache to warm": ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    "no calls of tools": ({"max_tool_calls": 0}, "`max_tool_calls` is not supported"),
    "no input": ({"input": None}, "input"),
    "empty input": ({"input": []}, "input"),
    "a number": ({"input": 7}, "input"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text parts"),
    "an item of another kind": ({"input": [{"type": "item_reference", "id": "x"}]}, "be a message, function_call, "),
    "an item of a strange kind": ({"input": [{"type": ["x"]}]}, "input"),
    "an item that is none": ({"input": [3]}, "input"),
    "arguments that are no JSON": ({"input": [CALL | {"arguments": "{"}]}, "JSON"),
    "a search": ({"tools": [{"type": "web_search"}]}, "tools"),
    "two of one name": ({"tools": [LOOK, LOOK]}, "same name"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "too many tokens": ({"max_output_tokens": 5000}, "max_output_tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_is_a_400_that_names_it(server: Front, fields: dict[str, Any], named: str) -> None:
    response = server.client.post("/v1/responses", json={"input": "a"} | fields)
    assert response.status_code == 400, response.text
    assert named in response.text
    assert len(response.text) < 1500
