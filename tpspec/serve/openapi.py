"""`/openapi.json`: what every route takes and answers, for programs. Bodies are described by what checks them.

Our own, since handlers read raw bodies and a framework sees nothing in them. Must not know requests or the engine.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from pydantic.json_schema import models_json_schema

from tpspec.serve.chats import ChatBody
from tpspec.serve.openapi_answers import ANSWERS, NEUTRAL, NOT_GIVEN
from tpspec.serve.protocol import ASK_EMPTY, UNSUPPORTED, CompletionBody, Strict
from tpspec.serve.responses import ResponsesBody
from tpspec.serve.routes_text import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from tpspec.serve.effort import Json

REF = "#/components/schemas/{model}"
HELLO = [{"role": "user", "content": "Hello!"}]
EXAMPLES: dict[type[Strict], Json] = {
    CompletionBody: {"prompt": "The bus is", "max_tokens": 8},
    ChatBody: {"messages": HELLO, "max_completion_tokens": 8},
    ResponsesBody: {"input": "Hello!", "max_output_tokens": 8},
    TokenizeBody: {"messages": HELLO},
    DetokenizeBody: {"tokens": [5, 6]},
}
REFUSALS = {
    "400": "The body is malformed, asks for more than there is room for, or for what is not supported.",
    "401": "An API key is needed, as `Authorization: Bearer KEY`.",
    "404": "The model is not the one served.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "429": "The queue is full, or that of grammars to compile; Retry-After says when to try again.",
    "500": "The engine failed on this request.",
    "501": "The tokenizer of this model does not allow answers to be bound.",
    "503": "The model is still loading, or the server is stopping.",
}
ALWAYS = ("401", "500")
OF_TEXT = ("400", "404", "408", "413", "503")
OF_GENERATION = (*OF_TEXT, "429", "501")


def document(model: str) -> Json:
    """model: the one that is served."""
    return {
        "openapi": "3.2.0",
        "info": {
            "title": "tpspec",
            "version": version("tpspec"),
            "description": "OpenAI's API, and what vLLM adds to it. Unknown fields are ignored; null is not given.",
        },
        "paths": {**_generation(), **_text(), **_models(model), **_about()},
        "components": {
            "schemas": {**_bodies(), **ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # keys are asked for where the server was started with some
    }


def _generation() -> Json:
    return {
        "/v1/completions": _post("Complete prompts", CompletionBody, OF_GENERATION, "Completion", "Completion"),
        "/v1/chat/completions": _post("Answer a chat", ChatBody, OF_GENERATION, "Chat", "ChatChunk"),
        "/v1/responses": _post(
            "Answer a chat, in OpenAI's later form; nothing is stored",
            *(ResponsesBody, OF_GENERATION, "Response", "ResponseEvent"),
        ),
    }


def _text() -> Json:
    return {
        "/tokenize": _post("The tokens of a text or a chat", TokenizeBody, OF_TEXT, "Tokens"),
        "/detokenize": _post("The text of tokens", DetokenizeBody, OF_TEXT, "Text"),
    }


def _models(model: str) -> Json:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
    one = _get("One model", _json("Model"), ("404",)) | {"parameters": [name]}
    return {"/v1/models": {"get": _get("The model served", _json("Models"))}, "/v1/models/{name}": {"get": one}}


def _about() -> Json:
    page = {"text/html": {"schema": {"type": "string"}}}
    numbers = {"text/plain": {"schema": {"type": "string"}}}
    health = {"503": _answer("Not so", _json("Health"))}
    healthy, ready = _get("Whether rounds go on", _json("Health")), _get("Whether there is room", _json("Health"))
    return {
        "/": {"get": _get("The status page", page)},
        "/health": {"get": _with_answers(healthy, health)},
        "/ready": {"get": _with_answers(ready, health)},
        "/metrics": {"get": _get("Numbers, as Prometheus reads them", numbers)},
        "/version": {"get": _get("The version of this server", _json("Version"))},
        "/server_info": {"get": _get("What is served, and by which cards", _json("Info"))},
        "/openapi.json": {"get": _get("This document", {"application/json": {"schema": {"type": "object"}}})},
    }


def _post(summary: str, body: type[Strict], refusals: tuple[str, ...], answer: str, event: str = "") -> Json:
    """event: the schema of the data of a stream's events, where there are streams."""
    content = _json(answer)
    if event:
        content["text/event-stream"] = {"itemSchema": _event(event)}
    operation = _get(summary, content, refusals)
    described = {"schema": _ref(body.__name__), "example": EXAMPLES[body]}
    taken = {"required": True, "content": {"application/json": described}}
    return {"post": {"summary": summary, "requestBody": taken, "responses": operation["responses"]}}


def _get(summary: str, content: Json, refusals: tuple[str, ...] = ()) -> Json:
    refused = {status: _answer(REFUSALS[status], _json("Error")) for status in sorted((*ALWAYS, *refusals))}
    return {"summary": summary, "responses": {"200": _answer(summary, content), **refused}}


def _with_answers(operation: Json, answers: Json) -> Json:
    return operation | {"responses": operation["responses"] | answers}


def _answer(description: str, content: Json) -> Json:
    return {"description": description, "content": content}


def _json(schema: str) -> Json:
    return {"application/json": {"schema": _ref(schema)}}


def _ref(schema: str) -> Json:
    return {"$ref": REF.format(model=schema)}


def _event(schema: str) -> Json:
    """Streams end with [DONE], or with the event that says so; one that fails ends with an error."""
    data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [_ref(schema), _ref("Error")]}}
    fields = {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}, "event": {"type": "string"}}
    return {"type": "object", "properties": fields, "required": ["data"]}


def _bodies() -> Json:
    described: Json = models_json_schema([(body, "validation") for body in EXAMPLES], ref_template=REF)[1]["$defs"]
    for schema in described.values():
        schema |= {"properties": _optional(schema)} if "properties" in schema else {}
    for body in EXAMPLES:
        described[body.__name__]["properties"] = _fields(body, described[body.__name__])
    _close_patterns(described)
    return described


def _fields(body: type[Strict], schema: Json) -> Json:
    """Null is as good as nothing; what would change the output and is not supported has to be as good as nothing."""
    refused = {name: NOT_GIVEN if name in ASK_EMPTY else NEUTRAL for name in (*UNSUPPORTED, *body.refused)}
    return {**refused, "best_of": {"enum": [None, 1]}, **schema["properties"]}


def _optional(schema: Json) -> Json:
    needed = schema.get("required", ())
    return {name: field if name in needed else _or_null(field) for name, field in schema["properties"].items()}


def _or_null(field: Json) -> Json:
    return {"anyOf": [field, {"type": "null"}]}


def _close_patterns(schema: object) -> None:
    """Names that match no pattern are refused, which pydantic does not say."""
    if isinstance(schema, dict):
        if "patternProperties" in schema:
            schema["additionalProperties"] = False
        for inner in schema.values():
            _close_patterns(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _close_patterns(inner)
