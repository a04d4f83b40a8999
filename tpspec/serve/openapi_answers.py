"""The schemas of answers, as `/openapi.json` tells them: what a client may rely on; more may stand beside it.

Data alone. Tests hold it against what the server says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpspec.serve.effort import Json

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
NUMBER: Json = {"type": "number"}
FLAG: Json = {"type": "boolean"}
ANYTHING: Json = {"type": "object"}
NEUTRAL: Json = {"description": "Not supported: only what changes nothing.", "enum": [None, False, 0, "", [], {}]}
NOT_GIVEN = NEUTRAL | {"enum": [None, False]}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def const(value: str) -> Json:
    return {"const": value}


def one_of(*values: str | None) -> Json:
    return {"enum": [*values]}


def or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(schema: Json, **limits: int) -> Json:
    return {"type": "array", "items": schema, **limits}


def record(fields: Json, **optional: Json) -> Json:
    return {"type": "object", "properties": fields | optional, "required": [*fields]}


FINISH = one_of("stop", "length", "abort")
CHAT_FINISH = one_of("stop", "length", "abort", "tool_calls")
FUNCTION = record({"name": TEXT, "arguments": TEXT})
TOOL_CALL = record({"id": TEXT, "type": const("function"), "function": FUNCTION})
HEAD: Json = {"id": TEXT, "created": COUNT, "model": TEXT}
COMPLETION_LOGPROBS = record(
    {
        "tokens": list_of(TEXT),
        "token_logprobs": list_of(or_null(NUMBER)),
        "top_logprobs": list_of(or_null({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": list_of(COUNT),
    }
)
CHAT_LOGPROBS = record({"content": list_of(record({"token": TEXT, "logprob": NUMBER, "bytes": list_of(COUNT)}))})
IDS: Json = {"token_ids": list_of(COUNT), "prompt_token_ids": list_of(COUNT)}
STATUS = one_of("in_progress", "completed", "incomplete", "failed")
PART = record({"type": const("output_text"), "text": TEXT, "annotations": list_of(ANYTHING)})
SAID = record(
    {"id": TEXT, "type": const("message"), "role": const("assistant"), "status": TEXT, "content": list_of(PART)}
)
THOUGHT = record(
    {
        "id": TEXT,
        "type": const("reasoning"),
        "summary": list_of(ANYTHING, maxItems=0),
        "content": list_of(record({"type": const("reasoning_text"), "text": TEXT})),
        "status": TEXT,
    }
)
CALLED = record(
    {"id": TEXT, "type": const("function_call"), "call_id": TEXT, "name": TEXT, "arguments": TEXT, "status": TEXT}
)


def _choice(finish: Json, logprobs: Json, **said: Json) -> Json:
    return record({"index": COUNT, **said, "finish_reason": finish, "logprobs": or_null(logprobs)}, **IDS)


def _choices(kind: str, choice: Json, usage: Json, **limits: int) -> Json:
    fields = {**HEAD, "object": const(kind), "choices": list_of(choice, **limits), "usage": usage}
    return record(fields, metrics=or_null(ANYTHING), prompt_token_ids=list_of(COUNT))


ANSWERS: Json = {
    "Error": record({"error": record({"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": or_null(TEXT)})}),
    "Usage": record(
        {
            "prompt_tokens": COUNT,
            "prompt_tokens_details": record({"cached_tokens": COUNT}),
            "completion_tokens": COUNT,
            "completion_tokens_details": record({"reasoning_tokens": COUNT}),
            "total_tokens": COUNT,
            "speculation": ref("Speculation"),
        }
    ),
    "Speculation": record(
        {"rounds": COUNT, "drafted": COUNT, "accepted": COUNT},
        tokens_per_round=or_null(NUMBER),
        collectives_per_token=or_null(NUMBER),
    ),
    "Completion": _choices(
        "text_completion",
        _choice(or_null(FINISH), COMPLETION_LOGPROBS, text=TEXT),
        or_null(ref("Usage")),  # of chunks, only where it is asked for
    ),
    "Chat": _choices(
        "chat.completion",
        _choice(
            CHAT_FINISH,
            CHAT_LOGPROBS,
            message=record(
                {"role": const("assistant"), "content": or_null(TEXT)},
                reasoning_content=TEXT,
                tool_calls=list_of(TOOL_CALL),
            ),
        ),
        ref("Usage"),
        minItems=1,
    ),
    "ChatChunk": _choices(
        "chat.completion.chunk",
        _choice(
            or_null(CHAT_FINISH),
            CHAT_LOGPROBS,
            delta=record(
                {},
                role=const("assistant"),
                content=TEXT,
                reasoning_content=TEXT,
                tool_calls=list_of(TOOL_CALL | {"required": [*TOOL_CALL["required"], "index"]}),
            ),
        ),
        or_null(ref("Usage")),
    ),
    "Response": record(
        {
            "id": TEXT,
            "object": const("response"),
            "created_at": COUNT,
            "status": STATUS,
            "model": TEXT,
            "output": list_of({"oneOf": [THOUGHT, SAID, CALLED]}),
            "error": or_null(record({"code": TEXT, "message": TEXT})),
            "incomplete_details": or_null(record({"reason": TEXT})),
            "usage": or_null(
                record(
                    {"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT},
                    output_tokens_details=record({"reasoning_tokens": COUNT}),
                )
            ),
            "store": {"const": False},
        }
    ),
    "ResponseEvent": record(
        {"type": TEXT, "sequence_number": COUNT},
        response=ref("Response"),
        output_index=COUNT,
        item_id=TEXT,
        delta=TEXT,
    ),
    "Tokens": record(
        {"count": COUNT, "max_model_len": COUNT, "tokens": list_of(COUNT), "token_strs": or_null(list_of(TEXT))}
    ),
    "Text": record({"prompt": TEXT}),
    "Model": record(
        {
            "id": TEXT,
            "object": const("model"),
            "created": COUNT,
            "owned_by": TEXT,
            "root": TEXT,
            "max_model_len": or_null(COUNT),
        }
    ),
    "Models": record({"object": const("list"), "data": list_of(ref("Model"))}),
    "Health": record({"status": TEXT}, ready=FLAG, in_flight=COUNT, running=COUNT, queued=COUNT, rounds=COUNT),
    "Version": record({"version": TEXT}),
    "Info": record({"version": TEXT, "model": TEXT, "topology": ANYTHING, "health": ref("Health")}),
}
