"""Calls that a model has to make, from real ranks: noise that follows a grammar, while a drafter lies to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.checkpoints import tiny, write_tokenizer
from tests.serve.conftest import GEMMA_TEMPLATE, HARMONY_TEMPLATE, TOOL_TEMPLATE, reasoning_folder
from tests.serve.test_arguments import in_unions
from tests.serve.test_details import MODEL, Server


class look(BaseModel):  # the name of a function
    """Look there."""

    at: Literal["here", "there"]


class Answer(BaseModel):
    sure: bool


LOOK: Any = openai.pydantic_function_tool(look)
FLAT: Any = {"type": "function", **LOOK["function"]}
PRINTABLE = range(3, 80)  # tokens of one character each; noise would else hold bytes that are no text
CODER_TEMPLATE = "{% if tools %}<tool_call>\n<function=name>\n<parameter=key>{% endif %}{{ messages[0].content }}"
ASK: list[Any] = [{"role": "user", "content": "hello"}]


@contextmanager
def served(folder: Path, template: str) -> Iterator[openai.OpenAI]:
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    server = Server(folder, "liar")
    try:
        with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        server.close()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with served(tiny("smollm2", tmp_path_factory.mktemp("model")), TOOL_TEMPLATE) as client:
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_a_chat_that_has_to_call_does(client: openai.OpenAI, seed: int) -> None:
    """OpenAI's client itself reads the arguments into the class that the schema is of."""
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        fields: dict[str, Any] = {"tools": [LOOK], "tool_choice": choice, "parallel_tool_calls": False}
        said = client.chat.completions.parse(model=MODEL, messages=ASK, max_tokens=140, seed=seed, **fields).choices[0]
        (call,) = said.message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, look)
        assert (said.message.content, said.finish_reason) == (None, "tool_calls")


@pytest.mark.parametrize("seed", range(3))
def test_what_is_said_beside_a_strict_function_is_what_would_have_been_said(client: openai.OpenAI, seed: int) -> None:
    """A grammar in which anything may be said must forbid no text, and not end it where it could end."""
    loose = LOOK | {"function": {**LOOK["function"], "strict": False}}
    fields: dict[str, Any] = {"max_tokens": 60, "seed": seed, "logit_bias": {str(id): 100 for id in PRINTABLE}}
    bound, free = (
        client.chat.completions.create(model=MODEL, messages=ASK, tools=[tool], **fields).choices[0]
        for tool in (LOOK, loose)
    )
    assert bound.message.content == free.message.content
    assert (bound.finish_reason, len(bound.message.content or "")) == ("length", 60)


def test_a_response_that_has_to_call_does_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"model": MODEL, "input": "hello", "max_output_tokens": 140, "temperature": 0}
    (whole,) = client.responses.create(**fields).output
    with client.responses.stream(**fields) as stream:
        (streamed,) = stream.get_final_response().output
    assert whole.arguments == streamed.arguments
    assert look.model_validate_json(whole.arguments)


def test_an_answer_is_of_the_class_that_was_asked_for(client: openai.OpenAI) -> None:
    """Tools beside it may still be called; and whichever it is, it is whole."""
    fields: dict[str, Any] = {"parallel_tool_calls": False, "max_output_tokens": 140, "temperature": 0}
    for tools in ([], [FLAT]):
        response = client.responses.parse(model=MODEL, input="hello", text_format=Answer, tools=tools, **fields)
        called = [one for one in response.output if one.type == "function_call"]
        assert isinstance(response.output_parsed, Answer) != bool(called)
        assert all(look.model_validate_json(call.arguments) for call in called)


def test_what_a_strict_schema_cannot_bind_is_told_with_the_function_that_has_it(client: openai.OpenAI) -> None:
    """One keyword of one of many tools: the compiler said which keyword, and nobody said which tool."""
    schema = {"type": "object", "properties": {"at": {"type": "array", "uniqueItems": True}}}
    wait: Any = {"type": "function", "function": {"name": "wait"}}
    put: Any = {"type": "function", "function": {"name": "put", "parameters": schema, "strict": True}}
    fields: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 140, "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match=r"arguments-of-put: .*uniqueItems"):
        client.chat.completions.create(tools=[wait, put], **fields)
    put["function"]["strict"] = False
    (choice,) = client.chat.completions.create(tools=[wait, put], **fields).choices
    assert choice.finish_reason in ("tool_calls", "length")  # noise may write arguments for ever, where any will do


@pytest.mark.parametrize("template", [CODER_TEMPLATE, GEMMA_TEMPLATE], ids=["tags", "gemma"])
def test_arguments_that_are_no_json_are_what_their_schema_allows(tmp_path: Path, template: str) -> None:
    """Grammar, drafts and reader, each with a mind of its own, of definitions that lead far from one to another."""
    steps = {f"d{i}": in_unions(12, {"$ref": f"#/$defs/d{i + 1}"}) for i in range(31)} | {"d31": {"enum": ["a", 7]}}
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}, {"$ref": "#/$defs/d0"}]}
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Loop"}, "number": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["at", "number"],
        "additionalProperties": False,
        "$defs": {"Loop": loop, **steps},
    }
    tools: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    with served(tiny("smollm2", tmp_path), template) as client:
        for seed in range(4):
            said = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=140, seed=seed, **fields)
            (call,) = said.choices[0].message.tool_calls or ()
            arguments = json.loads(call.function.arguments)
            assert arguments["at"] in (None, "a", 7)
            assert 10 <= arguments["number"] <= 99
        deep: Any = {"type": "object", "properties": {"a": {"enum": [json.loads("[" * 40 + "]" * 40)]}}}
        tools[0]["function"]["parameters"] = deep
        with pytest.raises(openai.BadRequestError, match="levels"):
            client.chat.completions.create(model=MODEL, messages=ASK, **fields)


def test_calls_and_answers_are_bound_in_channels_too(tmp_path: Path) -> None:
    """Their marks are tokens that no text holds, and one of them ends the text."""
    model = tiny("smollm2", tmp_path / "model", vocab_size=300)
    write_tokenizer(model, 263)
    folder = reasoning_folder(model, tmp_path / "harmony", HARMONY_TEMPLATE)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    with served(folder, HARMONY_TEMPLATE) as client:
        fields: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 140, "seed": 1}
        called = client.chat.completions.parse(tools=[LOOK], tool_choice="required", **fields).choices[0]
        (call,) = called.message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, look)
        assert (called.message.content, called.finish_reason) == (None, "tool_calls")
        said = client.chat.completions.parse(response_format=Answer, **fields).choices[0]
        assert isinstance(said.message.parsed, Answer)
