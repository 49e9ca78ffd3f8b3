"""Progress bars of long work."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar, cast

T = TypeVar("T")


def progress_bar(total: int | None, unit: str, *, enabled: bool | None = True, **options: Any) -> Any:
    """A tqdm progress bar on stderr, without `total` or an `iterable` with a length a counter; one line every ten seconds where that is no terminal,
    or nothing there if `enabled` is None. `options` are those of tqdm."""
    from tqdm import tqdm

    disable = None if enabled is None else not enabled
    interval = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, unit=unit, disable=disable, mininterval=interval, file=sys.stderr, **options)


def tracked(items: Iterable[T], name: str, enabled: bool = True) -> Iterable[T]:
    """`items` with a progress bar."""
    return cast(Iterable[T], progress_bar(None, "it", enabled=enabled, desc=name, iterable=items))
