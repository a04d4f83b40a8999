"""The routes that generate text: completions, chats and responses, from a checked body to pieces and back to JSON.

Must not know processes, signals or how the engine is reached.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request, Response

from tpspec.grammar import NOTHING_ALLOWED
from tpspec.serve.answers import Piece
from tpspec.serve.asking import chat_asks, check_ids, completion_asks
from tpspec.serve.chats import ChatBody
from tpspec.serve.errors import ApiError, bad_request
from tpspec.serve.key import salt_of
from tpspec.serve.log import EFFORT
from tpspec.serve.protocol import Body, ChoicesBody, CompletionBody, check, parse
from tpspec.serve.replies import ChatShape, ChoicesReply, CompletionShape
from tpspec.serve.requests import Exchange, num_prompt_tokens
from tpspec.serve.response_reply import ResponseReply
from tpspec.serve.responses import ResponsesBody
from tpspec.serve.wire import EventStream, JsonAnswer, apart, read_body, unless_left

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tpspec.serve.answers import Ask
    from tpspec.serve.grammars import Grammars
    from tpspec.serve.replies import Reply, Shape
    from tpspec.serve.state import State
    from tpspec.text import Text

KEEP_ALIVE_S = 15.0  # silence after which a comment is sent: proxies cut idle streams during a long prompt
B = TypeVar("B", bound=Body)


class GenerateRoutes:
    """check_model: raises for a name that is not served."""

    def __init__(self, state: State, grammars: Grammars, model: str, check_model: Callable[[str | None], None]) -> None:
        self._state, self._grammars, self._model, self._check_model = state, grammars, model, check_model

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/v1/completions", self.completions, methods=["POST"], response_model=None)
        router.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        router.add_api_route("/v1/responses", self.responses, methods=["POST"], response_model=None)
        return router

    async def completions(self, request: Request) -> Response:
        body, text, cache_tokens = await self._read(request, CompletionBody)
        asked = await completion_asks(body, text, cache_tokens)
        reply = self._choices(CompletionShape(*_details(body, text)), body, asked)
        return await self._answer(request, body, reply, asked, text)

    async def chat(self, request: Request) -> Response:
        body, text, cache_tokens = await self._read(request, ChatBody)
        asked = await chat_asks(body, text, cache_tokens)
        shape = ChatShape(*_details(body, text), tells_thoughts=body.include_reasoning)
        reply = self._choices(shape, body, asked)
        return await self._answer(request, body, reply, asked, text)

    async def responses(self, request: Request) -> Response:
        body, text, cache_tokens = await self._read(request, ResponsesBody)
        asked = await chat_asks(body, text, cache_tokens)
        reply = ResponseReply(body, self._model, num_prompt_tokens(asked))
        return await self._answer(request, body, reply, asked, text)

    def _choices(self, shape: Shape, body: ChoicesBody, asked: list[Ask]) -> Reply:
        return ChoicesReply(shape, self._model, num_prompt_tokens(asked), body.stream_options)

    async def _read(self, request: Request, kind: type[B]) -> tuple[B, Text, int]:
        raw = await read_body(request.receive)
        text, cache_tokens = self._state.serving()
        body = await apart(lambda: check(kind, parse(raw)), len(raw))
        self._check_model(body.model)
        check_ids("logit_bias", body.biases, text)
        check_ids("stop_token_ids", body.stop_token_ids, text)
        self._state.admit()  # before the prompt costs time; again when it is submitted
        return body, text, cache_tokens

    async def _answer(self, request: Request, body: Body, reply: Reply, asked: list[Ask], text: Text) -> Response:
        grammar = asked[0].grammar
        if grammar:
            has_tools = asked[0].calling is not None
            grammar = await self._grammars.checked(grammar, partial(_field_of, body.bound[0], has_tools))
        self._state.serving()  # it may have begun to stop while the prompt was encoded
        self._state.admit()
        ready = [replace(ask, salt=salt_of(request.scope, ask.salt), grammar=grammar) for ask in asked]
        exchange = self._state.table.open(ready, text)
        request.scope[EFFORT] = exchange.effort
        if body.stream:
            return EventStream(_events(exchange, reply), exchange.close, named=reply.are_named)
        try:
            return JsonAnswer(await unless_left(request.receive, _whole(exchange, reply)))
        finally:
            exchange.close()


def _field_of(binding: str, has_tools: bool, part: str) -> str | None:
    """Which field asks for this part of a grammar: that which binds the answer, whose name is that of its part, or the
    tools. Of no part the compiler does not say which of both it minds."""
    if not has_tools or part == binding:
        return binding
    return "tools" if part or not binding else None


def _details(body: ChoicesBody, text: Text) -> tuple[Text | None, bool]:
    """What a shape is told of a request: see CompletionShape."""
    return text if body.num_logprobs is not None else None, body.return_token_ids


async def _whole(exchange: Exchange, reply: Reply) -> dict[str, Any]:
    answers = [Piece(flight.index) for flight in exchange.flights]
    async for piece in exchange.pieces():
        if piece is not None:
            answers[piece.index].absorb(piece)
            if (error := _error_of(piece)) is not None:
                raise error
    if any(answer.rated for answer in answers):  # thousands of words to spell, while others wait for their tokens
        return await asyncio.to_thread(reply.whole, answers, exchange.effort)
    return reply.whole(answers, exchange.effort)


async def _events(exchange: Exchange, reply: Reply) -> AsyncGenerator[Any]:
    """The events of a stream; those of a round of a sequence follow one another. None: nothing came for a while."""
    for event in reply.begin():
        yield event
    async for piece in exchange.pieces(KEEP_ALIVE_S):
        if piece is None:
            yield None
            continue
        error = _error_of(piece)
        for event in reply.part(piece, exchange.effort) if error is None else reply.fail(error):
            yield event
        if error is not None:
            return
    for event in reply.end(exchange.effort):
        yield event


def _error_of(piece: Piece) -> ApiError | None:
    if piece.error is None and piece.finish != "error":
        return None
    if piece.error == NOTHING_ALLOWED:
        return bad_request(NOTHING_ALLOWED, code="invalid_grammar")
    return ApiError(500, piece.error or "the engine failed on this request", code="engine_error")
