"""Errors of a request, and the table from error to gRPC and HTTP status.

Statuses have the details of google.rpc (AIP-193): always ErrorInfo, BadRequest if a field is wrong, and
RetryInfo if the request can be retried.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from datetime import timedelta

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from predictors.hosting.logs import RequestDataFilter
from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import InputError, TailcastError

logger = logging.getLogger(__name__)
logger.addFilter(RequestDataFilter())


class QueueFullError(TailcastError):
    """The queue is full; the request was rejected immediately and can be retried later."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"queue: {limit} requests are waiting; allowed: fewer than {limit}; try again later")


class ExpiredError(TailcastError):
    """The deadline of the request passed while it was queued."""

    def __init__(self) -> None:
        super().__init__("the deadline passed while the request was waiting in the queue")


class ClosedError(TailcastError):
    """The service is starting, draining or closed."""

    def __init__(self, state: str = "shutting down") -> None:
        super().__init__(f"the service is {state}")


class BatchError(TailcastError):
    """The batch of the request failed; every request of the batch gets its own instance. `__cause__` is the
    reason; the message omits its text, which can quote the prompt of another request."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the batch failed ({type(cause).__name__}); the server's log has the details")
        self.__cause__ = cause


class UnknownArtifactError(InputError):
    """No artifact with this id is served."""


class UnauthenticatedError(TailcastError):
    """The request has no valid bearer token."""

    def __init__(self) -> None:
        super().__init__("authorization: a valid bearer token is needed")


class UnparsableError(InputError):
    """The request is not a serialized message of the expected type."""

    def __init__(self, kind: str, reason: object) -> None:
        super().__init__("request", f"bytes that cannot be parsed ({reason})", f"a serialized {kind}")


class ReloadError(TailcastError):
    """A new artifact was rejected; the old one stays in service."""


def renamed(error: InputError, field: str) -> InputError:
    """The same error with another field name; an error without allowed values is returned unchanged."""
    if error.allowed is None:
        return error
    kind = UnknownArtifactError if isinstance(error, UnknownArtifactError) else InputError
    return kind(field, error.value, error.allowed)


STATUS: dict[type[Exception], tuple[grpc.StatusCode, int]] = {
    InputError: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    UnknownArtifactError: (grpc.StatusCode.NOT_FOUND, 404),
    UnauthenticatedError: (grpc.StatusCode.UNAUTHENTICATED, 401),
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    ExpiredError: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    ClosedError: (grpc.StatusCode.UNAVAILABLE, 503),
    Exception: (grpc.StatusCode.INTERNAL, 500),
}
DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "tailcast"
MAX_MESSAGE_BYTES = 1000
# A full queue drains in well under a second; a server restarts in about two seconds.
RETRY_AFTER_S = {grpc.StatusCode.RESOURCE_EXHAUSTED: 0.1, grpc.StatusCode.UNAVAILABLE: 1.0}


def status_code(error: Exception) -> grpc.StatusCode:
    """The gRPC status of an error."""
    return next(STATUS[kind][0] for kind in type(error).__mro__ if kind in STATUS)


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """Status, message and reason of a failed request; `field` is the wrong field, or empty."""

    code: grpc.StatusCode
    message: str
    field: str
    reason: str

    @classmethod
    def of(cls, error: Exception) -> ErrorStatus:
        """The status of an error; logs errors other than `TailcastError` and does not return their text."""
        if not isinstance(error, TailcastError):
            logger.error("a request failed", exc_info=error)
            message = "internal error; the server's log has the details"
            return cls(grpc.StatusCode.INTERNAL, message, "", "INTERNAL")
        field = error.field if isinstance(error, InputError) and error.allowed is not None else ""
        name = type(error).__name__.removesuffix("Error")
        reason = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()  # QueueFullError -> QUEUE_FULL
        # Valid UTF-8, and short enough that gRPC can send it three times in the trailing metadata.
        data = str(error).encode("utf-8", "replace")
        tail = "..." if len(data) > MAX_MESSAGE_BYTES else ""
        message = data[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore") + tail
        return cls(status_code(error), message, field, reason)

    @property
    def http_status(self) -> int:
        """The corresponding HTTP status."""
        return next(http for code, http in STATUS.values() if code is self.code)

    def message_with_details(self) -> status_pb2.Status:
        """The google.rpc.Status with details."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        details: list[Message] = [error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)]
        if self.field:
            violation = {"field": self.field, "description": self.message}
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.code in RETRY_AFTER_S:
            delay = timedelta(seconds=RETRY_AFTER_S[self.code])
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        for detail in details:
            status.details.add().Pack(detail)
        return status

    def outcome(self, request_id: str) -> pb.Outcome:
        """The outcome of one request of a batch."""
        code: int = self.code.value[0]
        return pb.Outcome(
            error=pb.PredictionError(request_id=request_id, code=code, message=self.message, field=self.field)
        )


@functools.lru_cache(maxsize=16)  # a full server repeats the same status
def trailing_metadata(status: ErrorStatus) -> tuple[tuple[str, bytes], ...]:
    """The details of a status for gRPC clients."""
    return ((DETAILS_KEY, status.message_with_details().SerializeToString()),)
