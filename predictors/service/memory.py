"""What loading an artifact leaves behind is given back, before the first request."""

from __future__ import annotations

import ctypes
import gc
import sys


def settle_memory() -> None:
    """Gives freed memory back to the system, and takes all objects that there are now for lasting ones.

    Reading a model leaves holes of about a third of its size in the heap of glibc, which keeps them. What lives by now
    lives to the end, so that the collector need not look through it again and again.
    """
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)
