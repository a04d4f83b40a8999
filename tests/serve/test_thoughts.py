"""Models that reason, over HTTP as OpenAI's own client asks them: thoughts, answers and calls, each in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.serve.conftest import (
    GEMMA_MARKS,
    GEMMA_TEMPLATE,
    HARMONY_TEMPLATE,
    MODEL,
    THINK_TEMPLATE,
    Front,
    prompt_of,
    reasoning_folder,
    say,
)
from tests.serve.test_responses import plain
from tpspec.serve.reasoning import TAGS

ASK: list[Any] = [{"role": "user", "content": "what is there?"}]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK: Any = {"type": "function", "name": "look", "description": "Look.", "strict": False, "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
THOUGHT, SAID, LOOKED = "The bus? naïve 日本", "It is slow, 日本.", '{"at": "日本"}'
ANSWERS = {
    "tags": f"<think>\n{THOUGHT}\n</think>\n\n{SAID}",
    "harmony": f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
    f"<|start|>assistant<|channel|>final<|message|>{SAID}<|return|>",
    "gemma": f"<|channel>thought\n{THOUGHT}\n<channel|>{SAID}",
}
CALLS = {
    "tags": f'<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n{{"name": "look", "arguments": {LOOKED}}}\n</tool_call>',
    "harmony": f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
    f"<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{LOOKED}<|call|>",
    "gemma": f'<|channel>thought\n{THOUGHT}\n<channel|><|tool_call>call:look{{at:<|"|>日本<|"|>}}<tool_call|>',
}
TURNS = {"tags": ("assistant", 2), "harmony": ("assistant", 3), "gemma": ("<|turn>model", 2)}  # after an answer


@pytest.fixture(scope="module", params=["tags", "harmony", "gemma"])
def started(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: Any) -> Iterator[tuple[str, Front]]:
    kind: str = request.param
    template = {"tags": THINK_TEMPLATE, "harmony": HARMONY_TEMPLATE, "gemma": GEMMA_TEMPLATE}[kind]
    marks = GEMMA_MARKS if kind == "gemma" else (*TAGS, "<tool_call>", "</tool_call>")
    folder = reasoning_folder(model_folder, tmp_path_factory.mktemp(kind), template, marks)
    front = Front(folder, Tokenizer.from_file(str(folder / "tokenizer.json")))
    front.engine.cache_tokens = 4096
    front.start_engine()
    yield kind, front
    front.close()


@pytest.fixture
def server(started: tuple[str, Front]) -> Front:
    """Its engine thinks and answers."""
    kind, front = started
    front.engine.reset()
    say(front, ANSWERS[kind])
    return front


def asked(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, **({"messages": ASK, "max_completion_tokens": 900} | fields))


def test_a_chat_tells_thoughts_beside_the_answer(server: Front, client: openai.OpenAI) -> None:
    first, second = (answer := asked(client, n=2, logprobs=True)).choices
    for choice in (first, second):
        assert (choice.message.reasoning_content, choice.message.content) == (THOUGHT, SAID)
        assert choice.finish_reason == "stop"
    num_thought = len(server.engine.tokenizer.encode(THOUGHT).ids)
    assert num_thought <= answer.usage.completion_tokens_details.reasoning_tokens / 2 <= num_thought + 2
    assert answer.usage.completion_tokens > answer.usage.completion_tokens_details.reasoning_tokens


@pytest.mark.parametrize("per_round", [1, 3, 400])
def test_a_stream_adds_up_to_the_same(server: Front, client: openai.OpenAI, per_round: int) -> None:
    server.engine.per_round = per_round
    deltas = [chunk.choices[0].delta for chunk in asked(client, stream=True)]
    thoughts = [getattr(delta, "reasoning_content", None) for delta in deltas]
    assert "".join(filter(None, thoughts)) == THOUGHT
    assert "".join(delta.content for delta in deltas) == SAID
    if per_round == 1:
        last = max(i for i, thought in enumerate(thoughts) if thought)
        assert not any(delta.content for delta in deltas[: last + 1])


def test_thoughts_are_left_out_where_they_are_not_wanted(client: openai.OpenAI) -> None:
    answer = asked(client, extra_body={"include_reasoning": False})
    assert answer.choices[0].message.content == SAID
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    chunks = list(asked(client, stream=True, extra_body={"include_reasoning": False}))
    for told in (answer.choices[0].message, *(chunk.choices[0].delta for chunk in chunks)):
        assert "reasoning_content" not in told.to_dict()


def test_an_answer_that_is_cut_off_in_its_thoughts_says_nothing(client: openai.OpenAI) -> None:
    choice = asked(client, max_completion_tokens=20).choices[0]
    assert choice.message.content == ""
    assert THOUGHT.startswith(choice.message.reasoning_content)
    response = client.responses.create(model=MODEL, input="a", max_output_tokens=20)
    (thought,) = response.output
    assert (thought.type, thought.status, response.status) == ("reasoning", "incomplete", "incomplete")


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_after_thoughts(started: Any, server: Front, client: openai.OpenAI, stream: bool) -> None:
    say(server, CALLS[started[0]])
    if stream:
        with client.chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS) as streamed:
            choice: Any = streamed.get_final_completion().choices[0]
    else:
        choice = asked(client, tools=TOOLS).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, choice.finish_reason) == ("look", LOOKED, "tool_calls")
    assert not choice.message.content


@pytest.mark.parametrize("per_round", [1, 3, 400])
@pytest.mark.parametrize("calls", [False, True])
def test_a_response_has_thoughts_as_items_of_their_own(
    started: Any, server: Front, client: openai.OpenAI, per_round: int, calls: bool
) -> None:
    """With the events that OpenAI has for them; and what was said goes back in with what was thought."""
    server.engine.per_round = per_round
    say(server, (CALLS if calls else ANSWERS)[started[0]])
    fields: dict[str, Any] = {"model": MODEL, "tools": [LOOK]}
    whole = client.responses.create(input=ASK, **fields)
    thought, said = whole.output
    assert (thought.type, thought.content[0].text, thought.status) == ("reasoning", THOUGHT, "completed")
    assert (said.arguments if calls else said.content[0].text) == (LOOKED if calls else SAID)
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    with client.responses.stream(input=ASK, **fields) as stream:
        events = list(stream)
        assert plain(stream.get_final_response()) == plain(whole)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    first = [event for event in events if getattr(event, "output_index", None) == 0]
    deltas = [event.delta for event in first if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    assert [event.type.removeprefix("response.") for event in first if not event.type.endswith("delta")] == [
        *("output_item.added", "content_part.added", "reasoning_text.done", "content_part.done", "output_item.done")
    ]
    result: Any = {"type": "function_call_output", "call_id": "c", "output": "fog"} if calls else ASK[0]
    client.responses.create(input=[*ASK, *whole.output, result], **fields)
    assert THOUGHT in prompt_of(server)
    speaker, num_turns = TURNS[started[0]]
    assert prompt_of(server).count(speaker) == num_turns - (calls and started[0] == "gemma")  # goes on after a call


def test_thoughts_go_back_in_with_the_message_they_are_of(server: Front, client: openai.OpenAI) -> None:
    message = asked(client).choices[0].message.model_dump()
    asked(client, messages=[*ASK, message, *ASK])
    assert THOUGHT in prompt_of(server)


def test_raw_completions_stay_raw(server: Front, client: openai.OpenAI) -> None:
    fields = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    raw = client.completions.create(model=MODEL, prompt="a", max_tokens=900, extra_body=fields)
    whole = server.engine.tokenizer.decode(server.engine.answer(server.engine.requests[-1]), skip_special_tokens=False)
    assert raw.choices[0].text.removesuffix("<|im_end|>") == whole
    assert raw.usage is not None
    assert raw.usage.to_dict()["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_every_token_is_rated(server: Front, client: openai.OpenAI) -> None:
    """Also those of thoughts and marks, which are as much the model's as the rest."""
    answer = asked(client, extra_body={"return_token_ids": True})
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            "chat/completions",
            {"reasoning_effort": "extreme"},
            "'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'",
        ),
        ("chat/completions", {"include_reasoning": "no"}, "include_reasoning"),
        ("chat/completions", {"messages": [ASK[0] | {"reasoning_content": "Hm."}]}, "of the assistant"),
        ("responses", {"reasoning": {"effort": 3}}, "reasoning.effort"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs is not"),
        ("responses", {"input": [{"type": "reasoning", "content": [{"type": "text", "text": "a"}]}]}, "reasoning_text"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_it(server: Front, path: str, fields: Any, named: str) -> None:
    asked = {"input": "a"} if path == "responses" else {"messages": ASK}
    response = server.client.post(f"/v1/{path}", json=asked | fields)
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]["message"]


def test_effort_is_taken_where_the_template_knows_it(started: Any, server: Front) -> None:
    for path, fields, param in (
        ("chat/completions", {"messages": ASK, "reasoning_effort": "high"}, "reasoning_effort"),
        ("responses", {"input": "a", "reasoning": {"effort": "high"}}, "reasoning"),
    ):
        response = server.client.post(f"/v1/{path}", json=fields)
        if started[0] == "harmony":
            assert "Reasoning: high" in prompt_of(server)
        else:
            error = json.loads(response.text)["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert "leave it out" in error["message"]
