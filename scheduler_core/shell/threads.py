"""Thread settings of model libraries: number of threads and wait policy."""

import os

from scheduler_core.errors import InputError

#: torch and ONNX Runtime accept any 32-bit number and then fail, or start that many threads.
MAX_THREADS = 1024


def check_threads(field: str, value: int | None) -> None:
    """Raises InputError unless `value` is a number of threads, or None for the library's own choice."""
    if value is not None and not 1 <= value <= MAX_THREADS:
        raise InputError(field, value, f"integers from 1 to {MAX_THREADS}, or unset")


def wait_without_spinning() -> None:
    """Makes OpenMP threads sleep while waiting, unless OMP_WAIT_POLICY is set. Call it before torch is imported.

    Spinning threads block cores that other threads and processes need: with one other busy process on two cores, a
    training step took thirteen times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
