"""Bodies that stock FastAPI answers with 200, 422 or 500, and their kin: each is a 400 in OpenAI's envelope."""

from __future__ import annotations

import httpx
import pytest

from tpspec.serve.grammars import json_schema

BAD = {
    "not json": b"{",
    "empty": b"",
    "a list": b"[1]",
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "overflow": b'{"prompt": "a", "temperature": 1e999}',
    "nan bias": b'{"prompt": "a", "logit_bias": {"1": NaN}}',
    "overflowing bias": b'{"prompt": "a", "logit_bias": {"1": 1e999}}',
    "bias of a word": b'{"prompt": "a", "logit_bias": {"the": 1}}',
    "bias outside the vocabulary": b'{"prompt": "a", "logit_bias": {"320": 1}}',
    "bias too large": b'{"prompt": "a", "logit_bias": {"3": 101}}',
    "huge seed": b'{"prompt": "a", "seed": ' + b"9" * 40 + b"}",
    "endless integer": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "true as a number": b'{"prompt": "a", "max_tokens": true}',
    "a string as a number": b'{"prompt": "a", "n": "2"}',
    "true as a temperature": b'{"prompt": "a", "temperature": true}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "lone surrogate in a stop": b'{"prompt": "a", "stop": "\\udfff"}',
    "lone surrogate in a key": b'{"prompt": "a", "\\uD834": 1}',
    "negative token": b'{"prompt": [-5]}',
    "huge token": b'{"prompt": [99999999999999999999]}',
    "token outside the vocabulary": b'{"prompt": [320]}',
    "bool as a token": b'{"prompt": [true]}',
    "mixed prompt": b'{"prompt": ["a", 1]}',
    "prompt of a number": b'{"prompt": 7}',
    "no prompt": b'{"max_tokens": 3}',
    "null prompt": b'{"prompt": null}',
    "empty prompt": b'{"prompt": ""}',
    "empty prompts": b'{"prompt": []}',
    "one empty prompt": b'{"prompt": [[1], []]}',
    "same key twice": b'{"prompt": "a", "seed": 1, "seed": 2}',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "n of 0": b'{"prompt": "a", "n": 0}',
    "n of 17": b'{"prompt": "a", "n": 17}',
    "too many choices": b'{"prompt": [' + b'"a",' * 100 + b'"a"], "n": 16}',
    "max_tokens of 0": b'{"prompt": "a", "max_tokens": 0}',
    "hot": b'{"prompt": "a", "temperature": 2.1}',
    "a penalty by which logits overflow": b'{"prompt": "a", "repetition_penalty": 5e-324}',
    "top_p of 0": b'{"prompt": "a", "top_p": 0}',
    "top_k of -2": b'{"prompt": "a", "top_k": -2}',
    "five stops": b'{"prompt": "a", "stop": ["a", "b", "c", "d", "e"]}',
    "empty stop": b'{"prompt": "a", "stop": [""]}',
    "stream options without a stream": b'{"prompt": "a", "stream_options": {"include_usage": true}}',
    "prompt beyond the cache": b'{"prompt": [' + b"5," * 300 + b"5]}",
    "a text far beyond the cache": b'{"prompt": "' + b"x " * 100_000 + b'"}',
    "prompt and output beyond the cache": b'{"prompt": [5, 5], "max_tokens": 255}',
    "suffix": b'{"prompt": "a", "suffix": "b"}',
    "rated prompts": b'{"prompt": "a", "prompt_logprobs": 0}',
    "best of true": b'{"prompt": "a", "best_of": true}',
    "best of 2": b'{"prompt": "a", "best_of": 2}',
    "unknown format": b'{"prompt": "a", "response_format": {"type": "yaml"}}',
    "a schema that is none": b'{"prompt": "a", "guided_json": "{"}',
    "two grammars": b'{"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}',
    "no choice": b'{"prompt": "a", "guided_choice": []}',
}
BAD_CHAT = {
    "no messages": b'{"messages": []}',
    "image": b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
    "text of a number": b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}',
    "unknown role": b'{"messages": [{"role": "wizard", "content": "a"}]}',
    "tool result": b'{"messages": [{"role": "tool", "content": "a"}]}',
    "tools": b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}',
    "what the template refuses": b'{"messages": [{"role": "assistant", "content": "a"}]}',
    "a search": b'{"messages": [{"role": "user", "content": "a"}], "web_search_options": {}}',
    "words in plenty": b'{"messages": [{"role": "user", "content": "a"}], "verbosity": "high"}',
    "sound": b'{"messages": [{"role": "user", "content": "a"}], "modalities": ["text", "audio"]}',
    "special tokens": b'{"messages": [{"role": "user", "content": "a"}], "add_special_tokens": true}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
}


def _expect_400(response: httpx.Response) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 1500
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_a_malformed_completion_is_a_400(front, body: bytes) -> None:
    _expect_400(front.client.post("/v1/completions", content=body))


@pytest.mark.parametrize("body", BAD_CHAT.values(), ids=BAD_CHAT.keys())
def test_a_malformed_chat_is_a_400(front, body: bytes) -> None:
    _expect_400(front.client.post("/v1/chat/completions", content=body))


def test_a_refusal_names_the_field_and_the_numbers(front) -> None:
    error = front.post(prompt=[5, 5], max_tokens=255).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("255", "2 tokens", "256"))
    error = front.post(prompt=[5] * 300).json()["error"]
    assert "300" in error["message"]
    assert "256" in error["message"]
    assert front.post(prompt="a", temperature=3).json()["error"]["param"] == "temperature"


