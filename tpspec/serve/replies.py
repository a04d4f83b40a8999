"""The JSON that OpenAI's clients expect: completions and chats, whole or in chunks, and their usage.

Shapes only: must not know where the text comes from or how it is sent. Responses have shapes of their own
(response_reply.py).
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Protocol

from tpspec.serve.logprobs import for_chat, for_completion

if TYPE_CHECKING:
    from tpspec.serve.answers import Piece
    from tpspec.serve.effort import Effort, Json
    from tpspec.serve.errors import ApiError
    from tpspec.serve.protocol import StreamOptions
    from tpspec.serve.tools import ToolCall
    from tpspec.text import Text


class Reply(Protocol):
    """One answer, whole or as the events of a stream. are_named: events say their type, and no [DONE] ends them."""

    are_named: bool

    def whole(self, answers: list[Piece], effort: Effort) -> Json: ...
    def begin(self) -> list[Json]: ...
    def part(self, piece: Piece, effort: Effort) -> list[Json]: ...
    def end(self, effort: Effort) -> list[Json]: ...
    def fail(self, error: ApiError) -> list[Json]: ...


class Shape(Protocol):
    """How one kind of request words its answers."""

    prefix: str
    whole: str
    part: str

    def choice(self, piece: Piece) -> Json: ...
    def delta(self, piece: Piece, first: bool) -> Json: ...
    def around(self, piece: Piece) -> Json:
        """What of a sequence's first piece stands beside its choice."""


class CompletionShape:
    """text: where log-probabilities are wanted, what spells their tokens. tells_ids: of prompt and answer."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, text: Text | None = None, tells_ids: bool = False) -> None:
        self._text, self._tells_ids = text, tells_ids

    def choice(self, piece: Piece) -> Json:
        logprobs = for_completion(piece.rated, self._text) if self._text and piece.rated else None
        ids = _ids(piece) | _prompt_ids(piece) if self._tells_ids else {}
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish, **ids}

    def delta(self, piece: Piece, first: bool) -> Json:
        return self.choice(piece)

    def around(self, piece: Piece) -> Json:
        return {}


class ChatShape:
    """As CompletionShape. tells_thoughts: of the model, beside what it says."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, text: Text | None = None, tells_ids: bool = False, tells_thoughts: bool = True) -> None:
        self._text, self._tells_ids, self._tells_thoughts = text, tells_ids, tells_thoughts

    def choice(self, piece: Piece) -> Json:
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None, **self._thought(piece)}
        if calls := piece.calls:
            message |= {"content": piece.text or None, "tool_calls": [_tool_call(call) for call in calls]}
        return {"index": piece.index, "message": message, **self._rest(piece)}

    def delta(self, piece: Piece, first: bool) -> Json:
        delta: Json = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
        delta |= self._thought(piece)
        if calls := piece.calls:
            delta["tool_calls"] = [{"index": call.index, **_tool_call(call)} for call in calls]
        return {"index": piece.index, "delta": delta, **self._rest(piece)}

    def around(self, piece: Piece) -> Json:
        return _prompt_ids(piece) if self._tells_ids else {}

    def _thought(self, piece: Piece) -> Json:
        thought = piece.thought if self._tells_thoughts else ""
        return {"reasoning_content": thought} if thought else {}

    def _rest(self, piece: Piece) -> Json:
        logprobs = for_chat(piece.rated, self._text) if self._text and piece.rated else None
        finish = "tool_calls" if piece.finish == "stop" and piece.has_called else piece.finish
        return {"logprobs": logprobs, "finish_reason": finish, **(_ids(piece) if self._tells_ids else {})}


def _tool_call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _ids(piece: Piece) -> Json:
    return {"token_ids": piece.tokens}


def _prompt_ids(piece: Piece) -> Json:
    return {"prompt_token_ids": piece.prompt} if piece.prompt else {}


class ChoicesReply:
    """Of a completion or a chat: the id, time and model that all its parts repeat. options: of its stream."""

    are_named = False

    def __init__(self, shape: Shape, model: str, num_prompt_tokens: int, options: StreamOptions | None = None) -> None:
        self._shape, self._num_prompt_tokens = shape, num_prompt_tokens
        self._wants_usage = options is not None and options.include_usage
        self._always = self._wants_usage and options is not None and options.continuous_usage_stats
        self._head = {"id": f"{shape.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._begun: set[int] = set()

    def whole(self, answers: list[Piece], effort: Effort) -> Json:
        choices = [self._shape.choice(answer) for answer in answers]
        around = self._shape.around(answers[0])
        return {**self._head, "object": self._shape.whole, "choices": choices, **self._costs(effort), **around}

    def begin(self) -> list[Json]:
        return []

    def part(self, piece: Piece, effort: Effort) -> list[Json]:
        choices, around = [self._shape.delta(piece, piece.index not in self._begun)], self._shape.around(piece)
        self._begun.add(piece.index)
        usage = self._usage(effort) if self._always else None
        return [{**self._head, "object": self._shape.part, "choices": choices, "usage": usage, **around}]

    def end(self, effort: Effort) -> list[Json]:
        last = {**self._head, "object": self._shape.part, "choices": [], **self._costs(effort)}
        return [last] if self._wants_usage else []

    def fail(self, error: ApiError) -> list[Json]:
        return [error.body]

    def _usage(self, effort: Effort) -> Json:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": effort.cached},
            "completion_tokens": effort.tokens,
            "completion_tokens_details": {"reasoning_tokens": effort.thought},
            "total_tokens": self._num_prompt_tokens + effort.tokens,
            "speculation": effort.speculation(),
        }

    def _costs(self, effort: Effort) -> Json:
        return {"usage": self._usage(effort), "metrics": effort.metrics()}


def model_card(name: str, created: int, max_model_len: int | None) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tpspec",
        "root": name,
        "max_model_len": max_model_len,
    }
