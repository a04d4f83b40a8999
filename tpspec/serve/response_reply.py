"""The answer to /v1/responses: items of output, whole or as the events of a stream that add up to the same.

Shapes only: must not know where the text comes from or how it is sent.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.serve.effort import Json
from tpspec.serve.reasoning import Thought

if TYPE_CHECKING:
    from tpspec.serve.answers import Piece
    from tpspec.serve.effort import Effort
    from tpspec.serve.errors import ApiError
    from tpspec.serve.responses import NamedFunctionTool, ResponsesBody
    from tpspec.serve.tools import ToolCall


@dataclass(frozen=True, slots=True)
class Kind:
    """Of items that hold text. item, part: what they and their one part are told with. beside: what stands in events
    beside the text."""

    prefix: str
    item: Json
    part: Json
    beside: Json


MESSAGE = Kind(
    "msg",
    {"type": "message", "role": "assistant"},
    {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    {"logprobs": []},
)
REASONING = Kind("rs", {"type": "reasoning", "summary": []}, {"type": "reasoning_text", "text": ""}, {})


class ResponseReply:
    """What is said goes into messages and what was thought into items of its own, each up to where something else
    comes; each call is an item. One is open at a time, the last: clients keep items in the order in which they close.

    A whole answer is the end of a stream of one piece, so that both are the same.
    """

    are_named = True

    def __init__(self, body: ResponsesBody, model: str, num_prompt_tokens: int) -> None:
        self._body, self._model, self._num_prompt_tokens = body, model, num_prompt_tokens
        self._id, self._created = _new_id("resp"), int(time.time())
        self._output: list[Json] = []
        self._kind: Kind | None = None  # of the last item, while it is open
        self._finish: str | None = None
        self._num_events = self._num_said = 0

    def whole(self, answers: list[Piece], effort: Effort) -> Json:
        self._add(answers[0])
        return self._response(effort)

    def begin(self) -> list[Json]:
        started = self._response(None)
        return [self._event(kind, response=started) for kind in ("response.created", "response.in_progress")]

    def part(self, piece: Piece, effort: Effort) -> list[Json]:
        return self._add(piece)

    def end(self, effort: Effort) -> list[Json]:
        response = self._response(effort)
        return [self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: ApiError) -> list[Json]:
        fault = {"code": "server_error", "message": error.message}
        response = self._response(None) | {"status": "failed", "error": fault}
        return [self._event("response.failed", response=response)]

    def _add(self, piece: Piece) -> list[Json]:
        """What a piece adds to the output, as events."""
        events: list[Json] = []
        begin = self._num_said
        for one in piece.asides:
            events += self._say(piece.text[self._num_said - begin : one.offset - begin])
            events += self._think(one) if isinstance(one, Thought) else self._call(one)
        events += self._say(piece.text[self._num_said - begin :])
        self._finish = piece.finish
        if piece.finish is not None:
            events += [] if self._output else self._open(MESSAGE)
            events += self._close("completed" if piece.finish == "stop" else "incomplete")
        return events

    def _say(self, text: str) -> list[Json]:
        self._num_said += len(text)
        return self._write(MESSAGE, text) if text else []

    def _think(self, thought: Thought) -> list[Json]:
        return self._write(REASONING, thought.text if self._kind is REASONING else thought.text.lstrip())

    def _write(self, kind: Kind, text: str) -> list[Json]:
        events = [] if self._kind is kind else [*self._close(), *self._open(kind)]
        self._part["text"] += text
        return [*events, self._of_part(f"response.{self._part['type']}.delta", delta=text, **kind.beside)]

    def _open(self, kind: Kind) -> list[Json]:
        self._kind = kind
        item = {"id": _new_id(kind.prefix), **kind.item, "status": "in_progress"}
        self._output.append(item | {"content": [dict(kind.part)]})
        added = self._of_item("response.output_item.added", item=item | {"content": []})
        return [added, self._of_part("response.content_part.added", part=kind.part)]

    def _close(self, status: str = "completed") -> list[Json]:
        """The item that is open, if there is one."""
        if self._kind is None:
            return []
        beside, self._kind, part = self._kind.beside, None, self._part
        self._output[-1]["status"] = status
        return [
            self._of_part(f"response.{part['type']}.done", text=part["text"], **beside),
            self._of_part("response.content_part.done", part=part),
            self._of_item("response.output_item.done", item=self._output[-1]),
        ]

    def _call(self, call: ToolCall) -> list[Json]:
        closed = self._close()
        item = {"id": _new_id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        self._output.append(item | {"arguments": call.arguments, "status": "completed"})
        begun = item | {"arguments": "", "status": "in_progress"}
        arguments = "response.function_call_arguments"
        return [
            *closed,
            self._of_item("response.output_item.added", item=begun),
            self._of_item(f"{arguments}.delta", item_id=item["id"], delta=call.arguments),
            self._of_item(f"{arguments}.done", item_id=item["id"], name=call.name, arguments=call.arguments),
            self._of_item("response.output_item.done", item=self._output[-1]),
        ]

    @property
    def _part(self) -> Json:
        """Of the last item, the only one."""
        part: Json = self._output[-1]["content"][0]
        return part

    def _of_part(self, kind: str, **fields: object) -> Json:
        return self._of_item(kind, item_id=self._output[-1]["id"], content_index=0, **fields)

    def _of_item(self, kind: str, **fields: object) -> Json:
        """The last one."""
        return self._event(kind, output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: object) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _response(self, effort: Effort | None) -> Json:
        """effort: None before there is an end."""
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if effort is None else "completed" if self._finish == "stop" else "incomplete",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._finish == "length" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [*self._output],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": body.reasoning.model_dump(),
            "store": False,
            "background": False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": body.text.model_dump(by_alias=True),
            "tool_choice": _dumped(body.tool_choice),
            "tools": [tool.model_dump() | {"strict": bool(tool.strict)} for tool in body.tools],
            "truncation": "disabled",
            "metadata": body.metadata,
            "usage": None if effort is None else self._usage(effort),
            "metrics": None if effort is None else effort.metrics(),
        }

    def _usage(self, effort: Effort) -> Json:
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": effort.cached, "cache_write_tokens": 0},
            "output_tokens": effort.tokens,
            "output_tokens_details": {"reasoning_tokens": effort.thought},
            "total_tokens": self._num_prompt_tokens + effort.tokens,
            "speculation": effort.speculation(),
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _dumped(choice: str | NamedFunctionTool) -> object:
    return choice if isinstance(choice, str) else choice.model_dump()
