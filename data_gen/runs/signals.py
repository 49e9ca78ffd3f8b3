"""SIGTERM ends a run as Ctrl-C does: at once, with everything safe and a word on how to go on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """While it lasts, SIGTERM raises `KeyboardInterrupt`; does nothing outside the main thread, where it cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
