"""Which headers pass: all but those of one connection (RFC 9110, section 7.6.1)."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

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


def end_to_end(headers: CIMultiDictProxy[str], *, without: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """The headers that pass, in their order; repeated ones stay repeated.

    Args:
        headers: What came in.
        without: Further names to leave out, in lower case.
    """
    dropped = HOP_BY_HOP | without
    if "Connection" in headers:
        named = (name.strip().lower() for value in headers.getall("Connection") for name in value.split(","))
        dropped |= frozenset(named)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
