"""Access control: TLS, mutual TLS, bearer tokens; their files can be replaced while serving."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from predictors.hosting.process import file_state
from predictors.hosting.tls import ReplaceableContext, server_context
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


class Certificates:
    """TLS of both ports with the files of a configuration. New connections use those that `reload` has read last; open ones
    stay. InputError for a missing or invalid file."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._state: list[object] = []
        #: TLS context of the HTTP port, None without TLS.
        self.http: ReplaceableContext | None = None
        self._grpc: grpc.ServerCertificateConfiguration | None = None
        self.reload()

    @property
    def have_changed(self) -> bool:
        """Whether the files are others than those of the last `reload`, also if it has failed."""
        return self._state != self._files_state()

    def reload(self) -> None:
        """Reads the files; InputError, without any change, if one is missing or invalid."""
        config, self._state = self._config, self._files_state()
        context = server_context(config)  # gRPC reports invalid files only in its log
        if context is None or config.tls_key is None or config.tls_cert is None:
            return
        pair = (
            existing_file(config.tls_key, "tls_key").read_bytes(),
            existing_file(config.tls_cert, "tls_cert").read_bytes(),
        )
        authority = config.tls_client_ca
        clients = None if authority is None else existing_file(authority, "tls_client_ca").read_bytes()
        if self.have_changed:
            raise InputError(
                "tls_cert, tls_key", config.tls_cert, "files that do not change while they are read"
            )
        self._grpc = grpc.ssl_server_certificate_configuration([pair], clients)
        if self.http is None:
            self.http = ReplaceableContext.of(context)
        self.http.current = context

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        """TLS credentials of one gRPC port, None without TLS."""
        used = self._grpc
        if used is None:
            return None

        def replacement() -> grpc.ServerCertificateConfiguration | None:
            """Called for each connection, in a thread of gRPC; None if there is nothing new."""
            nonlocal used
            if used is self._grpc:
                return None
            used = self._grpc
            return used

        demands = self._config.tls_client_ca is not None
        untyped: Any = grpc.dynamic_ssl_server_credentials  # the stubs know no None
        credentials: grpc.ServerCredentials = untyped(used, replacement, demands)
        return credentials

    def _files_state(self) -> list[object]:
        config = self._config
        files = (config.tls_cert, config.tls_key, config.tls_client_ca)
        return [file_state(file) for file in files if file is not None]


class BearerTokens:
    """Hashes of the valid tokens of a file, one per line; empty lines and comments (#) are ignored. New calls need one of those
    that `reload` has read last. InputError for a missing or invalid file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._state: object = None
        self._digests: list[bytes] = []
        self.reload()

    @property
    def have_changed(self) -> bool:
        """Whether the file is another than that of the last `reload`, also if it has failed."""
        return self._state != file_state(self._path)

    def reload(self) -> None:
        """Reads the file; InputError, without any change, if it is missing or has no token."""
        self._state = file_state(self._path)
        try:
            text = existing_file(self._path, "token_file").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError("token_file", self._path, "a text in UTF-8") from error
        lines = map(str.strip, text.splitlines())
        digests = [_digest(line) for line in lines if line and not line.startswith("#")]
        if not digests:
            raise InputError("token_file", "no token", "at least one token, one per line")
        self._digests = digests

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
