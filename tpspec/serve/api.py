"""The routes: what each path answers, from a checked body to the engine's pieces and back to JSON.

Must not know processes, signals or how the engine is reached.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from tpspec.serve.answers import Ask, Piece
from tpspec.serve.errors import ApiError, bad_request, plain
from tpspec.serve.protocol import Body, ChatBody, CompletionBody, check, for_template, parse
from tpspec.serve.replies import ChatShape, CompletionShape, Reply, Shape, model_card
from tpspec.serve.requests import Call, num_prompt_tokens
from tpspec.serve.routes_about import AboutRoutes
from tpspec.serve.routes_text import TextRoutes
from tpspec.serve.text import encode, encode_chat, too_long
from tpspec.serve.wire import ClientLeft, EventStream, JsonAnswer, read_body, unless_left

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tpspec.serve.metrics import Metrics
    from tpspec.serve.state import State
    from tpspec.text import Text

KEEP_ALIVE_S = 15.0  # silence after which a comment is sent: proxies cut idle streams during a long prompt
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Ids = tuple[int, ...]
Prompts = list[tuple[Ids, str | None]]  # with what is echoed
Routes = dict[str, Callable[..., Awaitable[Response]]]
B = TypeVar("B", bound=Body)


class Api:
    """One server's routes."""

    def __init__(self, state: State, metrics: Metrics, model: str, topology: dict[str, Any]) -> None:
        self._state, self._metrics, self._model, self._topology = state, metrics, model, topology
        self._created = int(time.time())

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        posts: Routes = {"/v1/completions": self.completions, "/v1/chat/completions": self.chat}
        gets: Routes = {"/v1/models": self.models, "/v1/models/{name:path}": self.one_model, "/health": self.health}
        for path, post in posts.items():
            app.add_api_route(path, post, methods=["POST"], response_model=None)
        for path, get in (gets | {"/ready": self.ready, "/metrics": self.metrics}).items():
            app.add_api_route(path, get, methods=["GET"], response_model=None)
        app.include_router(TextRoutes(self._state, self._check_model).router())
        app.include_router(AboutRoutes(self._state, self._model, self._topology).router())
        app.add_exception_handler(ApiError, _refuse)
        app.add_exception_handler(HTTPException, _refuse_plainly)
        app.add_exception_handler(ClientLeft, _nobody)
        app.add_exception_handler(Exception, _fail)
        return app

    async def completions(self, request: Request) -> Response:
        body, text, cache_tokens = await self._read(request, CompletionBody)
        prompts = [await _prompt_ids(text, prompt, cache_tokens) for prompt in body.prompt]
        echoes = [_echo(text, prompt, body.skip_special_tokens) if body.echo else None for prompt in body.prompt]
        asked = list(zip(prompts, echoes, strict=True))
        return await self._answer(request, body, CompletionShape(*_details(body, text)), text, asked, cache_tokens)

    async def chat(self, request: Request) -> Response:
        body, text, cache_tokens = await self._read(request, ChatBody)
        messages = for_template(body.messages)
        limit = cache_tokens - 1
        prompt = await asyncio.to_thread(encode_chat, text, messages, body.add_generation_prompt, limit)
        shape = ChatShape(*_details(body, text))
        return await self._answer(request, body, shape, text, [(prompt, None)], cache_tokens)

    async def models(self) -> Response:
        return JsonAnswer({"object": "list", "data": [self._card()]})

    async def one_model(self, name: str) -> Response:
        self._check_model(name)
        return JsonAnswer(self._card())

    async def health(self) -> Response:
        return JsonAnswer(self._state.health(), 200 if self._state.phase == "ready" else 503)

    async def ready(self) -> Response:
        is_ready = self._state.phase == "ready" and not self._state.is_full
        return JsonAnswer({"ready": is_ready, **self._state.health()}, 200 if is_ready else 503)

    async def metrics(self) -> Response:
        return Response(self._metrics.page(), media_type=METRICS_TYPE)

    def _card(self) -> dict[str, Any]:
        return model_card(self._model, self._created, self._state.cache_tokens)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model):
            message = f"this server serves {self._model} alone"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _read(self, request: Request, kind: type[B]) -> tuple[B, Text, int]:
        raw = await read_body(request.receive)
        text, cache_tokens = self._state.serving()
        body = check(kind, parse(raw))
        self._check_model(body.model)
        _check_ids("logit_bias", body.biases, text)
        _check_ids("stop_token_ids", body.stop_token_ids, text)
        self._state.admit()  # before the prompt costs time; again when it is submitted
        return body, text, cache_tokens

    async def _answer(
        self, request: Request, body: Body, shape: Shape, text: Text, prompts: Prompts, cache_tokens: int
    ) -> Response:
        asks = [ask for prompt, echo in prompts for ask in _asks(body, shape, text, prompt, echo, cache_tokens)]
        reply = Reply(shape, self._model, num_prompt_tokens(asks, body.n))
        self._state.serving()  # it may have begun to stop while the prompt was encoded
        self._state.admit()
        call = self._state.table.open(asks, text)
        if body.stream:
            return EventStream(_parts(call, reply, body), call.close)
        try:
            return JsonAnswer(await unless_left(request.receive, _whole(call, reply)))
        finally:
            call.close()


