"""Limits of a client, and its retries."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from scheduler_core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """gRPC's retry policy and throttling (https://grpc.io/docs/guides/retry); a prediction changes nothing, so that a
    second attempt does no harm.

    Retried are calls that no server answered (UNAVAILABLE, and CANCELLED, the status of a call that reaches a server in
    the moment of its shutdown). RESOURCE_EXHAUSTED is not: more calls are the last thing a full server needs.

    Attributes:
        max_attempts: Attempts of one call, the first included, 1 to 5 (gRPC's limit); 1: no retries.
        initial_backoff_s: Mean of the random wait before the second attempt, seconds; doubled for each further one.
        max_backoff_s: Upper bound of any wait, seconds.
        max_tokens: Size of the token bucket shared by all calls of a channel, 1 to 1000. A failed attempt takes one token;
            while half of them or less are left, nothing is retried, so that retries never turn a fault into an overload.
        token_ratio: Tokens that a successful call gives back, > 0.
    """

    max_attempts: int = 5
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    max_tokens: int = 100
    token_ratio: float = 0.2

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 5:
            raise InputError("max_attempts", self.max_attempts, "1 to 5")
        # With a backoff of 1 ms gRPC 1.85 now and then drops the second attempt, and the call waits for its deadline.
        if not 0.01 <= self.initial_backoff_s <= self.max_backoff_s < math.inf:
            raise InputError(
                "initial_backoff_s",
                self.initial_backoff_s,
                f"0.01 to max_backoff_s ({self.max_backoff_s}) seconds",
            )
        if not 1 <= self.max_tokens <= 1000:
            raise InputError("max_tokens", self.max_tokens, "1 to 1000")
        if not 0.001 <= self.token_ratio <= 1000:
            raise InputError("token_ratio", self.token_ratio, "0.001 to 1000")


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
        num_connections: Channels of an own connection each; a call takes the least busy one. Behind one address several
            workers may listen.
        wait_for_ready: Whether a call waits, up to its deadline, for a service that cannot be reached; otherwise it fails
            as soon as its attempts have.
        retries: When a failed call is made again. A stream is not retried: what was in flight on it fails.
        tls: Encryption; None: none.
        token: Bearer token that every call carries; None: none.
    """

    timeout_s: float = 10.0
    max_batch_requests: int = 64
    max_batch_bytes: int = 2 * 2**20
    max_message_bytes: int = 16 * 2**20
    transport: Literal["calls", "stream"] = "calls"
    num_connections: int = 1
    wait_for_ready: bool = False
    retries: RetrySettings = field(default_factory=RetrySettings)
    tls: TlsSettings | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        checked_timeout(self.timeout_s)
        for name in ("max_batch_requests", "max_batch_bytes", "max_message_bytes", "num_connections"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "an integer >= 1")
        if self.transport not in ("calls", "stream"):
            raise InputError("transport", self.transport, "calls or stream")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise InputError("token", "...", "printable ASCII characters, at least one")


def checked_timeout(timeout_s: float) -> float:
    """`timeout_s` itself, if it is one; otherwise raises InputError."""
    if not 0 < timeout_s < math.inf:
        raise InputError("timeout_s", timeout_s, "a finite number of seconds > 0")
    return timeout_s
