"""Times of several candidates, measured in turn in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path


def interleaved(
    sides: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of each call of each side: one call of every side, `repeats` times."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return seconds


def memory_mb() -> float:
    """Peak memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
