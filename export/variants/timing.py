"""Time of model calls, variants in turn, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predictors.runtime import ArtifactRuntime

#: Every vocabulary has these; which tokens they are changes no time.
LOWEST_IDS = 16

logger = logging.getLogger(__name__)


def time_runtimes(
    runtimes: Mapping[str, ArtifactRuntime],
    shapes: Sequence[tuple[int, int]],
    *,
    repetitions: int,
    rng: np.random.Generator,
    clock: Any = time.process_time,
) -> dict[str, dict[str, float]]:
    """Smallest time of a call.

    Args:
        runtimes: Name -> runtime; all of the same artifact.
        shapes: (batch, tokens), full batches without padding.
        repetitions: Calls of each runtime at each shape, after one that does not count.
        rng: Draws tokens.
        clock: Seconds; CPU time of the process unless the work is done elsewhere.

    Returns:
        "batch x tokens" -> name -> milliseconds.
    """
    manifest = next(iter(runtimes.values())).artifact.manifest
    served = manifest.served_models[0] if manifest.served_models else None
    found: dict[str, dict[str, float]] = {}
    for batch, tokens in shapes:
        logger.info("timing %d x %d tokens", batch, tokens)
        prompts = [rng.integers(0, LOWEST_IDS, size=tokens) for _ in range(batch)]
        best = dict.fromkeys(runtimes, np.inf)
        for number in range(repetitions + 1):
            for name, runtime in runtimes.items():
                start = clock()
                runtime.run(prompts, [served] * batch)
                if number:
                    best[name] = min(best[name], 1000 * (clock() - start))
        found[f"{batch}x{tokens}"] = {name: float(value) for name, value in best.items()}
    return found
