"""Who may ask: API keys from a file, and the guard in front of every route that lets nobody else through.

Everything is locked but the paths of OPEN, so that a new route is locked too. Looks at the path that is routed, and
never at the Host header: an address put together from both is how others were fooled (CVE-2026-48746, CVE-2026-48710).
"""

from __future__ import annotations

from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.serve.errors import ApiError
from tpspec.serve.wire import JsonAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

OWNER = "tpspec.owner"  # in a request's scope: the digest of its key
OPEN = frozenset({"/", "/health", "/ready"})  # the page has nothing in it; it asks for the key
REFUSAL = ApiError(401, "an API key is needed, as `Authorization: Bearer KEY`", code="invalid_api_key")


class KeyGuard:
    """digests: of the keys that are right, of which there is at least one."""

    def __init__(self, app: ASGIApp, digests: Sequence[bytes]) -> None:
        self._app, self._digests = app, digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] in OPEN or self._knows(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = REFUSAL.headers | {"www-authenticate": "Bearer"}
            await JsonAnswer(REFUSAL.body, REFUSAL.status, headers)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """All keys are compared, whichever is right, and digests at that: the time it takes tells nothing.

        The scope of one that is known holds whose it is.
        """
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        kind, _, key = given[0].partition(b" ")
        scope[OWNER] = digest = sha256(key.strip()).digest()
        matches = [compare_digest(digest, known) for known in self._digests]
        return kind.lower() == b"bearer" and any(matches)


def salt_of(scope: Scope, asked: str) -> str:
    """Of the prefix cache: users of different keys share nothing, so nobody learns by the clock what others sent.

    asked: the request's own salt, which divides the texts of one key further.
    """
    owner: bytes | None = scope.get(OWNER)
    return asked if owner is None else sha256(owner + asked.encode()).hexdigest()


def read_keys(path: Path) -> list[bytes]:
    """Digests of the keys in a file, one a line; lines that begin with # are not. Raises UserError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "keys should be ASCII"
        raise UserError(f"cannot read the API keys in {path}: {reason}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UserError(f"{path} holds no API key; it should hold one a line")
    return [sha256(key.encode()).digest() for key in keys]
