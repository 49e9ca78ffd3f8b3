"""Headers of requests: what is refused, and which pass: all but those of one connection (RFC 9110, section 7.6.1)."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

from scheduler_core.errors import InputError

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


def end_to_end(
    headers: CIMultiDictProxy[str], *, without: frozenset[str] = frozenset(), prefixes: tuple[str, ...] = ()
) -> CIMultiDict[str]:
    """The headers that pass, in their order; repeated ones stay repeated.

    Args:
        headers: What came in.
        without: Further names to leave out, in lower case.
        prefixes: Beginnings of further names to leave out, in lower case; `_` counts as `-`, as some servers take it.
    """
    dropped = HOP_BY_HOP | without
    if "Connection" in headers:
        named = (name.strip().lower() for value in headers.getall("Connection") for name in value.split(","))
        dropped |= frozenset(named)
    passed = ((name, value) for name, value in headers.items() if name.lower() not in dropped)
    if prefixes:
        passed = (pair for pair in passed if not pair[0].lower().replace("_", "-").startswith(prefixes))
    return CIMultiDict((name, value if value.isascii() else _as_utf8(value)) for name, value in passed)


def _as_utf8(value: str) -> str:
    """A value in other bytes than UTF-8, which aiohttp leaves out, as Latin-1; in an answer, for requests are checked."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogateescape").decode("latin-1")
    return value


def check_headers(headers: CIMultiDictProxy[str], single: tuple[str, ...]) -> None:
    """Refuses what could not be passed on as it came, or be read in two ways.

    Args:
        headers: Of a request.
        single: Names that may occur once.

    Raises:
        InputError: A value is not UTF-8, or one of `single` is repeated.
    """
    for name, value in headers.items():
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise InputError(name, "other bytes", "UTF-8") from None
    for name in single:
        values = headers.getall(name, ())
        if len(values) > 1:
            raise InputError(name, f"{len(values)} times", "once")


def check_unencoded(headers: CIMultiDictProxy[str]) -> None:
    """Refuses a compressed body.

    Raises:
        InputError: Content-Encoding has more than `identity`.
    """
    for value in headers.getall("Content-Encoding", ()):
        if any(name.strip().lower() not in ("", "identity") for name in value.split(",")):
            raise InputError("Content-Encoding", value, "identity")
