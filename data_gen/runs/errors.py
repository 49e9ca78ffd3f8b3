"""Why a run stopped before its end; what it has is safe, and the same command goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from scheduler_core.errors import TailcastError


class RunStoppedError(TailcastError):
    """A run stopped early: the disk is full, the engine answers nothing any more, the prompts changed meanwhile."""


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns an `OSError` of writing below `folder` into a `RunStoppedError` that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunStoppedError(
            f"{folder}: cannot write ({reason}); finished answers are kept, and the same command goes on from there "
            "once that is mended"
        ) from error
