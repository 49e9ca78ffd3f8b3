"""Python's garbage collector while ten thousand requests are in flight."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 500
"""Requests in flight from which it pays."""
_THRESHOLDS = (10_000, 1_000, 1_000_000)
_LEAST_WAIT_S = 30.0
_SHARE = 0.02
"""Part of the time that full collections may take."""


@contextmanager
def rare_full_collections(num_in_flight: int) -> Iterator[None]:
    """Makes full collections rare in this process while many requests are in flight; settings come back afterwards.

    Every request in flight is some 70 objects. They outlive two young collections, so that Python searches all of
    them again and again: half of the CPU time at 10,000 requests, and hardly anything is found. Young collections
    go on, in larger steps; `collect_now_and_then` does the full ones.
    """
    if num_in_flight < MANY or not gc.isenabled():
        yield
        return
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def collect_now_and_then() -> None:
    """Full collections at a small part of the time, so that cycles cannot pile up; ends when it is cancelled."""
    wait_s = _LEAST_WAIT_S
    while True:
        await asyncio.sleep(wait_s)
        if gc.get_threshold() == _THRESHOLDS:
            began = time.perf_counter()
            gc.collect()
            wait_s = max(_LEAST_WAIT_S, (time.perf_counter() - began) / _SHARE)
