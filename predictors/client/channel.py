"""Settings of a client, and the gRPC channels made from them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import grpc

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file
from scheduler_core.ranges import INTEGERS, check_ranges

# gRPC's retry policy and throttling (https://grpc.io/docs/guides/retry). Retried are calls that no server answered:
# UNAVAILABLE, and CANCELLED, the status of a call that reaches a server in the moment of its shutdown. A prediction
# changes nothing, so that a second attempt does no harm. RESOURCE_EXHAUSTED is not retried: more calls are the last thing
# a full server needs. While the failed attempts of a channel (minus a fifth of its successes) are more than 50, nothing is
# retried, so that retries never turn a fault into an overload.
RETRY_POLICY = {
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
RETRY_THROTTLING = {"maxTokens": 100, "tokenRatio": 0.2}


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

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files; raises InputError naming the one that is missing."""
        ca, key, certificate = (
            None if path is None else existing_file(path, f"tls {name}").read_bytes()
            for name, path in (("ca", self.ca), ("key", self.key), ("certificate", self.certificate))
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Limits of a client.

    Attributes:
        timeout_s: Deadline of `predict`, retries included; a call may name a shorter or longer one.
        max_batch_requests: Maximum number of requests in one call; more are sent in several calls at the same time.
        max_message_bytes: Largest message.
        num_connections: Channels with a connection each, used in turn: several workers may listen on one address.
        wait_for_ready: Whether a call waits, up to its deadline, for a service that cannot be reached; otherwise it fails
            as soon as its attempts have.
        max_attempts: Attempts of one call, the first included, 1 to 5 (gRPC's limit); 1: no retries.
        tls: Encryption; None: none.
        token: Bearer token that every call carries; None: none.
    """

    timeout_s: float = 10.0
    max_batch_requests: int = 64
    max_message_bytes: int = 16 * 2**20
    num_connections: int = 1
    wait_for_ready: bool = False
    max_attempts: int = 5
    tls: TlsSettings | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        checked_timeout(self.timeout_s)
        counts = dict.fromkeys(("max_batch_requests", "max_message_bytes", "num_connections"), (1, INTEGERS))
        check_ranges(self, max_attempts=(1, 5), **counts)
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise InputError("token", "...", "printable ASCII characters, at least one")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channels(self, package: Any, address: str) -> list[Any]:
        """New channels of `grpc` or `grpc.aio`."""
        options, count = self._channel_options(), range(self.num_connections)
        if self.tls is None:
            return [package.insecure_channel(address, options=options) for _ in count]
        credentials = self.tls.credentials()
        return [package.secure_channel(address, credentials, options=options) for _ in count]

    def _channel_options(self) -> list[tuple[str, Any]]:
        method: dict[str, Any] = {"name": [{}], "waitForReady": self.wait_for_ready}
        # A name with several addresses (a headless Kubernetes service) is balanced over all of them.
        config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": [method]}
        if self.max_attempts > 1:
            method["retryPolicy"] = RETRY_POLICY | {"maxAttempts": self.max_attempts}
            config["retryThrottling"] = RETRY_THROTTLING
        return [
            ("grpc.service_config", json.dumps(config)),
            # A call is only retried while its request is buffered; the default is 256 KiB.
            ("grpc.per_rpc_retry_buffer_size", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            # Reconnect quickly: a restarted server is back in about a second.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # In spite of its name the limit of setting up a connection: a busy server, or a far one with TLS, needs some.
            ("grpc.min_reconnect_backoff_ms", 10_000),
            # A connection that died without a close is detected within half a minute; servers allow such pings.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            # Otherwise channels to the same address share one connection.
            ("grpc.use_local_subchannel_pool", 1),
        ]


def checked_address(address: str) -> str:
    """The address itself if it is "host:port" or "unix:PATH"; raises InputError otherwise."""
    if re.fullmatch(r"unix:.+", address):
        return address
    match = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", address)
    if match is None or not 1 <= int(match[1]) <= 65535:
        raise InputError("predictor address", address, "HOST:PORT with a port from 1 to 65535, or unix:PATH")
    return address


def checked_timeout(timeout_s: float) -> float:
    """`timeout_s` itself, if it is one; otherwise raises InputError."""
    if not 0 < timeout_s < math.inf:
        raise InputError("timeout_s", timeout_s, "a finite number of seconds > 0")
    return timeout_s
