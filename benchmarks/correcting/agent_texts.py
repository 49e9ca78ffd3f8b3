"""Corrected output lengths of an agent's requests with texts: embeddings of the text, of the session, and of both joined.

    python -m benchmarks.correcting.agent_texts DATA [--seeds 4]

DATA is a table (Parquet) of the turns of conversations with tools, one row an output: prompt (the turns so far, where
"[assistant turn omitted]" stands for an earlier output, and "[tool result]" begins the result of a tool) and
n_tokens. The session of a prompt is the chain of the prompts that it continues. The sessions start at random times, their
requests interleave; each is predicted before its length is learned. The tiny predictor reads the texts, and all methods
correct the same predictions. Tokens of inputs are estimated by `TOKEN_CHARS`. The scores are means over seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq

from predictors.tiny import TinyPredictor
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import Embedding, LengthPrediction
from scheduler_core.prediction.score_window import ScoreWindow
from scheduler_core.prediction.session import TOKEN_CHARS, SessionStates, joined
from scheduler_core.report.page import markdown_table

OMITTED, TOOL_RESULT = "\n\n[assistant turn omitted]\n\n", "[tool result]"
#: Numbers of requests at which a window of the stream begins.
WINDOWS = (0, 200, 1000)
#: Seconds in which sessions start; a turn takes one second.
STARTS_S = 600.0
METHODS = ("predicted", "calibrated", "memory on sessions", "memory on texts", "memory on both")


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request of a session: its first prompt, number of earlier outputs, length, prediction, and the embeddings of the methods
    with a correction (None: without a memory)."""

    first_prompt: str
    turn: int
    output_tokens: int
    prediction: LengthPrediction
    embeddings: tuple[Embedding | None, ...]


def read_requests(file: str) -> list[TextRequest]:
    """One request for each prompt."""
    rows = pq.read_table(file, columns=["prompt", "n_tokens"]).to_pylist()
    lengths = {row["prompt"]: max(row["n_tokens"], 1) for row in rows}
    predictor = TinyPredictor()
    return [_request(prompt, lengths, predictor) for prompt in lengths]


def _request(prompt: str, lengths: dict[str, int], predictor: TinyPredictor) -> TextRequest:
    parts, sessions = prompt.split(OMITTED), SessionStates()
    earlier = [OMITTED.join(parts[:count]) for count in range(1, len(parts))]
    earlier = [each for each in earlier if each in lengths]
    for each in earlier:
        sessions.observe("", output_tokens=lengths[each])
    features = sessions.features(
        "",
        input_tokens=len(prompt) // TOKEN_CHARS,
        new_input_tokens=len(parts[-1]) // TOKEN_CHARS,
        is_tool_result=parts[-1].startswith(TOOL_RESULT),
    )
    text, session = predictor.embedding(prompt), features.embedding()
    assert text is not None, "the tiny predictor has an embedding"
    return TextRequest(
        first_prompt=earlier[0] if earlier else prompt,
        turn=len(earlier),
        output_tokens=lengths[prompt],
        prediction=predictor.length(prompt),
        embeddings=(None, session, text, joined(text, session)),
    )


def run(requests: Sequence[TextRequest], seed: int) -> list[list[tuple[float, float]]]:
    """(tau, CRPS) of each method and window."""
    rng, starts = np.random.default_rng(seed), dict[str, float]()
    arrivals = []
    for request in requests:
        start = starts.setdefault(request.first_prompt, STARTS_S * rng.random())
        arrivals.append(start + request.turn + 0.5 * rng.random())
    corrections = [Correction() for _ in METHODS[1:]]
    windows = [ScoreWindow(len(requests), len(METHODS)) for _ in WINDOWS]
    for number, index in enumerate(np.argsort(arrivals).tolist()):
        request = requests[index]
        outcome = Outcome(output_tokens=request.output_tokens, finished=True, prediction=request.prediction)
        contexts = [RequestContext(embedding=embedding) for embedding in request.embeddings]
        pairs = list(zip(corrections, contexts, strict=True))
        corrected = [correction.correct(context, request.prediction) for correction, context in pairs]
        window = max(index_of_window for index_of_window, start in enumerate(WINDOWS) if number >= start)
        windows[window].add([request.prediction, *corrected], outcome)
        for correction, context in pairs:
            correction.observe(context, outcome)
    versions = range(len(METHODS))
    scores = [[window.scores(version) for window in windows if len(window)] for version in versions]
    return [[(each["tau"] or 0.0, each["crps"]) for each in of_method] for of_method in scores]


def main(args: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args(args)
    if options.data is None:
        print("nothing to measure: a table of an agent's turns is required (see --help)")
        return 0
    requests = read_requests(options.data)
    values = np.mean([run(requests, seed) for seed in range(options.seeds)], axis=0)
    rows = [
        [name, *(f"{tau:.3f} / {crps:.3f}" for tau, crps in scores)]
        for name, scores in zip(METHODS, values.tolist(), strict=True)
    ]
    header = ["from request", *(f"{start:,}" for start in WINDOWS[: values.shape[1]])]
    num_sessions = len({request.first_prompt for request in requests})
    print(f"{len(requests):,} requests of {num_sessions} sessions; Kendall tau / CRPS of ln length\n")
    print(markdown_table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
