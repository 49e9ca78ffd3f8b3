"""Progress of long loops."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar, cast

T = TypeVar("T")


def tracked(items: Iterable[T], name: str, enabled: bool = True) -> Iterable[T]:
    """`items` with a bar on stderr: redrawn on a terminal, a line every ten seconds elsewhere."""
    from tqdm import tqdm

    interval = 0.1 if sys.stderr.isatty() else 10.0
    return cast(Iterable[T], tqdm(items, desc=name, disable=not enabled, mininterval=interval))
