"""Tools over HTTP, as OpenAI's own client asks for them: shown to the model by its template, called in its answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.serve.conftest import MODEL, TOOL_TEMPLATE, Front, prompt_of, say, wait_until
from tpspec.request import Delta
from tpspec.serve.answers import Reader
from tpspec.serve.asking import chat_asks
from tpspec.serve.chats import ChatBody, Message, Tool
from tpspec.text import Text

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK = {"type": "function", "function": {"name": "look", "description": "Look there.", "parameters": SCHEMA}}
WAIT = {"type": "function", "function": {"name": "wait"}}
ASK: list[Any] = [{"role": "user", "content": "what is there?"}]
CALLS = (
    'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "naïve 日本"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)
LOOKED = '{"at": "naïve 日本"}'
FLAT: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in (LOOK, WAIT)]


@pytest.fixture
def server(tool_front: Front) -> Iterator[Front]:
    """Its engine says CALLS, three tokens a round."""
    tool_front.engine.reset()
    say(tool_front, CALLS)
    yield tool_front
    wait_until(lambda: tool_front.client.get("/health").json()["in_flight"] == 0)


def asked(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"messages": ASK, "tools": [LOOK, WAIT], "max_completion_tokens": 1500} | fields
    return client.chat.completions.create(model=MODEL, **fields)


def test_calls_are_told_whole(client: openai.OpenAI) -> None:
    choice = asked(client).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("function", "look", LOOKED), ("function", "wait", "{}")]
    assert len({call.id for call in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("per_round", [1, 3, 400])
def test_a_stream_adds_up_to_the_same(server: Front, client: openai.OpenAI, per_round: int) -> None:
    """Put together by OpenAI's own client; nothing of a mark was let out on the way."""
    server.engine.per_round = per_round
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[LOOK, WAIT], max_completion_tokens=1500
    ) as stream:
        said = [event.delta for event in stream if event.type == "content.delta"]
        choice = stream.get_final_completion().choices[0]
    assert "".join(said) == choice.message.content == "I look."
    assert choice.finish_reason == "tool_calls"
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    assert calls == [("look", LOOKED), ("wait", "{}")]


def test_each_choice_has_calls_of_its_own(server: Front, client: openai.OpenAI) -> None:
    encode = server.engine.tokenizer.encode
    server.engine.answer = lambda request: encode(CALLS if request.sampling.seed == 5 else "No.").ids
    first, second = asked(client, n=2, seed=5).choices
    assert (first.finish_reason, len(first.message.tool_calls)) == ("tool_calls", 2)
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == ("stop", "No.", None)


