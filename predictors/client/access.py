"""What a client reads from files: TLS certificates and a bearer token, again when the files have changed."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from predictors.hosting.process import file_state
from predictors.hosting.tls import client_context
from scheduler_core.errors import InputError
from scheduler_core.shell.files import existing_file

logger = logging.getLogger(__name__)
#: Seconds between two checks whether files have changed, and of a connection that finds out what is wrong with TLS.
CHECK_S, HANDSHAKE_S = 1.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """TLS encryption. `ca` is a PEM file with the certificates that verify the server (None: those of the
    system); `certificate` and `key` are PEM files of the client for mutual TLS (both or neither)."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            allowed = "a certificate together with its key, or neither"
            raise InputError("tls certificate", self.certificate, allowed)

    @property
    def authorities(self) -> str | None:
        """The file that verifies the server; None: gRPC's own list, where the system has no file."""
        return self.ca if self.ca is not None else ssl.get_default_verify_paths().cafile

    def context(self) -> ssl.SSLContext:
        """A context of Python with the current content of the files. InputError if one is missing or invalid, which gRPC would
        only report for each connection."""
        context = client_context(self.authorities, "tls ca", self.certificate, self.key)
        context.set_alpn_protocols(["h2"])
        return context


class AccessFiles:
    """Credentials and token of a client, from the files of its settings; without files they stay as they are.

    InputError if a file is missing or invalid. If it is so later, what was read before stays, and the log says so.

    Args:
        tls: None: no encryption.
        token, token_file: The bearer token, or the file that has it; None: no token.
        address: That of the service, for the log.
        clock: Monotonic, in seconds.
    """

    def __init__(
        self,
        tls: TlsSettings | None,
        token: str | None,
        token_file: str | None,
        address: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tls, self._token_file, self._address, self._clock = tls, token_file, address, clock
        files = (None, None, None) if tls is None else (tls.authorities, tls.key, tls.certificate)
        self._tls_files = tuple(None if file is None else Path(file) for file in files)
        self._state: list[object] = []
        self._checked_s = clock()
        #: Certificates that verify the server, key and certificate of the client, as for `grpc.ssl_channel_credentials`.
        self._pem: tuple[bytes | None, ...] = ()
        self.token = token
        #: What TLS without gRPC uses; None without encryption.
        self.context: ssl.SSLContext | None = None
        self._read()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of new channels; None without encryption."""
        return None if self._tls is None else grpc.ssl_channel_credentials(*self._pem)

    def refresh(self) -> bool:
        """Reads the files again if they have changed, which is checked every `CHECK_S` seconds. Returns whether `credentials`
        are others than before."""
        now = self._clock()
        if now - self._checked_s < CHECK_S:
            return False
        self._checked_s = now
        state = self._files_state()
        if state == self._state:
            return False
        before = self._pem
        try:
            self._read()
        except (InputError, OSError) as error:
            self._state = state
            text = "predictor %s: rejected the new files, kept the old ones: %s"
            logger.error(text, self._address, error)
            return False
        logger.info("predictor %s: read certificates and token again", self._address)
        return self._pem != before

    def _read(self) -> None:
        state = self._files_state()
        context = None if self._tls is None else self._tls.context()
        pem = tuple(None if file is None else file.read_bytes() for file in self._tls_files)
        token = self.token if self._token_file is None else read_token(self._token_file)
        if state != self._files_state():
            allowed = "files that do not change while they are read"
            raise InputError("tls, token_file", self._address, allowed)
        self._state, self.context, self._pem, self.token = state, context, pem, token

    def _files_state(self) -> list[object]:
        return [file_state(file) for file in (*self._tls_files, self._token_file) if file is not None]


def read_token(path: str) -> str:
    """The only line of a file that is neither empty nor a comment (#); InputError, without its content, if there is no such
    line, or it is no token."""
    with suppress(UnicodeDecodeError):
        lines = map(str.strip, existing_file(path, "token_file").read_text(encoding="utf-8").splitlines())
        tokens = [line for line in lines if line and not line.startswith("#")]
        if len(tokens) == 1 and is_token(tokens[0]):
            return tokens[0]
    raise InputError("token_file", path, "a file with one token of printable ASCII characters")


def is_token(text: str) -> bool:
    """Whether a text can be sent as a bearer token."""
    return bool(text) and text.isascii() and text.isprintable()


def is_loopback(address: str) -> bool:
    """Whether an address, "host:port" or "unix:PATH", is that of this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def tls_problem(address: str, context: ssl.SSLContext) -> str:
    """Why a TLS connection to "host:port" fails, by a connection of its own; "" if it does not, or there is no connection at
    all. gRPC tells the reason for one of several addresses only, and not at all if a deadline is short. Blocks for up to
    `HANDSHAKE_S` seconds."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with (
            socket.create_connection((host, int(port)), HANDSHAKE_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            # In TLS 1.3 a server rejects the certificate of a client after the handshake, instead of sending its settings.
            if not connection.recv(1):
                return "the server ends the connection: it may demand another client certificate (predictor_cert)"
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of the server is invalid: {error.verify_message.rstrip('.')}"
    except ssl.SSLError as error:
        reason = str(error.reason or "no reason").replace("_", " ").lower()
        return f"there is no TLS connection: {reason}"
    except (OSError, ValueError):
        return ""
    return ""
