"""Time of a prediction of tailcast-tiny in the calling thread: the first one of a process, and warm ones by length of the prompt.

    python -m benchmarks.predictors.tiny [--artifact tiny]

Prompts are English sentences, also with an amount that is asked for ("100 words"). A warm time is the median over prompts of the shortest of
`REPEATS` calls, in turn for all ways: `length` (distribution only), `predict` (with the embedding for online calibration), and the
service's runtime, which tokenizes with the package tokenizers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.shared.command import Parser
from predictors.runtime import open_runtime
from predictors.tiny import TinyPredictor
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.report.page import markdown_table

CHARACTERS = (100, 400, 1_600)
NUM_PROMPTS, REPEATS = 20, 30
SENTENCES = (
    "We run a small online shop for garden tools and answer some forty messages a day.",
    "The team has three people, and one of them works from home on Mondays.",
    "Last year the city built a new bridge, which changed the way to our office.",
    "Please keep a friendly tone and mention that deliveries take two working days.",
    "Explain the main reasons in plain words, and say what is still unknown.",
)


def prompts(num_chars: int, *, amounts: bool) -> list[str]:
    """Prompts of this number of characters, all different, that ask for an amount or for none."""
    texts = []
    for number in range(NUM_PROMPTS):
        rng = np.random.default_rng(number)
        text = f"Write {100 + number} words." if amounts else f"We are team {number}."
        while len(text) < num_chars:
            text += " " + SENTENCES[int(rng.integers(len(SENTENCES)))]
        texts.append(text[:num_chars])
    return texts


def microseconds(ways: Sequence[Callable[[str], object]], texts: Sequence[str]) -> list[float]:
    """Median over the texts of the shortest call of each way."""
    best = np.full((len(texts), len(ways)), np.inf)
    for _ in range(REPEATS):
        for row, text in enumerate(texts):
            for column, way in enumerate(ways):
                start = time.perf_counter()
                way(text)
                best[row, column] = min(best[row, column], time.perf_counter() - start)
    return [1e6 * float(value) for value in np.median(best, axis=0)]


def main(args: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = Parser(__doc__)
    parser.add_argument("--artifact", default="tiny", help="tiny, or the folder of such an artifact")
    options = parser.parse_args(args)
    start = time.perf_counter()
    predictor = TinyPredictor(options.artifact)
    loaded = time.perf_counter()
    predictor.length(prompts(400, amounts=True)[0])
    first = time.perf_counter()
    runtime = open_runtime(options.artifact, provider="cpu")
    loop = asyncio.new_event_loop()

    def predict(text: str) -> object:
        return loop.run_until_complete(predictor.predict([PredictionRequest("r", text, 1_024)]))

    ways = (predictor.length, predict, lambda text: runtime.predict([text], [""]))
    rows = [
        [
            f"{size}{', with an amount' if amounts else ''}",
            *(f"{value:.0f}" for value in microseconds(ways, prompts(size, amounts=amounts))),
        ]
        for size in CHARACTERS
        for amounts in (False, True)
    ]
    loop.close()
    print(f"load {1e3 * (loaded - start):.0f} ms, first call {1e6 * (first - loaded):.0f} us; warm, us:\n")
    print(markdown_table(["characters", "length", "predict", "runtime"], rows))


if __name__ == "__main__":
    main()
