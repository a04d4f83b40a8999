"""The JSON that OpenAI's clients expect: completions and chats, whole or in chunks, and their usage.

Shapes only: must not know where the text comes from or how it is sent.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, Protocol

from tpspec.serve.requests import Effort

Json = dict[str, Any]


class Shape(Protocol):
    """How one kind of request words its answers."""

    prefix: str
    whole: str
    part: str

    def choice(self, index: int, text: str, finish: str | None) -> Json: ...
    def delta(self, index: int, text: str, finish: str | None, first: bool) -> Json: ...


class CompletionShape:
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, text: str, finish: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def delta(self, index: int, text: str, finish: str | None, first: bool) -> Json:
        return self.choice(index, text, finish)


class ChatShape:
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: str | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def delta(self, index: int, text: str, finish: str | None, first: bool) -> Json:
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


class Reply:
    """One answer: the id, time and model that all its parts repeat."""

    def __init__(self, shape: Shape, model: str, num_prompt_tokens: int) -> None:
        self.shape, self._num_prompt_tokens = shape, num_prompt_tokens
        self._head = {"id": f"{shape.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, choices: list[Json], effort: Effort) -> Json:
        return {**self._head, "object": self.shape.whole, "choices": choices, "usage": self.usage(effort)}

    def part(self, choices: list[Json], usage: Json | None = None) -> Json:
        return {**self._head, "object": self.shape.part, "choices": choices, "usage": usage}

    def usage(self, effort: Effort) -> Json:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": effort.tokens,
            "total_tokens": self._num_prompt_tokens + effort.tokens,
            "speculation": {
                "rounds": effort.rounds,
                "drafted": effort.drafted,
                "accepted": effort.accepted,
                "tokens_per_round": round(effort.tokens / effort.rounds, 3) if effort.rounds else None,
                "collectives_per_token": round(effort.collectives / effort.tokens, 3) if effort.tokens else None,
            },
        }


def model_card(name: str, created: int, max_model_len: int | None) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tpspec",
        "root": name,
        "max_model_len": max_model_len,
    }
