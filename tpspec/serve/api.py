"""The routes: which paths there are, what the server says of its model and health, and how it words a refusal.

Must not know processes, signals or how the engine is reached. Text is generated in routes_generate.py.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from tpspec.serve.errors import ApiError, plain
from tpspec.serve.openapi import document
from tpspec.serve.replies import model_card
from tpspec.serve.routes_about import AboutRoutes
from tpspec.serve.routes_generate import GenerateRoutes
from tpspec.serve.routes_text import TextRoutes
from tpspec.serve.wire import ClientLeft, JsonAnswer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tpspec.serve.grammars import Grammars
    from tpspec.serve.metrics import Metrics
    from tpspec.serve.state import State

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Api:
    """One server's routes."""

    def __init__(
        self, state: State, metrics: Metrics, grammars: Grammars, model: str, topology: dict[str, Any]
    ) -> None:
        self._state, self._metrics, self._grammars = state, metrics, grammars
        self._model, self._topology = model, topology
        self._created, self._document = int(time.time()), document(model)

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        gets: dict[str, Callable[..., Awaitable[Response]]] = {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.one_model,
            "/health": self.health,
            "/ready": self.ready,
            "/metrics": self.metrics,
            "/openapi.json": self.openapi,
        }
        for path, get in gets.items():
            app.add_api_route(path, get, methods=["GET"], response_model=None)
        app.include_router(GenerateRoutes(self._state, self._grammars, self._model, self._check_model).router())
        app.include_router(TextRoutes(self._state, self._check_model).router())
        app.include_router(AboutRoutes(self._state, self._model, self._topology).router())
        app.add_exception_handler(ApiError, _refuse)
        app.add_exception_handler(HTTPException, _refuse_plainly)
        app.add_exception_handler(ClientLeft, _nobody)
        app.add_exception_handler(Exception, _fail)
        return app

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

    async def openapi(self) -> Response:
        return JsonAnswer(self._document)

    def _card(self) -> dict[str, Any]:
        return model_card(self._model, self._created, self._state.cache_tokens)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model):
            message = f"this server serves {self._model} alone"
            raise ApiError(404, message, param="model", code="model_not_found")


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
