"""What trained predictors say of real prompts, for the studies of TIE.

    python -m benchmarks.reproduce.predict --samples report.parquet --length ARTIFACT --regression CHECKPOINT
        --rank CHECKPOINT --model meta-llama/Llama-3.1-8B-Instruct [--model ...] [--prompts 400] [--about TEXT]
        --out predictions.parquet

SAMPLES is a table of `gen-samples` or `import-lengths` with several answers to every prompt, which no predictor was
trained on. One row of the result is a prompt answered by a served model: its real lengths, and what each predictor says.
TEXT, how the predictors were trained, is kept in the result and printed with the findings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.reproduce.tie_requests import ABOUT
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import atomic_file
from training.evaluating.predictors import InferenceOptions, PredictedRows, open_predictor

#: Columns of the result.
COLUMNS = (
    "prompt_id",
    "served_model",
    "dataset",
    "prompt_tokens",
    "output_tokens",
    "mu",
    "sigma",
    "sigma_within",
    "nu",
    "regression_tokens",
    "rank",
)
_KEYS = ("prompt_id", "model")


def groups(samples: Path, models: Sequence[str], num_prompts: int, seed: int) -> list[dict[str, Any]]:
    """Prompts with all their answers by each of the served models, the same prompts of all.

    Raises:
        InputError: No prompt was answered by all models.
    """
    names = [*_KEYS, "dataset", "prompt", "prompt_tokens", "output_tokens", "temperature"]
    table = pq.read_table(samples, columns=names, filters=[("model", "in", list(models))])
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in table.to_pylist():
        group = found.setdefault((row["prompt_id"], row["model"]), {**row, "output_tokens": []})
        group["output_tokens"].append(max(1, row["output_tokens"]))
    prompts = sorted({prompt for prompt, _ in found if all((prompt, model) in found for model in models)})
    if not prompts:
        raise InputError("--model", ", ".join(models), f"served models whose answers are in {samples}")
    chosen = np.random.default_rng(seed).permutation(len(prompts))[:num_prompts]
    return [found[prompts[int(place)], model] for model in models for place in chosen]


def predictions(rows: Sequence[dict[str, Any]], folder: Path, options: InferenceOptions) -> PredictedRows:
    """What the artifact or checkpoint says of them."""
    opened = open_predictor(folder, options)
    return opened.predict(
        [row["prompt"] for row in rows],
        [row["model"] for row in rows],
        [row["temperature"] for row in rows],
    )


def table(
    rows: Sequence[dict[str, Any]], length: PredictedRows, regression: PredictedRows, rank: PredictedRows
) -> pa.Table:
    """`COLUMNS` of all rows; sigma_within is sigma where the length predictor does not tell its own error from the answers'.

    Raises:
        InputError: A predictor lacks the head that it was given for.
    """
    if length.mu is None or length.sigma is None:
        raise InputError("--length", "no distribution", "an artifact or checkpoint with the length head")
    if regression.regression_tokens is None:
        raise InputError("--regression", "no regression", "one with the regression head, as SSJF's")
    if rank.rank is None:
        raise InputError("--rank", "no rank", "one with the rank head, as LTR's")
    values: dict[str, Any] = {
        "prompt_id": [row["prompt_id"] for row in rows],
        "served_model": [row["model"] for row in rows],
        "dataset": [row["dataset"] for row in rows],
        "prompt_tokens": [row["prompt_tokens"] for row in rows],
        "output_tokens": [row["output_tokens"] for row in rows],
        "mu": length.mu,
        "sigma": length.sigma,
        "sigma_within": length.sigma if length.sigma_within is None else length.sigma_within,
        "nu": np.broadcast_to(np.asarray(length.nu, float), len(rows)),
        "regression_tokens": regression.regression_tokens,
        "rank": rank.rank,
    }
    return pa.table({name: values[name] for name in COLUMNS})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce.predict", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--samples", type=Path, required=True, help="table with several answers per prompt")
    parser.add_argument("--length", type=Path, required=True, help="predicts the distribution, for TIE")
    parser.add_argument("--regression", type=Path, required=True, help="predicts one length, for SSJF")
    parser.add_argument("--rank", type=Path, required=True, help="predicts a rank, for LTR")
    parser.add_argument("--model", action="append", required=True, help="served model; may be repeated")
    parser.add_argument("--prompts", type=int, default=400, help="prompts of each served model")
    parser.add_argument("--seed", type=int, default=0, help="which prompts")
    parser.add_argument("--about", default="", help="how the predictors were trained, for the page")
    parser.add_argument("--out", type=Path, required=True, help="Parquet file to write")
    return parser


def main() -> int:
    """Entry point; returns the exit code."""
    given = _parser().parse_args()
    options = InferenceOptions(threads=1, progress=False)
    try:
        rows = groups(given.samples, given.model, given.prompts, given.seed)
        parts = [
            predictions(rows, folder, options) for folder in (given.length, given.regression, given.rank)
        ]
        result = table(rows, *parts).replace_schema_metadata({ABOUT: given.about.encode()})
    except TailcastError as error:
        print(error, file=sys.stderr)
        return 2
    with atomic_file(given.out) as file:
        pq.write_table(result, file)
    print(f"{len(rows)} rows: {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
