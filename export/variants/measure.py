"""Latency of variants on this machine."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from predictors.runtime import ArtifactRuntime

#: Every vocabulary has these; which tokens they are changes no time.
LOWEST_IDS = 16
#: Instruction sets that decide the speed of integer products, the best first.
INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512bw", "avx2", "asimddp", "asimd")

logger = logging.getLogger(__name__)


def measure_latency(
    runtimes: Mapping[str, ArtifactRuntime],
    shapes: Sequence[tuple[int, int]],
    *,
    repetitions: int,
    rng: np.random.Generator,
    clock: Any = time.process_time,
) -> dict[str, dict[str, float]]:
    """Minimum time of a call, runtimes interleaved.

    Args:
        runtimes: Name -> runtime; all of the same artifact.
        shapes: (batch, tokens), full batches without padding.
        repetitions: Calls of each runtime at each shape, after one for warm-up.
        rng: Draws tokens.
        clock: Seconds; CPU time of the process unless the work is done elsewhere.

    Returns:
        "batch x tokens" -> name -> milliseconds.
    """
    manifest = next(iter(runtimes.values())).artifact.manifest
    served = manifest.served_models[0] if manifest.served_models else None
    latency: dict[str, dict[str, float]] = {}
    for batch, tokens in shapes:
        logger.info("measuring %d x %d tokens", batch, tokens)
        prompts = [rng.integers(0, LOWEST_IDS, size=tokens) for _ in range(batch)]
        best = dict.fromkeys(runtimes, np.inf)
        for number in range(repetitions + 1):
            for name, runtime in runtimes.items():
                start = clock()
                runtime.run(prompts, [served] * batch)
                if number:
                    best[name] = min(best[name], 1000 * (clock() - start))
        latency[f"{batch}x{tokens}"] = {name: float(value) for name, value in best.items()}
    return latency


def machine() -> dict[str, str]:
    """Name of the processor and its best integer instructions, from /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features", "")).split()
    return {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "instructions": next((name for name in INSTRUCTIONS if name in flags), "instructions unknown"),
    }
