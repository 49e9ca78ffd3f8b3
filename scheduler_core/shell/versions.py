"""Versions of the software that a result depends on."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python, tailcast and the named installed packages."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in ("tailcast", *packages)
    }
