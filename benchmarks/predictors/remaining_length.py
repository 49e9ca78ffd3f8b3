"""Remaining tokens of an output in progress, predicted without another forward pass.

    python -m benchmarks.predictors.remaining_length PREDICTOR --data FILE [--at 0,50,100,200,400] [--max-groups N] [--json OUT]

PREDICTOR is any checkpoint or artifact with a length head. For every output in FILE with more than g tokens,
X - g is predicted from the distribution for the prompt:

- conditional: E[min(X, M) - g | X > g] under the predicted log-t, or its median (which minimizes the mean
  absolute error if the distribution is right); M = `max_tokens`, or 32,768 without a limit;
- static: E[min(X, M)] - g, or the predicted median less g, at least 0: one prediction at the start;
- bins: ten bins of remaining length over [0, P99 of all predictions], advanced token by token by TRAIL's
  (2024) smoothing: p <- T p, where T moves mass to the next lower bin at the rate 1 / width, and mass that
  leaves the last bin is removed because the output continues. TRAIL multiplies this by a probe of the served
  model's hidden states at every token. The data have no hidden states, so this is the smoothing without the
  probe, from the same distribution as the other two.

MAE in tokens over finished outputs (the remaining length of truncated ones is unknown), for all methods.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.samples import implied_max_tokens
from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from training.evaluating.predictors import InferenceOptions, PredictedRows, open_predictor
from training.evaluating.rows import EvaluationRows
from training.fitting.fits import FitOptions, read_fits_or_fit

FloatArray = NDArray[np.float64]
NUM_BINS = 10
NO_CAP = 32_768.0
METHODS = ("conditional mean", "conditional median", "static mean", "static median", "bins")


def bins_of(distribution: LogT, largest: float) -> FloatArray:
    """Probabilities [G, 10] of ten equal bins over [0, largest]; the last one includes all larger values."""
    edges = np.linspace(0.0, largest, NUM_BINS + 1)[1:-1]
    below = np.stack([distribution.cdf(edge) for edge in edges], axis=1)
    ends = np.concatenate([np.zeros((len(below), 1)), below, np.ones((len(below), 1))], axis=1)
    return np.asarray(np.diff(ends, axis=1))


def moved_on(probabilities: FloatArray, width: float, num_tokens: int) -> FloatArray:
    """The bins [G, 10] of the remaining length after `num_tokens` more tokens."""
    bins = probabilities.copy()
    for _ in range(num_tokens):
        leaving = bins / width
        bins -= leaving
        bins[:, :-1] += leaving[:, 1:]
        bins /= bins.sum(axis=1, keepdims=True)
    return bins


def study(rows: EvaluationRows, prediction: PredictedRows, points: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each g: number of outputs, and MAE of each method in tokens.

    Args:
        rows: Prompts with output lengths.
        prediction: Predictions of the rows, with a distribution.
        points: Values of g in tokens, ascending.

    Raises:
        InputError: The predictor has no distribution.
    """
    if prediction.mu is None or prediction.sigma is None:
        raise InputError("predictor", "no length head", "a predictor with a length head")
    distribution = LogT(prediction.mu, prediction.sigma, prediction.nu)
    limits = np.where(np.isfinite(rows.outputs.max_tokens), rows.outputs.max_tokens, NO_CAP)
    outputs, owner = rows.outputs, rows.outputs.owner
    mean = np.asarray(distribution.expected(limits))
    median = np.minimum(np.exp(prediction.mu), limits)
    largest = float(np.quantile(np.minimum(distribution.ppf(0.99), limits), 0.99))
    # A bin narrower than a token would lose more mass than it has.
    largest = max(largest, float(NUM_BINS))
    width = largest / NUM_BINS
    middles = (np.arange(NUM_BINS) + 0.5) * width
    bins, done = bins_of(distribution, largest), 0
    table = []
    for point in points:
        bins, done = moved_on(bins, width, point - done), point
        reached = limits > point
        left = np.where(reached, limits, point + 1.0)
        going_on = distribution.ppf(1.0 - 0.5 * distribution.sf(float(point))) - point
        guesses = {
            "conditional mean": np.asarray(distribution.expected(left, float(point))),
            "conditional median": np.minimum(going_on, left - point),
            "static mean": np.maximum(mean - point, 0.0),
            "static median": np.maximum(median - point, 0.0),
            "bins": bins @ middles,
        }
        chosen = (outputs.lengths > point) & outputs.finished
        true = outputs.lengths[chosen] - point
        errors = {name: np.abs(guess[owner[chosen]] - true) for name, guess in guesses.items()}
        table.append(
            {
                "generated_tokens": point,
                "num_answers": int(chosen.sum()),
                "mean_remaining": float(true.mean()) if len(true) else None,
                "mae": {name: float(error.mean()) if len(error) else None for name, error in errors.items()},
            }
        )
    return table


def read_rows(
    path: str, nu: float, max_tokens: int | None, max_groups: int | None, seed: int
) -> EvaluationRows:
    """Reads the rows of a file; a random sample of at most `max_groups`."""
    limit = max_tokens or implied_max_tokens(path)
    fits = read_fits_or_fit(path, FitOptions(nu=nu, max_tokens=limit), min_samples=1)
    if max_groups is not None and len(fits) > max_groups:
        chosen = np.random.default_rng(seed).choice(len(fits), max_groups, replace=False)
        fits = fits.take(np.sort(chosen))
    return EvaluationRows.of(fits)


def markdown(table: Sequence[dict[str, Any]]) -> str:
    """Markdown table."""
    lines = ["| tokens generated | outputs | mean remaining | " + " | ".join(METHODS) + " |"]
    lines.append("| ---: |" + " ---: |" * (len(METHODS) + 2))
    for row in table:
        numbers = [row["mean_remaining"], *(row["mae"][name] for name in METHODS)]
        cells = ["-" if value is None else f"{value:.1f}" for value in numbers]
        lines.append(f"| {row['generated_tokens']} | {row['num_answers']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("predictor", nargs="?")
    parser.add_argument("--data")
    parser.add_argument("--at", default="0,50,100,200,400")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--max-groups", type=int)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args(args)
    if options.predictor is None or options.data is None:
        print("nothing to measure: PREDICTOR and --data FILE are required (see --help)")
        return
    points = sorted({int(word) for word in options.at.split(",")})
    predictor = open_predictor(options.predictor, InferenceOptions(options.batch_size, progress=False))
    rows = read_rows(options.data, predictor.fit_nu, options.max_tokens, options.max_groups, options.seed)
    prediction = predictor.predict(rows.prompts, rows.served_models, rows.temperatures)
    table = study(rows, prediction, points)
    name = Path(options.data).name
    print(f"Mean absolute error of the remaining tokens; {len(rows)} rows of {name}\n")
    print(markdown(table))
    if options.json:
        Path(options.json).write_text(json.dumps(table, indent=2, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
