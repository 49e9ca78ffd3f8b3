"""Errors of the proxy itself, in the format of the OpenAI API."""

from __future__ import annotations

from aiohttp import web

from scheduler_core.errors import InputError, TailcastError

#: HTTP status -> `type` of the API error; default: invalid_request_error.
TYPES = {429: "rate_limit_exceeded", 502: "server_error", 504: "server_error"}


class EngineGoneError(TailcastError):
    """The engine of a waiting request is gone, and another one is up."""


class EngineLostError(TailcastError):
    """The connection to the engine was lost during a response."""


class Refusal(TailcastError):
    """An error that the proxy returns itself: HTTP status and fields of the API error."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        #: Whether an engine may have got the request.
        self.was_sent = True

    @classmethod
    def of(cls, error: InputError) -> Refusal:
        """Status 400 for a field of the request."""
        return cls(400, str(error), "invalid_value", error.field)

    def response(self, *, closes: bool) -> web.Response:
        """The response to the client; `closes` the connection, for a request that was not fully read."""
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        response = web.json_response({"error": error}, status=self.status)
        if self.status == 429:
            response.headers["Retry-After"] = "1"
        if closes:
            response.force_close()
        return response


def bad_body(reason: str) -> Refusal:
    """Status 400 for a body that cannot be parsed reliably."""
    return Refusal(400, f"the body is {reason}", "invalid_value", "body")


def engine_failed(reason: str, *, late: bool = False) -> Refusal:
    """Status 502, or 504 if the engine did not respond in time."""
    return Refusal(504 if late else 502, f"the engine {reason}", "engine_unavailable")
