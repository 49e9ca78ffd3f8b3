"""Sub-commands of `simulate`, one module each, and their progress bar."""

import sys
from typing import Any


def progress_bar(total: int | None, description: str, unit: str = "req") -> Any:
    """A progress bar on stderr if that is a terminal; without `total` a counter."""
    from tqdm import tqdm

    return tqdm(total=total, desc=description, unit=unit, disable=None, file=sys.stderr)
