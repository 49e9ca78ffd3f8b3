"""TLS of HTTP ports, and of connections to engines."""

from __future__ import annotations

import ssl
from typing import Any, NoReturn, Protocol, Self

from scheduler_core.errors import InputError
from scheduler_core.shell.files import existing_file


class TlsOptions(Protocol):
    """Options of a server with TLS."""

    @property
    def tls_cert(self) -> str | None: ...

    @property
    def tls_key(self) -> str | None: ...

    @property
    def tls_client_ca(self) -> str | None: ...


def check_tls(config: TlsOptions) -> None:
    """Raises InputError for options that need others."""
    if (config.tls_cert is None) != (config.tls_key is None):
        raise InputError("tls_cert, tls_key", config.tls_cert or config.tls_key, "both or none of them")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise InputError("tls_client_ca", config.tls_client_ca, "a file together with tls_cert and tls_key")


def server_context(config: TlsOptions, *, authenticates: bool = True) -> ssl.SSLContext | None:
    """TLS context of an HTTP port with the current content of the files, None without TLS; InputError for a missing or
    invalid file. `authenticates`: clients need a certificate, if `tls_client_ca` is set."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _trust(
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), config.tls_cert, "tls_cert"
    )  # so that its errors are its own
    _load_pair(context, config.tls_cert, config.tls_key, "tls_cert", "tls_key")
    if config.tls_client_ca is not None and authenticates:
        _trust(context, config.tls_client_ca, "tls_client_ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class ReplaceableContext(ssl.SSLContext):
    """TLS context of a port that uses the latest `current` for each new connection. Open ones stay; sessions of an old
    context, and the clients that it trusts, end with it, as they would not if its files were loaded again into the same
    context."""

    current: ssl.SSLContext

    @classmethod
    def of(cls, context: ssl.SSLContext) -> Self:
        """A context that uses `context` at first."""
        replaceable = cls(ssl.PROTOCOL_TLS_SERVER)
        replaceable.current = context
        return replaceable

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*arguments, **options)


def client_context(
    authority: str | None, field: str, certificate: str | None = None, key: str | None = None
) -> ssl.SSLContext:
    """TLS context of connections to servers with a certificate of `authority`, a PEM file and the value of option `field`
    (None: of a CA of the system), that presents `certificate` with its `key`, if it is asked for; InputError if a file is
    missing or invalid."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authority is None:
        context.load_default_certs()
    else:
        _trust(context, authority, field)
    if certificate is not None and key is not None:
        existing_file(certificate, "tls certificate")
        _load_pair(context, certificate, key, "tls certificate", "tls key")
    return context


def _load_pair(
    context: ssl.SSLContext, certificate: str, key: str, certificate_field: str, key_field: str
) -> None:
    existing_file(key, key_field)

    def no_password() -> NoReturn:  # OpenSSL would ask for it on the terminal
        raise InputError(key_field, key, "a private key without a passphrase")

    try:
        context.load_cert_chain(certificate, key, no_password)
    except (ssl.SSLError, OSError) as error:
        allowed = f"the PEM private key of {certificate_field} ({error})"
        raise InputError(key_field, key, allowed) from error


def _trust(context: ssl.SSLContext, authority: str, field: str) -> None:
    existing_file(authority, field)
    try:
        context.load_verify_locations(authority)
    except (ssl.SSLError, OSError) as error:
        raise InputError(field, authority, f"a PEM certificate ({error})") from error
