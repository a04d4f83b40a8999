"""The answer to /v1/responses: items of output, whole or as the events of a stream that add up to the same.

Shapes only: must not know where the text comes from or how it is sent.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from tpspec.serve.reasoning import Thought

if TYPE_CHECKING:
    from tpspec.serve.answers import Piece
    from tpspec.serve.effort import Effort, Json
    from tpspec.serve.errors import ApiError
    from tpspec.serve.responses import NamedFunctionTool, ResponsesBody
    from tpspec.serve.tools import ToolCall


class ResponseReply:
    """All text goes into one message, which stays open to the end; each call is an item of its own, and each thought,
    up to where something else comes.

    A whole answer is the end of a stream of one piece, so that both are the same.
    """

    are_named = True

    def __init__(self, body: ResponsesBody, model: str, num_prompt_tokens: int) -> None:
        self._body, self._model, self._num_prompt_tokens = body, model, num_prompt_tokens
        self._id, self._created = _new_id("resp"), int(time.time())
        self._output: list[Json] = []
        self._message: Json = {}  # empty until there is text
        self._reasoning: Json = {}  # empty but while something is thought
        self._message_index = 0
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
            events += self._close_reasoning("completed" if piece.finish == "stop" else "incomplete")
            events += [] if self._output else self._open_message()
            events += self._close_message() if self._message else []
        return events

    def _think(self, thought: Thought) -> list[Json]:
        events, text = ([], thought.text) if self._reasoning else (self._open_reasoning(), thought.text.lstrip())
        self._reasoning["content"][0]["text"] += text
        return [*events, self._of_thought("response.reasoning_text.delta", delta=text)]

    def _open_reasoning(self) -> list[Json]:
        self._reasoning = {"id": _new_id("rs"), "type": "reasoning", "summary": [], "status": "in_progress"}
        self._output.append(self._reasoning)
        item = self._reasoning | {"content": []}
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)
        part = {"type": "reasoning_text", "text": ""}
        self._reasoning["content"] = [part]
        return [added, self._of_thought("response.content_part.added", part=dict(part))]

    def _close_reasoning(self, status: str = "completed") -> list[Json]:
        if not self._reasoning:
            return []
        self._reasoning["status"] = status
        (part,) = self._reasoning["content"]
        events = [
            self._of_thought("response.reasoning_text.done", text=part["text"]),
            self._of_thought("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=len(self._output) - 1, item=self._reasoning),
        ]
        self._reasoning = {}
        return events

    def _say(self, text: str) -> list[Json]:
        if not text:
            return []
        self._num_said += len(text)
        events = self._close_reasoning() + ([] if self._message else self._open_message())
        self._part["text"] += text
        return [*events, self._of_text("response.output_text.delta", delta=text, logprobs=[])]

    def _open_message(self) -> list[Json]:
        self._message = {"id": _new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
        self._message_index = len(self._output)
        self._output.append(self._message)
        item = self._message | {"content": []}
        added = self._event("response.output_item.added", output_index=self._message_index, item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._message["content"] = [part]
        return [added, self._of_text("response.content_part.added", part=dict(part))]

    def _close_message(self) -> list[Json]:
        self._message["status"] = "completed" if self._finish == "stop" else "incomplete"
        return [
            self._of_text("response.output_text.done", text=self._part["text"], logprobs=[]),
            self._of_text("response.content_part.done", part=self._part),
            self._event("response.output_item.done", output_index=self._message_index, item=self._message),
        ]

    def _call(self, call: ToolCall) -> list[Json]:
        events = self._close_reasoning()
        item = {"id": _new_id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        self._output.append(item | {"arguments": call.arguments, "status": "completed"})
        begun = item | {"arguments": "", "status": "in_progress"}
        at = {"output_index": len(self._output) - 1}
        of = at | {"item_id": item["id"]}
        return [
            *events,
            self._event("response.output_item.added", **at, item=begun),
            self._event("response.function_call_arguments.delta", **of, delta=call.arguments),
            self._event("response.function_call_arguments.done", **of, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", **at, item=self._output[-1]),
        ]

    @property
    def _part(self) -> Json:
        part: Json = self._message["content"][0]
        return part

    def _of_thought(self, kind: str, **fields: object) -> Json:
        """Of the last item: whatever else comes closes it."""
        at = {"output_index": len(self._output) - 1, "content_index": 0}
        return self._event(kind, item_id=self._reasoning["id"], **at, **fields)

    def _of_text(self, kind: str, **fields: object) -> Json:
        at = {"output_index": self._message_index, "content_index": 0}
        return self._event(kind, item_id=self._message["id"], **at, **fields)

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
