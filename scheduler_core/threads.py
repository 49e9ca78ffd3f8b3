"""Threads of model libraries: how many, and how they wait."""

import os

from scheduler_core.errors import InputError

#: torch and ONNX Runtime take any 32-bit number and then fail, or start as many.
MAX_THREADS = 1024


def check_threads(field: str, value: int | None) -> None:
    """Raises InputError unless `value` is a number of threads, or None for the library's own choice."""
    if value is not None and not 1 <= value <= MAX_THREADS:
        raise InputError(field, value, f"integers from 1 to {MAX_THREADS}, or unset")


def wait_without_spinning() -> None:
    """Lets OpenMP threads sleep while they wait, unless the user has set OMP_WAIT_POLICY; before torch is imported.

    Threads that spin take the cores from other processes, and from those that they wait for: with one other busy
    process on two cores, a training step took thirteen times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
