"""The JSON that OpenAI's clients expect: completions and chats, whole or in chunks, and their usage.

Shapes only: must not know where the text comes from or how it is sent.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Protocol

from tpspec.serve.logprobs import for_chat, for_completion

if TYPE_CHECKING:
    from tpspec.serve.answers import Piece
    from tpspec.serve.effort import Effort, Json
    from tpspec.text import Text


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
    """As CompletionShape."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, text: Text | None = None, tells_ids: bool = False) -> None:
        self._text, self._tells_ids = text, tells_ids

    def choice(self, piece: Piece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.index, "message": message, **self._rest(piece)}

    def delta(self, piece: Piece, first: bool) -> Json:
        delta = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
        return {"index": piece.index, "delta": delta, **self._rest(piece)}

    def around(self, piece: Piece) -> Json:
        return _prompt_ids(piece) if self._tells_ids else {}

    def _rest(self, piece: Piece) -> Json:
        logprobs = for_chat(piece.rated, self._text) if self._text and piece.rated else None
        return {"logprobs": logprobs, "finish_reason": piece.finish, **(_ids(piece) if self._tells_ids else {})}


def _ids(piece: Piece) -> Json:
    return {"token_ids": piece.tokens}


def _prompt_ids(piece: Piece) -> Json:
    return {"prompt_token_ids": piece.prompt} if piece.prompt else {}


class Reply:
    """One answer: the id, time and model that all its parts repeat."""

    def __init__(self, shape: Shape, model: str, num_prompt_tokens: int) -> None:
        self.shape, self._num_prompt_tokens = shape, num_prompt_tokens
        self._head = {"id": f"{shape.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, answers: list[Piece], effort: Effort) -> Json:
        choices = [self.shape.choice(answer) for answer in answers]
        around = self.shape.around(answers[0])
        return {**self._head, "object": self.shape.whole, "choices": choices, **self._costs(effort), **around}

    def part(self, piece: Piece, first: bool, usage: Json | None = None) -> Json:
        choices, around = [self.shape.delta(piece, first)], self.shape.around(piece)
        return {**self._head, "object": self.shape.part, "choices": choices, "usage": usage, **around}

    def last_part(self, effort: Effort) -> Json:
        return {**self._head, "object": self.shape.part, "choices": [], **self._costs(effort)}

    def usage(self, effort: Effort) -> Json:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": effort.tokens,
            "total_tokens": self._num_prompt_tokens + effort.tokens,
            "speculation": effort.speculation(),
        }

    def _costs(self, effort: Effort) -> Json:
        return {"usage": self.usage(effort), "metrics": effort.metrics()}


def model_card(name: str, created: int, max_model_len: int | None) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tpspec",
        "root": name,
        "max_model_len": max_model_len,
    }
