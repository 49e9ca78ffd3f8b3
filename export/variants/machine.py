"""What machine a measurement was made on."""

from __future__ import annotations

import platform
from pathlib import Path

#: What decides how fast integer products are, the best first.
INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512bw", "avx2", "asimddp", "asimd")


def processor() -> str:
    """Name of the processor, as well as the system tells it."""
    return _of_cpuinfo("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """The best integer instructions that the processor has and the system tells of."""
    flags = set((_of_cpuinfo("flags") or _of_cpuinfo("Features")).split())
    return next((name for name in INSTRUCTIONS if name in flags), "instructions unknown")


def _of_cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and name.strip() == field:
            return value.strip()
    return ""