HELLO = [{"role": "user", "content": "a"}]
LONG = "x " * 1000
FORMAT = {"type": "json_schema", "json_schema": {"name": "a"}}
FAULTS = {
    "max_completion_tokens": ("chat/completions", {"messages": HELLO, "max_completion_tokens": 9999}),
    "max_tokens": ("chat/completions", {"messages": HELLO, "max_tokens": 9999}),
    "max_output_tokens": ("responses", {"input": "a", "max_output_tokens": 9999}),
    "prompt": ("completions", {"prompt": LONG}),
    "messages": ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "input": ("responses", {"input": LONG}),
}


@pytest.mark.parametrize(("param", "kind", "fields"), [(param, *asked) for param, asked in FAULTS.items()], ids=FAULTS)
def test_what_is_too_much_is_said_of_the_field_that_asked_for_it(front, param: str, kind: str, fields: dict) -> None:
    """Stands against a client of /v1/responses that is told of max_tokens, which it never sent."""
    error = front.post(kind, **fields).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert param in error["message"] or "the prompt has" in error["message"]


TWICE = {"prompt": "a", "structured_outputs": {"choice": ["b"], "regex": "c"}}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("completions", {"prompt": "a", "response_format": FORMAT}, "response_format.json_schema.schema: Field"),
        ("responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema: Field"),
        ("responses", {"input": [{"role": "user"}]}, "input.0.content: Field"),
        ("responses", {"input": "a", "tool_choice": "any"}, "tool_choice: Input should be 'none', 'auto' or"),
        ("chat/completions", {"messages": HELLO, "chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a: Input"),
        ("completions", {"prompt": "a", "logit_bias": {"the": 1}}, "logit_bias.the: String"),
        ("completions", {"prompt": "a", "stop": [""]}, "stop.0: String"),
        ("completions", TWICE, "structured_outputs.regex and structured_outputs.choice both bind the answer"),
        ("completions", {**TWICE, "guided_choice": ["b"]}, "structured_outputs.regex and structured_outputs.choice"),
    ],
)
def test_a_fault_is_where_the_body_has_it(front, kind: str, fields: dict, said: str) -> None:
    """Stands against a path that names pydantic's own choices, json_schema.json_schema.schema or, at its end,
    tool_choice.literal['none','auto','required'], and against a field that does not go together with itself."""
    assert front.post(kind, **fields).json()["error"]["message"].startswith(said)


BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "none of them"}}}


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"prompt": ["a"] * 65, "n": 16}, "n"),
        ("completions", {"prompt": "a", "guided_regex": "["}, "guided_regex"),
        ("completions", {"prompt": "a", "guided_grammar": ""}, "guided_grammar"),
        ("completions", {"prompt": "a", "structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ("chat/completions", {"messages": HELLO, "response_format": BAD_SCHEMA}, "response_format"),
        ("chat/completions", {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ("responses", {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "text"),
        ("responses", {"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ],
)
def test_a_refusal_says_which_field_was_at_fault(front, kind: str, fields: dict, param: str) -> None:
    """Two fields that do not go together, and grammars that do not compile, were refused without the name of a field;
    an empty grammar bound nothing."""
    response = front.post(kind, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_map_full_of_faults_does_not_come_back_larger(front) -> None:
    """Stock FastAPI turned 38 kB into 440 kB: one error, with its input, for each entry."""
    faults = {str(i): "x" * 8 for i in range(2000)}
    assert len(front.post(prompt="a", logit_bias=faults).content) < 1500


def test_fields_that_change_nothing_are_accepted(front) -> None:
    """Gateways and benchmarks send their own; null means not given."""
    extra = {"user": "u", "wild": {"a": [1]}, "seed": None, "logprobs": False, "tool_choice": "none", "tools": []}
    front.complete(**extra, response_format={"type": "text"}, best_of=1, echo=False, min_tokens=0)
    front.complete(max_tokens=5, min_tokens=5, ignore_eos=True)


NULLS = [
    ("completions", {"prompt": "a", "stream": True, "stream_options": {"include_usage": None}}),
    ("completions", {"prompt": "a", "structured_outputs": {"choice": ["b"], "json_object": None}}),
    ("completions", {"prompt": "a", "response_format": FORMAT | {"json_schema": {"name": None, "schema": {}}}}),
    ("responses", {"input": "a", "text": {"format": None}}),
    ("responses", {"input": [{"type": None, "role": "user", "content": "a"}]}),
]


@pytest.mark.parametrize(("kind", "fields"), NULLS)
def test_a_null_inside_an_option_is_not_given_either(front, kind: str, fields: dict) -> None:
    """Stands against a 400 for clients that write every field they know."""
    assert front.post(kind, **fields).status_code == 200


def test_a_null_in_a_clients_own_data_stays(front) -> None:
    schema = {"enum": [None], "default": None}
    front.complete(guided_json=schema)
    assert front.engine.requests[-1].grammar == json_schema(schema)


def test_other_refusals_come_in_the_same_envelope(front) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/nothing", 404),
        ("GET", "/health/", 404),  # no redirect to an address made of what the client says the host is
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
    ):
        response = front.client.request(method, path)
        assert (response.status_code, set(response.json())) == (status, {"error"})
    response = front.post(prompt="a", model="gpt-9")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_is_a_413(front, declared: bool) -> None:
    """Bytes are counted as they come: a chunked body declares no length."""
    chunk = b" " * (1 << 20)
    body = chunk * 33 if declared else (chunk for _ in range(33))
    assert front.client.post("/v1/completions", content=body).status_code == 413
