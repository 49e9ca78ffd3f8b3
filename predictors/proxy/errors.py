"""Errors of the proxy itself, in the form of the OpenAI API's."""

from __future__ import annotations

import json

from aiohttp import web

from scheduler_core.errors import InputError, TailcastError


class EngineLostError(TailcastError):
    """The engine's response broke off."""


class Refusal(TailcastError):
    """A request that gets an error instead of the engine's response: HTTP status, and fields of the API's error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, error: InputError) -> Refusal:
        """400 for a field of the request."""
        return cls(400, str(error), param=error.field, code="invalid_value")

    def response(self, *, closes: bool) -> web.Response:
        """The response to the client; `closes` the connection where the request has not been read to its end."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        text = json.dumps({"error": error})
        response = web.Response(
            status=self.status, text=text, content_type="application/json", headers=headers
        )
        if closes:
            response.force_close()
        return response


def bad_body(reason: str) -> Refusal:
    """400 for a body that cannot be read as the engine reads it."""
    return Refusal(400, f"the body is {reason}", param="body", code="invalid_value")


def too_many(message: str, code: str) -> Refusal:
    """429."""
    return Refusal(429, message, kind="rate_limit_exceeded", code=code, retry_after_s=1)


def engine_failed(reason: str, *, late: bool = False) -> Refusal:
    """502, or 504 where the engine did not respond in time."""
    return Refusal(
        504 if late else 502, f"the engine {reason}", kind="server_error", code="engine_unavailable"
    )
