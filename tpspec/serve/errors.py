"""What a client is told when its request cannot be served: status, message, and OpenAI's envelope around them.

Must not know routes, sockets or pydantic. A message names a field or a number, never a path, an address or the input.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An answer other than 200. code is OpenAI's short word for it, param the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The SDK retries 429 and 5xx by itself, so those that say when are worth the wait and the others are not."""
        if self.retry_after is not None:
            return {"retry-after": str(self.retry_after)}
        return {"x-should-retry": "false"}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(field: str) -> ApiError:
    """For a field that would change the output if it were obeyed: ignoring it would be a lie."""
    return bad_request(f"`{field}` is not supported yet", field, "unsupported_parameter")


def plain(status: int) -> ApiError:
    """An answer of the framework's own, such as 404 for an unknown path, in our envelope."""
    return ApiError(status, HTTPStatus(status).phrase)