def test_one_call_at_a_time_where_that_is_asked(server: Front, client: openai.OpenAI) -> None:
    message = asked(client, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["look"]
    wait_until(lambda: server.engine.requests[-1].id in server.engine.cancelled)


def test_a_call_that_is_cut_short_is_text(client: openai.OpenAI) -> None:
    choice = asked(client, max_completion_tokens=60).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content.startswith('I look.\n\n{"name": "loo')


def test_the_template_shows_tools_and_what_became_of_earlier_calls(server: Front, client: openai.OpenAI) -> None:
    choice = asked(client).choices[0]
    told = [{"role": "tool", "tool_call_id": call.id, "content": "fog"} for call in choice.message.tool_calls]
    asked(
        client,
        messages=[*ASK, choice.message.model_dump(), *told],
        extra_body={"chat_template_kwargs": {"speaker": "me"}},
    )
    tools = "".join(
        f"\n{json.dumps(tool)}" for tool in (LOOK, WAIT | {"function": WAIT["function"] | {"parameters": EMPTY}})
    )
    assert prompt_of(server) == (
        f"<|im_start|>tools{tools}\ncall them as <tool_call>...</tool_call><|im_end|>\n"
        f"<|im_start|>user\nwhat is there?<|im_end|>\n<|im_start|>assistant\n{CALLS}<|im_end|>\n"
        "<|im_start|>tool\nfog<|im_end|>\n<|im_start|>tool\nfog<|im_end|>\n<|im_start|>me\n"
    )


EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_strict_function_is_bound_where_it_may_be_called(server: Front, client: openai.OpenAI) -> None:
    """`strict` counted for nothing unless a call was required."""
    strict = {"type": "function", "function": LOOK["function"] | {"strict": True}}
    assert len(asked(client, tools=[strict, WAIT]).choices[0].message.tool_calls) == 2
    asked(client, tools=[LOOK, WAIT])
    assert [bool(request.grammar) for request in server.engine.requests[-2:]] == [True, False]


def test_no_tools_where_none_are_to_be_used(server: Front, client: openai.OpenAI) -> None:
    choice = asked(client, tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (CALLS, "stop", None)
    assert "tools" not in prompt_of(server)


def deep(levels: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": deep(levels - 1)}} if levels else {}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


def made(arguments: str, **fields: Any) -> dict[str, Any]:
    """A chat in which a call was made with these arguments."""
    return {"messages": [{"role": "assistant", "tool_calls": [tool(arguments=arguments)]} | fields]}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "name"),
    "a name with spaces": ({"tools": [tool(name="a b")]}, "name"),
    "two of one name": ({"tools": [LOOK, LOOK]}, "same name"),
    "too many": ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "128"),
    "another kind": ({"tools": [{"type": "web_search"}]}, "function"),
    "deep": ({"tools": [tool(parameters=deep(40))]}, "levels"),
    "large": ({"tools": [tool(parameters={"enum": ["x" * 100] * 1000})]}, "65536 characters"),
    "parameters of a list": ({"tools": [tool(parameters=[1])]}, "parameters"),
    "a grammar that is none": ({"tools": [LOOK], "guided_grammar": '{"grammars": []}'}, "bound"),
    "an unknown choice": ({"tools": [LOOK], "tool_choice": "perhaps"}, "tool_choice"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a choice of no tool": ({"tools": [LOOK], "tool_choice": tool(name="rm")}, "rm"),
    "arguments that are no JSON": (made("{"), "JSON"),
    "deep arguments": (made(json.dumps(deep(40))), "levels"),
    "half a surrogate": (made('{"a": "\\ud800"}'), "JSON"),
    "endless arguments": (made("[" * 10**5), "JSON"),
    "calls of a user": (made("{}", role="user", content="a"), "assistant"),
    "nothing said": ({"messages": [{"role": "assistant"}]}, "content"),
    "a template": ({"chat_template_kwargs": {"chat_template": "{{ 7 }}"}}, "chat_template"),
    "tokenize": ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
    "messages anew": ({"chat_template_kwargs": {"messages": "x"}}, '"param":"chat_template_kwargs"'),
    "a special token": ({"chat_template_kwargs": {"eos_token": "x"}}, "eos_token"),
    "a list": ({"chat_template_kwargs": {"speaker": ["me"]}}, "chat_template_kwargs"),
    "a long word": ({"chat_template_kwargs": {"speaker": "m" * 1025}}, "1024"),
    "what the template chokes on": ({"chat_template_kwargs": {"self": "x"}}, "template"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_is_a_400_that_names_it(server: Front, fields: dict[str, Any], named: str) -> None:
    response = server.post("chat/completions", **({"messages": ASK, "max_tokens": 4} | fields))
    assert response.status_code == 400, response.text
    assert named in response.text
    assert len(response.text) < 1500


HOSTILE = [
    *({"type": kind} for kind in ("nothing", 7, None, {}, [], ["string", "wild"])),
    *(
        {"type": "string", "pattern": pattern}
        for pattern in ("(", "((a{1,99}){1,99}){1,99}", 3, "\\p{nothing}", "(?<=a)")
    ),
    {"$ref": "#"},
    {"$ref": "file:///etc/passwd"},
    {"anyOf": 3},
    {"enum": []},
    {"type": "string", "required": True},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "number", "maximum": 1e308},
    {"type": "number", "multipleOf": 0},
    {"type": "array", "minItems": "1"},
    {"type": "object", "patternProperties": {"[": {}}, "additionalProperties": "no"},
]


@pytest.mark.parametrize("schema", HOSTILE, ids=str)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_hostile_schema_is_never_our_fault(server: Front, schema: dict[str, Any], choice: str) -> None:
    """CVE-2025-48944: a malformed `pattern` or `type` in a tool killed the worker. And where nobody asked for it to
    bind strictly, what could not be compiled was refused."""
    tools = [tool(parameters={"type": "object", "properties": {"a": schema}}), tool(name="g", parameters=schema)]
    response = server.post("chat/completions", messages=ASK, max_tokens=4, tools=tools, tool_choice=choice)
    assert response.status_code == 200, response.text
    tools[0]["function"]["strict"] = True
    response = server.post("chat/completions", messages=ASK, max_tokens=4, tools=tools, tool_choice=choice)
    assert response.status_code in (200, 400), response.text
    assert server.post(prompt="a", max_tokens=2).status_code == 200


NO_SCHEMA = {"type": "nothing"}
STRICT = tool(name="put", strict=True, parameters={"type": "object", "properties": {"a": NO_SCHEMA}})
NO_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": NO_SCHEMA}}
NO_FLAT_FORMAT = {"type": "json_schema", "name": "a", "schema": NO_SCHEMA}


@pytest.mark.parametrize(
    ("kind", "fields", "param", "said"),
    [
        ("chat/completions", {"messages": ASK, "response_format": NO_FORMAT}, "response_format", "response_format: "),
        ("chat/completions", {"messages": ASK, "guided_json": NO_SCHEMA}, "guided_json", "guided_json: "),
        ("chat/completions", {"messages": ASK, "guided_json": {}, "tools": [STRICT]}, "tools", "arguments-of-put: "),
        ("responses", {"input": "a", "text": {"format": NO_FLAT_FORMAT}}, "text", "text: "),
    ],
)
def test_a_fault_in_what_binds_an_answer_beside_tools_names_the_field_that_has_it(
    server: Front, kind: str, fields: dict[str, Any], param: str, said: str
) -> None:
    """Clients were told of `answer`, which no body has, and of no field."""
    tools = FLAT if kind == "responses" else [LOOK, WAIT]
    error = server.post(kind, **({"tools": tools} | fields)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_grammar", param)
    assert error["message"].startswith(said)


def test_tokenize_counts_tools_as_a_chat_does(server: Front, client: openai.OpenAI) -> None:
    options = {"chat_template_kwargs": {"speaker": "me"}}
    asked(client, extra_body=options)
    counted = server.client.post("/tokenize", json={"messages": ASK, "tools": [LOOK, WAIT], **options}).json()
    assert counted["tokens"] == list(server.engine.requests[-1].prompt)


def test_marks_that_are_special_tokens_are_seen_and_then_left_out(model_folder: Path, tmp_path: Path) -> None:
    """Some vocabularies have them so, and text is spelled without special tokens."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    text = Text.load(tmp_path)
    messages = [Message(role="user", content="what is there?")]
    (plain,) = asyncio.run(chat_asks(ChatBody(messages=messages), text, 4096))
    (ask,) = asyncio.run(
        chat_asks(ChatBody(messages=messages, tools=[*map(Tool.model_validate, (LOOK, WAIT))]), text, 4096)
    )
    assert (plain.skip_special, ask.skip_special) == (True, False)
    piece = Reader(ask, text, 0).read(Delta(1, text.encode_rendered(CALLS), "length"))
    assert (piece.text, [call.name for call in piece.calls]) == ("I look.", ["look", "wait"])


def test_a_model_that_knows_no_tools_says_so(front: Front) -> None:
    """And not with a prompt in which they are missing."""
    for fields in ({"messages": ASK, "tools": [LOOK]}, {"messages": [*ASK, {"role": "tool", "content": "fog"}]}):
        response = front.post("chat/completions", **fields)
        assert response.status_code == 400
        assert "knows no tools" in response.text
    response = front.client.post("/v1/responses", json={"input": "a", "tools": FLAT})
    assert "knows no tools" in response.text
