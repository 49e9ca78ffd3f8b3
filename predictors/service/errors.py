"""What can go wrong with one request inside the service; `statuses.py` maps each to a status."""

from __future__ import annotations

from scheduler_core.errors import InputError, TailcastError


class QueueFullError(TailcastError):
    """The queue is full; the request was refused at once and may be tried again later."""

    def __init__(self, limit: int, field: str = "queue", what: str = "requests are waiting") -> None:
        super().__init__(f"{field}: {limit} {what}; allowed: fewer than {limit}; try again later")


class ExpiredError(TailcastError):
    """The request's deadline passed before its turn came; no work was done for it."""

    def __init__(self) -> None:
        super().__init__("the deadline passed while the request was waiting in the queue")


class ClosedError(TailcastError):
    """The service is starting, draining or closed."""

    def __init__(self, state: str = "shutting down") -> None:
        super().__init__(f"the service is {state}")


class BatchError(TailcastError):
    """The batch that the request was in failed; `__cause__` is the reason. Every request of the batch gets its own.

    The message has not the text of the cause: that can quote the prompt of another request.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the batch failed ({type(cause).__name__}); the server's log has the details")
        self.__cause__ = cause


class UnknownArtifactError(InputError):
    """No artifact of that name is served."""


class UnauthenticatedError(TailcastError):
    """The request has no bearer token, or one that is not known."""

    def __init__(self) -> None:
        super().__init__("authorization: a known bearer token is needed")


class UnparsableError(InputError):
    """Bytes that are no message of the kind that is expected."""

    def __init__(self, kind: str, reason: object) -> None:
        super().__init__("request", f"bytes that cannot be read ({reason})", f"a serialised {kind}")


def renamed(error: InputError, field: str) -> InputError:
    """The same error about a field of another name."""
    kind = UnknownArtifactError if isinstance(error, UnknownArtifactError) else InputError
    return kind(field, error.value, error.allowed)


class ReloadError(TailcastError):
    """A new artifact was refused; the one before stays in service."""
