"""Limits of a client, and how it deals with a service that fails."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from scheduler_core.errors import InputError

RETRYABLE_CODES = frozenset({"UNAVAILABLE", "CANCELLED"})
"""What is tried again: no server took the request, or one ended while it was inside. A prediction changes nothing, so
a second try does no harm. CANCELLED is what a call gets that reaches a server in the moment of its shutdown.
RESOURCE_EXHAUSTED is not among them: more calls are the last thing a full server needs."""

FAILURE_CODES = RETRYABLE_CODES | {"DEADLINE_EXCEEDED", "UNKNOWN"}
"""What the circuit breaker counts: a server that cannot be reached or does not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """When a failed call is made again.

    Attributes:
        max_attempts: Tries of one call, the first included, 1 to 20.
        first_backoff_s: Longest wait before the second try, seconds; doubled for each further one.
        max_backoff_s: Longest wait before any try. Waits are random, uniform over the upper half.
        budget_per_call: What one call adds to the budget that all callers share; a retry takes 1 from it. So retries
            are at most this share of the load in the long run, and never turn a fault into an overload.
        budget_per_s: What a second adds to the budget, so that a client with few calls can retry too.
        max_budget: Most retries saved up; the client begins with as many.
    """

    max_attempts: int = 8
    first_backoff_s: float = 0.05
    max_backoff_s: float = 2.0
    budget_per_call: float = 0.2
    budget_per_s: float = 10.0
    max_budget: float = 100.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 20:
            raise InputError("max_attempts", self.max_attempts, "1 to 20")
        if not 0 < self.first_backoff_s <= self.max_backoff_s < math.inf:
            raise InputError(
                "first_backoff_s",
                self.first_backoff_s,
                f"seconds > 0, at most max_backoff_s ({self.max_backoff_s})",
            )
        for name in ("budget_per_call", "budget_per_s", "max_budget"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "a finite number >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When calls are no longer made because they would fail.

    Attributes:
        max_failures: Failures (`FAILURE_CODES`) one after the other, without a success between them, that open it. Calls
            that were under way together count as one: a server that ends fails them all at once.
        open_s: Seconds without calls; then one call is let through, whose outcome decides.
        when_open: "fail" raises `CircuitOpenError` at once; "wait" waits for the service within the call's deadline,
            however often it is found closed meanwhile.
    """

    max_failures: int = 5
    open_s: float = 1.0
    when_open: Literal["fail", "wait"] = "fail"

    def __post_init__(self) -> None:
        if self.max_failures < 1:
            raise InputError("max_failures", self.max_failures, "an integer >= 1")
        if not 0 < self.open_s < math.inf:
            raise InputError("open_s", self.open_s, "a finite number of seconds > 0")
        if self.when_open not in ("fail", "wait"):
            raise InputError("when_open", self.when_open, "fail or wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Encryption. Paths of PEM files.

    Attributes:
        ca: Certificates that the server's is checked against; None: the system's.
        certificate, key: The client's own, for mutual TLS; both or neither.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InputError(
                "certificate", self.certificate, "a certificate together with its key, or neither"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Limits of a client.

    Attributes:
        timeout_s: Deadline of `predict`, retries included; a call may name a shorter or longer one.
        max_batch_requests: Most requests in one call; more are sent in several calls at the same time.
        max_batch_bytes: Largest sum of prompt bytes in one call of more than one request.
        max_message_bytes: Largest message.
        transport: "calls" makes one call of a request or a small batch, which ends early when nobody waits for it any
            more; "stream" sends all requests of a connection through one call: cheaper for both sides, but what was sent
            is worked on even if its caller is gone.
        num_connections: Connections, used in turn by how busy they are. Behind one address several workers may listen.
        coalesce: Whether requests that wait at the same time share a call, and identical ones an answer.
        max_calls: Calls under way at a time while coalescing; requests that come in the meantime go together. Does not
            bound a stream.
        hedge_after_s: Seconds without an answer after which the call is made a second time, on another connection if
            there is one, and the first answer wins; takes from the budget of retries. None: never.
        retries: When a failed call is made again.
        breaker: When calls are no longer made; None: always made.
        tls: Encryption; None: none.
        token: Bearer token that every call carries; None: none.
    """

    timeout_s: float = 10.0
    max_batch_requests: int = 64
    max_batch_bytes: int = 2 * 2**20
    max_message_bytes: int = 16 * 2**20
    transport: Literal["calls", "stream"] = "calls"
    num_connections: int = 1
    coalesce: bool = True
    max_calls: int = 16
    hedge_after_s: float | None = None
    retries: RetrySettings = field(default_factory=RetrySettings)
    breaker: BreakerSettings | None = field(default_factory=BreakerSettings)
    tls: TlsSettings | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        checked_timeout(self.timeout_s)
        for name in (
            "max_batch_requests",
            "max_batch_bytes",
            "max_message_bytes",
            "num_connections",
            "max_calls",
        ):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "an integer >= 1")
        if self.transport not in ("calls", "stream"):
            raise InputError("transport", self.transport, "calls or stream")
        if self.hedge_after_s is not None and not 0 < self.hedge_after_s < math.inf:
            raise InputError("hedge_after_s", self.hedge_after_s, "a finite number of seconds > 0, or None")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise InputError("token", "...", "printable ASCII characters, at least one")


def checked_timeout(timeout_s: float) -> float:
    """`timeout_s` itself, if it is one; otherwise raises InputError."""
    if not 0 < timeout_s < math.inf:
        raise InputError("timeout_s", timeout_s, "a finite number of seconds > 0")
    return timeout_s
