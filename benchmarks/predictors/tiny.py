"""Latency of one prediction on one core: `tiny` and `pretrained`, in turn in one process, with tokenization.

A round is one call of `pretrained` and 20 calls of `tiny`. The first of these starts with processor caches
full of other data, and has its own row. Prompts have the median length and the quartiles of CASTILLO.

    python -m benchmarks.predictors.tiny [--rounds 400]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from benchmarks.shared.command import Parser
from predictors.runtime import open_runtime
from predictors.tiny import TinyPredictor
from scheduler_core.report.page import markdown_table

TINY_CALLS = 20
CHARACTERS = {"lower quartile": 76, "median": 401, "upper quartile": 1067}
TEXT = (
    "Write a function that takes a list of intervals and merges those that overlap. Each interval has a start and an end "
    "(both integers, start <= end); the result is sorted by start. For example, [[1, 3], [2, 6], [8, 10]] becomes "
    "[[1, 6], [8, 10]].\n\nYour code should start with the following:\n\ndef merge(intervals: list[list[int]]) -> list:\n"
    '    """Merged intervals."""\n\nThen explain in two or three sentences how long it takes for n intervals, which cases '
    "need care, and how you would test it. Do not import anything, and keep the function below twenty lines. "
)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tiny, minilm = TinyPredictor(), open_runtime("pretrained", provider="cpu")
    calls: dict[str, Callable[[str], object]] = {
        "tiny": tiny.length,
        "pretrained": lambda prompt: minilm.predict([prompt]),
    }
    print(f"microseconds for one prompt, one core, {options.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    rows = []
    for name, size in CHARACTERS.items():
        prompt = (TEXT * 3)[:size]
        times: dict[str, list[float]] = {"pretrained": [], "tiny, first call": [], "tiny": []}
        for _ in range(options.rounds):
            for row, num_calls in zip(times, (1, 1, TINY_CALLS - 1), strict=True):
                call = calls[row.partition(",")[0]]
                for _ in range(num_calls):
                    start = time.perf_counter()
                    call(prompt)
                    times[row].append(1e6 * (time.perf_counter() - start))
        for predictor, values in times.items():
            figures = (min(values), *np.quantile(values, (0.5, 0.99)))
            rows.append((name, f"{size:,}", predictor, *(f"{value:,.0f}" for value in figures)))
    print(markdown_table(("prompt", "characters", "predictor", "minimum", "median", "P99"), rows))


if __name__ == "__main__":
    main()
