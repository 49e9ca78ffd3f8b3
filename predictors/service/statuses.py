"""One table from error to status, for gRPC and HTTP, with the details that clients can act on.

Details are those of google.rpc (AIP-193): ErrorInfo always, BadRequest where a field is wrong, RetryInfo where trying
again later helps.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from predictors.edge_logging import RequestDataFilter
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.errors import (
    BatchError,
    ClosedError,
    ExpiredError,
    QueueFullError,
    UnauthenticatedError,
    UnknownArtifactError,
)
from scheduler_core.errors import InputError, TailcastError

logger = logging.getLogger(__name__)
logger.addFilter(RequestDataFilter())

STATUS: dict[type[Exception], grpc.StatusCode] = {
    InputError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownArtifactError: grpc.StatusCode.NOT_FOUND,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ExpiredError: grpc.StatusCode.DEADLINE_EXCEEDED,
    ClosedError: grpc.StatusCode.UNAVAILABLE,
    BatchError: grpc.StatusCode.INTERNAL,
    TailcastError: grpc.StatusCode.INTERNAL,
}
HTTP_STATUS: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.INTERNAL: 500,
}
DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "tailcast"
MAX_MESSAGE_BYTES = 1000
# A full queue is worked off in well under a second; a restarted server is back in about two.
RETRY_AFTER_S = {grpc.StatusCode.RESOURCE_EXHAUSTED: 0.1, grpc.StatusCode.UNAVAILABLE: 1.0}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no answer: status, message, and the field that is wrong or empty."""

    code: grpc.StatusCode
    message: str
    field: str
    reason: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The failure that an error is; one that is not of tailcast is logged and told without its text."""
        if not isinstance(error, TailcastError):
            logger.error("a request failed", exc_info=error)
            message = "internal error; the server's log has the details"
            return cls(grpc.StatusCode.INTERNAL, message, "", "INTERNAL")
        code = cls.code_of(error)
        field = error.field if isinstance(error, InputError) else ""
        return cls(code, _shortened(str(error)), field, _reason(type(error)))

    @staticmethod
    def code_of(error: Exception) -> grpc.StatusCode:
        """The status of an error."""
        return next(
            (STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), grpc.StatusCode.INTERNAL
        )

    @property
    def number(self) -> int:
        """The status code's number."""
        number: int = self.code.value[0]
        return number

    @property
    def http_status(self) -> int:
        """The HTTP status that means the same."""
        return HTTP_STATUS[self.code]

    def status(self) -> status_pb2.Status:
        """The failure with its details."""
        status = status_pb2.Status(code=self.number, message=self.message)
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)
        status.details.add().Pack(info)
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=self.field, description=self.message
            )
            status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.code in RETRY_AFTER_S:
            delay = Duration(nanos=round(RETRY_AFTER_S[self.code] * 1e9) % 1_000_000_000)
            delay.seconds = int(RETRY_AFTER_S[self.code])
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return status

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """What gRPC clients read the details from."""
        # Those of a full server are made again and again; of others each holds what its caller has sent.
        is_full = self.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        return ((DETAILS_KEY, _remembered(self) if is_full else _serialised(self)),)

    def outcome(self, request_id: str) -> pb.Outcome:
        """The failure as the outcome of one of several requests."""
        return pb.Outcome(
            error=pb.PredictionError(
                request_id=request_id, code=self.number, message=self.message, field=self.field
            )
        )


@functools.lru_cache(maxsize=16)
def _remembered(failure: Failure) -> bytes:
    return _serialised(failure)


def _serialised(failure: Failure) -> bytes:
    data: bytes = failure.status().SerializeToString()
    return data


def _shortened(message: str) -> str:
    """A message that UTF-8 can encode, and of which gRPC can send three copies in its trailing metadata."""
    data = message.encode("utf-8", "replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    return data[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore") + "..."


def _reason(kind: type[Exception]) -> str:
    """QueueFullError -> QUEUE_FULL."""
    name = kind.__name__.removesuffix("Error")
    return "".join(
        "_" + letter if letter.isupper() and place else letter for place, letter in enumerate(name)
    ).upper()
