"""What can go wrong with one request inside the service; `servicer.py` maps each to a gRPC status."""

from __future__ import annotations

from scheduler_core.errors import TailcastError


class QueueFullError(TailcastError):
    """The queue is full; the request was refused at once and may be tried again later."""

    def __init__(self, max_queue: int) -> None:
        super().__init__(
            f"queue: {max_queue} requests are waiting; allowed: fewer than {max_queue}; try again later"
        )


class ExpiredError(TailcastError):
    """The request's deadline passed before its turn came; no work was done for it."""

    def __init__(self) -> None:
        super().__init__("the deadline passed while the request was waiting in the queue")


class ClosedError(TailcastError):
    """The service is starting, draining or closed."""

    def __init__(self, state: str = "shutting down") -> None:
        super().__init__(f"the service is {state}")


class BatchError(TailcastError):
    """The batch that the request was in failed; `__cause__` is the reason. Every request of the batch gets its own."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the batch failed: {cause}")
        self.__cause__ = cause
