"""What the proxy itself refuses, in the form of the OpenAI API's errors."""

from __future__ import annotations

import json

from aiohttp import web

from scheduler_core.errors import InputError, TailcastError


class Refusal(TailcastError):
    """A request that is not sent to the engine.

    Args:
        status: HTTP status.
        message: Names field, value and what is allowed, where a field is wrong.
        kind: `error.type` of the OpenAI API.
        param: The field it is about.
        code: A word for programs.
        retry_after_s: Whole seconds after which trying again may help.
    """

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
        """The answer to the client.

        Args:
            closes: The connection ends with it: the request has not been read to its end.
        """
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        response = web.Response(
            status=self.status,
            text=json.dumps({"error": error}),
            content_type="application/json",
            headers=headers,
        )
        if closes:
            response.force_close()
        return response


def too_large(num_bytes: int | None, limit: int) -> Refusal:
    """413; `num_bytes` is None where the body has no declared size."""
    found = "more" if num_bytes is None else f"{num_bytes} bytes"
    return Refusal(
        413, f"body: got {found}; allowed: at most {limit} bytes", param="body", code="body_too_large"
    )


def bad_body(what: str) -> Refusal:
    """400 for a body that cannot be read as the engine reads it."""
    return Refusal(400, f"the body is {what}", param="body", code="invalid_value")


def engine_failed(what: str, *, late: bool = False) -> Refusal:
    """502, or 504 where the engine did not answer in time."""
    return Refusal(504 if late else 502, f"the engine {what}", kind="server_error", code="engine_unavailable")
