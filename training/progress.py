"""Progress bars of long loops, and setup of processes that run models."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar, cast

from scheduler_core.shell.threads import wait_without_spinning

T = TypeVar("T")


def tracked(items: Iterable[T], name: str, enabled: bool = True) -> Iterable[T]:
    """`items` with a progress bar on stderr; without a terminal, one line every ten seconds."""
    from tqdm import tqdm

    interval = 0.1 if sys.stderr.isatty() else 10.0
    return cast(Iterable[T], tqdm(items, desc=name, disable=not enabled, mininterval=interval))


def prepare_models() -> None:
    """Sets up the process before torch is imported: no spin-waiting threads, no progress bar while loading weights."""
    wait_without_spinning()
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