async def _prompt_ids(text: Text, prompt: str | list[int], cache_tokens: int) -> Ids:
    if isinstance(prompt, list):
        _check_ids("prompt", prompt, text)
        return tuple(prompt)
    ids = await asyncio.to_thread(encode, text, prompt, cache_tokens - 1)
    if not ids:
        raise bad_request("the prompt has no tokens", "prompt", "invalid_value")
    return ids


def _echo(text: Text, prompt: str | list[int], skip_special: bool) -> str:
    return prompt if isinstance(prompt, str) else text.decode(prompt, skip_special)


def _details(body: Body, text: Text) -> tuple[Text | None, bool]:
    """What a shape is told of a request: see CompletionShape."""
    return text if body.num_logprobs is not None else None, body.return_token_ids


def _asks(body: Body, shape: Shape, text: Text, prompt: Ids, echo: str | None, cache_tokens: int) -> list[Ask]:
    """One ask for each of n choices, with seeds that follow one another."""
    max_tokens = _max_tokens(body, shape, len(prompt), cache_tokens)
    if body.min_tokens > max_tokens:
        message = f"min_tokens is {body.min_tokens}; it should be at most max_tokens, here {max_tokens}"
        raise bad_request(message, "min_tokens", "invalid_value")
    stop_ids = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else text.eos_ids)
    if body.min_tokens and len(stop_ids) >= text.vocab_size:
        raise bad_request("min_tokens leaves no token to draw: all of them are stop tokens", "min_tokens")
    seed = secrets.randbits(62) if body.seed is None else body.seed
    return [
        Ask(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=body.sampling(seed + choice, stop_ids),
            stop_ids=stop_ids,
            stops=tuple(body.stop),
            skip_special=body.skip_special_tokens,
            num_drafts=body.num_drafts,
            echo=echo,
            keeps_stop=body.include_stop_str_in_output,
            logprobs=body.num_logprobs,
            salt=body.cache_salt or "",
        )
        for choice in range(body.n)
    ]


def _max_tokens(body: Body, shape: Shape, num_prompt: int, cache_tokens: int) -> int:
    """What was asked for, or the default, which yields to the room there is."""
    room = cache_tokens - num_prompt
    if room < 1:
        raise too_long(num_prompt, cache_tokens - 1)
    if body.limit is None:
        return room if isinstance(shape, ChatShape) else min(DEFAULT_COMPLETION_TOKENS, room)
    if body.limit > room:
        message = (
            f"max_tokens is {body.limit} and the prompt has {num_prompt} tokens, {body.limit + num_prompt} together; "
            f"this server takes {cache_tokens}"
        )
        raise bad_request(message, "max_tokens", "context_length_exceeded")
    return body.limit


def _check_ids(field: str, ids: Any, text: Text) -> None:
    if any(not 0 <= token < text.vocab_size for token in ids):
        raise bad_request(f"{field}: token ids should be 0 to {text.vocab_size - 1}", field, "invalid_value")


async def _whole(call: Call, reply: Reply) -> dict[str, Any]:
    answers = [Piece(flight.index) for flight in call.flights]
    async for piece in call.pieces():
        if piece is not None:
            answers[piece.index].absorb(piece)
            _raise_error(piece)
    if any(answer.rated for answer in answers):  # thousands of words to spell, while others wait for their tokens
        return await asyncio.to_thread(reply.whole, answers, call.effort)
    return reply.whole(answers, call.effort)


async def _parts(call: Call, reply: Reply, body: Body) -> AsyncGenerator[Any]:
    """The chunks of a stream: one for each round of each sequence, then usage if asked for."""
    options = body.stream_options
    wants_usage = options is not None and options.include_usage
    every = wants_usage and options is not None and options.continuous_usage_stats
    begun: set[int] = set()
    async for piece in call.pieces(KEEP_ALIVE_S):
        if piece is None:
            yield None
            continue
        if piece.error is not None or piece.finish == "error":
            yield _engine_error(piece).body
            return
        yield reply.part(piece, piece.index not in begun, reply.usage(call.effort) if every else None)
        begun.add(piece.index)
    if wants_usage:
        yield reply.last_part(call.effort)


def _raise_error(piece: Piece) -> None:
    if piece.error is not None or piece.finish == "error":
        raise _engine_error(piece)


def _engine_error(piece: Piece) -> ApiError:
    return ApiError(500, piece.error or "the engine failed on this request", code="engine_error")


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JsonAnswer(error.body, error.status, error.headers)


async def _refuse_plainly(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = await _refuse(request, plain(error.status_code))
    answer.headers.update(error.headers or {})  # 405 says which methods are allowed
    return answer


async def _nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nginx's number; nobody reads it


async def _fail(request: Request, _: Exception) -> Response:
    return await _refuse(request, ApiError(500, "internal error", code="internal_error"))
