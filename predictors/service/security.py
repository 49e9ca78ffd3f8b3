"""Access: TLS, mutual TLS, bearer tokens."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from predictors.service.errors import UnauthenticatedError
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file

# Probes need no token.
OPEN_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files.

    Attributes:
        certificate: The server's certificate, with its chain.
        key: Its private key.
        client_authority: Signs the certificates that clients must present; None: clients need none.
    """

    certificate: Path
    key: Path
    client_authority: Path | None = None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC port.

        Raises:
            InputError: A file is missing, or not what it should be.
        """
        self.http_context()  # gRPC itself reports bad files only in its log
        authority = None if self.client_authority is None else self.client_authority.read_bytes()
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_credentials(
            [pair], root_certificates=authority, require_client_auth=authority is not None
        )

    def http_context(self) -> ssl.SSLContext:
        """For an HTTP port; raises as `grpc_credentials`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        existing_file(self.certificate, "tls_cert")
        existing_file(self.key, "tls_key")
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (ssl.SSLError, OSError) as error:
            raise InputError(
                "tls_cert, tls_key",
                f"{self.certificate}, {self.key}",
                f"a PEM certificate and its key ({error})",
            ) from error
        if self.client_authority is not None:
            existing_file(self.client_authority, "tls_client_ca")
            try:
                context.load_verify_locations(self.client_authority)
            except (ssl.SSLError, OSError) as error:
                raise InputError(
                    "tls_client_ca", str(self.client_authority), f"a PEM certificate ({error})"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class BearerTokens:
    """The valid tokens, stored as hashes.

    Args:
        tokens: At least one, none of them empty.
    """

    def __init__(self, tokens: list[str]) -> None:
        if not tokens or not all(tokens):
            raise InputError("token_file", f"{len(tokens)} tokens", "at least one, one a line")
        self._digests = [_digest(token) for token in tokens]

    @classmethod
    def of_file(cls, path: str | Path) -> BearerTokens:
        """One token a line; empty lines and lines that begin with # are skipped."""
        lines = existing_file(path, "token_file").read_text(encoding="utf-8").splitlines()
        stripped = [line.strip() for line in lines]
        return cls([line for line in stripped if line and not line.startswith("#")])

    def check(self, authorization: str | bytes | None) -> None:
        """Raises UnauthenticatedError unless the header is `Bearer` and one of the tokens; takes the same time for all."""
        if isinstance(authorization, bytes):
            authorization = authorization.decode("utf-8", "surrogateescape")
        scheme, _, token = (authorization or "").partition(" ")
        presented = _digest(token.strip())
        # All are compared, so that the time does not depend on the token.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise UnauthenticatedError


class BearerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic when it runs
    """Lets only calls with a valid token through, probes excepted."""

    def __init__(self, tokens: BearerTokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method's own handler, or one that refuses."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method in OPEN_METHODS:
            return handler
        metadata = handler_call_details.invocation_metadata
        try:
            self._tokens.check(next((value for key, value in metadata if key == "authorization"), None))
        except UnauthenticatedError as error:
            return _refusal(handler, error)
        return handler


def _refusal(
    handler: grpc.RpcMethodHandler[Any, Any], error: UnauthenticatedError
) -> grpc.RpcMethodHandler[Any, Any]:
    from predictors.service.grpc_methods import abort

    async def refuse(request: object, context: Any) -> None:
        await abort(context, error)

    # The kind of call must be that of the method: a stream is refused before its first message.
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    refusing: grpc.RpcMethodHandler[Any, Any] = make(refuse)
    return refusing


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
