"""Cost of online calibration on one core: microseconds of a correction without and with the memory, of an update, of the
embedding of a prompt, and bytes of an entry, for several sizes of the memory.

    python -m benchmarks.correcting.memory_cost [--entries 500 2000 5000 20000]
"""

from __future__ import annotations

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import math
import time
from collections.abc import Callable

import numpy as np

from benchmarks.shared.command import Parser
from predictors.tiny import TinyPredictor
from scheduler_core.adapters.live_calibration import packed
from scheduler_core.prediction.correction import Correction, CorrectionConfig, RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.report.page import markdown_table

DIMENSION, CALLS, NU = 64, 1000, 3.5
#: As long as the median prompt of CASTILLO.
TEXT = "Merge the intervals of a list that overlap, sorted by their starts. "[:67] * 6


def percentiles(call: Callable[[int], object]) -> str:
    """P50 and P90 of the time of a call, in microseconds."""
    times = []
    for number in range(CALLS):
        start = time.perf_counter()
        call(number)
        times.append(1e6 * (time.perf_counter() - start))
    return " / ".join(f"{value:.0f}" for value in np.percentile(times, (50, 90)))


def row(entries: int) -> list[str]:
    """Figures of one size: a memory that is full, of requests of 50 applications."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((50, DIMENSION))
    vectors = centers[rng.integers(50, size=entries + CALLS)] + 0.3 * rng.standard_normal(
        (entries + CALLS, DIMENSION)
    )
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    contexts = [RequestContext(served_model="m", prompt_tokens=200, embedding=vector) for vector in vectors]
    prediction = LengthPrediction(5.0, 0.6, NU)
    tokens = np.exp(5.0 + vectors[:, 0] * 4 + 0.3 * rng.standard_normal(len(vectors))).astype(int) + 1
    outcomes = [
        Outcome(
            output_tokens=count,
            finished=True,
            prediction=prediction,
            prompt_tokens=200,
            request_id=f"{number:036}",
        )
        for number, count in enumerate(tokens.tolist())
    ]
    correction = Correction(CorrectionConfig(memory=entries))
    for context, outcome in zip(contexts[:entries], outcomes[:entries], strict=True):
        correction.observe(context, outcome)
    plain = RequestContext(served_model="m", prompt_tokens=200)
    without = percentiles(lambda _: correction.correct(plain, prediction))
    remembered = percentiles(lambda number: correction.correct(contexts[entries + number], prediction))
    start = time.perf_counter()
    content = packed(correction.state())
    save_ms = 1e3 * (time.perf_counter() - start)
    update = percentiles(
        lambda number: correction.observe(contexts[entries + number], outcomes[entries + number])
    )
    assert math.isfinite(correction.correct(contexts[-1], prediction).mu)
    return [f"{entries:,}", without, remembered, update, f"{len(content) / entries:.0f}", f"{save_ms:.0f}"]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--entries", type=int, nargs="+", default=[500, 2000, 5000, 20_000])
    options = parser.parse_args()
    tiny = TinyPredictor()
    print(f"one thread; load {os.getloadavg()[0]:.1f}; microseconds, P50 / P90 of {CALLS} calls\n")
    print(
        f"prediction of tiny with embedding, {len(TEXT)} characters: {percentiles(lambda _: tiny.embedding(TEXT))}\n"
    )
    header = (
        "entries",
        "correction without memory",
        "with memory",
        "update",
        "bytes of an entry in the file",
        "ms to write",
    )
    print(markdown_table(header, [row(entries) for entries in options.entries]))


if __name__ == "__main__":
    main()
