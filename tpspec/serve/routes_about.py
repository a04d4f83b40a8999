"""What the server says about itself: the status page at `/`, `/version`, and `/server_info`, the resolved topology.

The page is one file (status.html) without a request to anywhere else, and its policy lets nothing else in. Must not
know what a topology means: it is shown as it was read.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response

from tpspec.serve.wire import JsonAnswer

if TYPE_CHECKING:
    from tpspec.serve.state import State


class AboutRoutes:
    def __init__(self, state: State, model: str, topology: dict[str, Any]) -> None:
        self._state, self._model, self._topology = state, model, topology
        self._page = files("tpspec.serve").joinpath("status.html").read_text(encoding="utf-8")
        self._page_headers = {
            "content-security-policy": policy(self._page),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    def router(self) -> APIRouter:
        router = APIRouter()
        for path, answer in {"/": self.page, "/version": self.version, "/server_info": self.server_info}.items():
            router.add_api_route(path, answer, methods=["GET"], response_model=None)
        return router

    async def page(self) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8", headers=self._page_headers)

    async def version(self) -> Response:
        return JsonAnswer({"version": version("tpspec")})

    async def server_info(self) -> Response:
        info = {
            "version": version("tpspec"),
            "model": self._model,
            "max_model_len": self._state.cache_tokens,
            "topology": self._topology,
            "health": self._state.health(),
        }
        return JsonAnswer(info)


def policy(page: str) -> str:
    """A Content-Security-Policy for a page that has all it needs in itself: its own script and style, by their hash."""
    rules = {
        "default-src": "'none'",
        "script-src": _hash_of("script", page),
        "style-src": _hash_of("style", page),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash_of(tag: str, page: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
