"""Lets a crowd that knocks at once in a few at a time, so that whoever is inside, or only asks for health, is served.

Around the application: 256 requests of the same moment would else be read, checked and answered in one turn of the
event loop, 0.1 s in which no stream goes on. Must not know what is asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

AT_ONCE = 8  # requests that begin in one turn of the loop


class Turnstile:
    """Requests with a body queue here, in the order in which they came."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._let_in)
        self._waiting.append(turn)
        await turn

    def _let_in(self) -> None:
        for _ in range(min(AT_ONCE, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._let_in)
