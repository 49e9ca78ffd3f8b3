"""A progress bar on stderr, if that is a terminal."""

from __future__ import annotations

import sys
from typing import Any

from scheduler_core.errors import MissingExtraError


def progress_bar(total: int | None, what: str, unit: str = "req") -> Any:
    """A bar of `total` units; None: nobody knows how many, and it counts.

    Raises:
        MissingExtraError: tqdm is not installed.
    """
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingExtraError("tqdm", "sim") from error
    return tqdm(total=total, desc=what, unit=unit, disable=None, file=sys.stderr)
