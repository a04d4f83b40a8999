"""`/tokenize` and `/detokenize`, in vLLM's shapes: what a prompt or a chat is in tokens, and back.

Source: vllm-project/vllm, vllm/entrypoints/serve/tokenize/protocol.py. Must not know the engine or its queue: a text
is only read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from tpspec.serve.chats import MAX_MESSAGES, Message, TemplateOptions, Tools, chat_of, toolbox_of
from tpspec.serve.errors import bad_request, unsupported
from tpspec.serve.protocol import Strict, TokenId, check, parse
from tpspec.serve.text import encode, encode_chat
from tpspec.serve.wire import JsonAnswer, apart, read_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpspec.serve.state import State
    from tpspec.text import Text

MAX_IDS = 1 << 20


class TokenizeBody(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool = True
    tools: Tools = Field([])
    chat_template_kwargs: TemplateOptions = Field({})
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages should be given")
        return self


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: list[TokenId] = Field(max_length=MAX_IDS)


class TextRoutes:
    """check_model: raises for a name that is not served."""

    def __init__(self, state: State, check_model: Callable[[str | None], None]) -> None:
        self._state, self._check_model = state, check_model

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"], response_model=None)
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"], response_model=None)
        return router

    async def tokenize(self, request: Request) -> Response:
        raw = await read_body(request.receive)
        body = await apart(lambda: check(TokenizeBody, parse(raw)), len(raw))
        self._check_model(body.model)
        text, cache_tokens = self._state.serving()
        ids = await asyncio.to_thread(_ids, text, body, cache_tokens - 1)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": cache_tokens, "tokens": ids, "token_strs": None}
        if body.return_token_strs:
            answer["token_strs"] = text.tokenizer.convert_ids_to_tokens(list(ids))
        return JsonAnswer(answer)

    async def detokenize(self, request: Request) -> Response:
        raw = await read_body(request.receive)
        body = await apart(lambda: check(DetokenizeBody, parse(raw)), len(raw))
        self._check_model(body.model)
        text, _ = self._state.serving()
        if max(body.tokens, default=0) >= text.vocab_size:
            raise bad_request(f"tokens: ids should be 0 to {text.vocab_size - 1}", "tokens", "invalid_value")
        return JsonAnswer({"prompt": await asyncio.to_thread(text.decode, body.tokens, False)})


def _ids(text: Text, body: TokenizeBody, limit: int) -> tuple[int, ...]:
    """limit: a text that is certainly longer than so many tokens is refused before it costs seconds."""
    if body.messages is not None:
        if body.add_special_tokens:
            raise unsupported("add_special_tokens")  # the template writes them
        toolbox = toolbox_of([tool.function for tool in body.tools], "auto", None, True)
        chat = chat_of(body.messages, toolbox, body.add_generation_prompt, body.chat_template_kwargs)
        return encode_chat(text, chat, limit)
    assert body.prompt is not None
    return encode(text, body.prompt, limit, special=body.add_special_tokens is not False)
