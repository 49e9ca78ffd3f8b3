"""Access control: TLS, mutual TLS, bearer tokens."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from predictors.hosting.tls import server_context
from predictors.service.config import ServeConfig
from predictors.service.errors import UnauthenticatedError
from predictors.service.grpc_methods import abort
from scheduler_core.errors import InputError
from scheduler_core.shell.files import existing_file

# Probes need no token.
OPEN_METHODS = frozenset(
    {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
    | {f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady")}
)


def grpc_credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    """TLS credentials of a gRPC port, None without TLS; InputError for a missing or invalid file."""
    if server_context(config) is None:  # gRPC reports invalid files only in its log
        return None
    key, certificate, authority = (
        None if path is None else Path(path).read_bytes()
        for path in (config.tls_key, config.tls_cert, config.tls_client_ca)
    )
    return grpc.ssl_server_credentials(
        [(key, certificate)],  # type: ignore[list-item]  # both are not None
        root_certificates=authority,
        require_client_auth=authority is not None,
    )


class BearerTokens:
    """Hashes of the valid tokens of a file, one per line; empty lines and comments (#) are ignored."""

    def __init__(self, path: str) -> None:
        lines = map(str.strip, existing_file(path, "token_file").read_text(encoding="utf-8").splitlines())
        self._digests = [_digest(line) for line in lines if line and not line.startswith("#")]
        if not self._digests:
            raise InputError("token_file", "no token", "at least one token, one per line")

    def check(self, authorization: str | bytes | None) -> None:
        """Raises UnauthenticatedError unless the header has a valid bearer token; constant time."""
        if isinstance(authorization, bytes):
            authorization = authorization.decode("utf-8", "surrogateescape")
        scheme, _, token = (authorization or "").partition(" ")
        presented = _digest(token.strip())
        # Compare all tokens, so that the time does not depend on the position of the match.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise UnauthenticatedError


class BearerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at runtime
    """Rejects calls without a valid token, except probes."""

    def __init__(self, tokens: BearerTokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler of the method, or one that rejects the call before the first message."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method in OPEN_METHODS:
            return handler
        metadata = handler_call_details.invocation_metadata
        try:
            self._tokens.check(next((value for key, value in metadata if key == "authorization"), None))
        except UnauthenticatedError:
            return grpc.stream_stream_rpc_method_handler(_refuse)  # also works for unary calls
        return handler


async def _refuse(requests: object, context: Any) -> None:
    await abort(context, UnauthenticatedError())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
