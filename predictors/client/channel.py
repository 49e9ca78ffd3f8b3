"""gRPC channels of a client: address, options, credentials, and the choice among several of them."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from predictors.client.settings import ClientSettings, RetrySettings, TlsSettings
from scheduler_core.errors import InputError

C = TypeVar("C")


def checked_address(address: str) -> str:
    """The address itself if it is "host:port" or "unix:PATH"; raises InputError otherwise."""
    if re.fullmatch(r"unix:.+", address):
        return address
    match = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", address)
    if match is None or not 1 <= int(match[1]) <= 65535:
        raise InputError("predictor address", address, "HOST:PORT with a port from 1 to 65535, or unix:PATH")
    return address


def channel_options(settings: ClientSettings) -> list[tuple[str, Any]]:
    """Options of a gRPC channel."""
    return [
        ("grpc.service_config", json.dumps(_service_config(settings.retries, settings.wait_for_ready))),
        # A call is only retried while its request is buffered; the default is 256 KiB.
        ("grpc.per_rpc_retry_buffer_size", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        # Reconnect quickly: a restarted server is back in about a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # In spite of its name the time a connection may take to be made: a busy server, or a far one with TLS, needs some.
        ("grpc.min_reconnect_backoff_ms", 10_000),
        # A connection that died without a close is detected within half a minute of a call; servers allow such pings.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Otherwise channels to the same address share one connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    """Reads the PEM files; raises InputError naming the one that cannot be read."""
    return grpc.ssl_channel_credentials(
        root_certificates=_pem("tls ca", tls.ca),
        private_key=_pem("tls key", tls.key),
        certificate_chain=_pem("tls certificate", tls.certificate),
    )


def call_metadata(settings: ClientSettings) -> tuple[tuple[str, str], ...]:
    """Metadata of every call."""
    return () if settings.token is None else (("authorization", f"Bearer {settings.token}"),)


class LeastBusy(Generic[C]):
    """Hands out the connection with the fewest calls in flight, among equals the least recently used. Thread-safe.

    Args:
        connections: At least one.
    """

    def __init__(self, connections: Sequence[C]) -> None:
        self._connections = tuple(connections)
        self._num_calls = [0] * len(self._connections)
        self._last_used = [0] * len(self._connections)
        self._count = 0
        self._lock = threading.Lock()

    @property
    def num_calls(self) -> tuple[int, ...]:
        """Calls in flight on each connection."""
        return tuple(self._num_calls)

    @contextlib.contextmanager
    def lease(self) -> Iterator[C]:
        """A connection for one call."""
        with self._lock:
            index = min(
                range(len(self._connections)), key=lambda at: (self._num_calls[at], self._last_used[at])
            )
            self._num_calls[index] += 1
            self._count += 1
            self._last_used[index] = self._count
        try:
            yield self._connections[index]
        finally:
            with self._lock:
                self._num_calls[index] -= 1


def _service_config(retries: RetrySettings, wait_for_ready: bool) -> dict[str, Any]:
    method: dict[str, Any] = {"name": [{}], "waitForReady": wait_for_ready}
    # A name with several addresses (a headless Kubernetes service) is spread over all of them.
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": [method]}
    if retries.max_attempts > 1:
        method["retryPolicy"] = {
            "maxAttempts": retries.max_attempts,
            "initialBackoff": f"{retries.initial_backoff_s:.3f}s",
            "maxBackoff": f"{retries.max_backoff_s:.3f}s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
        }
        config["retryThrottling"] = {"maxTokens": retries.max_tokens, "tokenRatio": retries.token_ratio}
    return config


def _pem(field: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(field, path, f"a readable PEM file ({error.strerror})") from error
