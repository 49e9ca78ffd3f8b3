"""The command `simulate`: its sub-commands, one module each, and what they have in common."""

import sys
from typing import Any


def progress_bar(total: int | None, description: str, unit: str = "req") -> Any:
    """A progress bar on stderr, if that is a terminal; without `total` it counts."""
    from tqdm import tqdm

    return tqdm(total=total, desc=description, unit=unit, disable=None, file=sys.stderr)
