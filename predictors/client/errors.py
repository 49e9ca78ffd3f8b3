"""What a client raises."""

from __future__ import annotations

from typing import Self

from scheduler_core.errors import TailcastError


class PredictorError(TailcastError):
    """The service could not be reached, refused a request or failed.

    Args:
        message: What happened, naming the address.
        code: Name of the gRPC status, for example "RESOURCE_EXHAUSTED".
        request_id: The request it is about, if it is about one.
    """

    def __init__(self, message: str, code: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str | None]]:
        return type(self), (str(self), self.code, self.request_id)


class CircuitOpenError(PredictorError):
    """Most of the last calls failed, so this one was not sent; its code is "UNAVAILABLE"."""
