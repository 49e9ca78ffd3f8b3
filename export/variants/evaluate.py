"""Split into calibration and evaluation prompts, comparison and acceptance of variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from predictors.runtime import ArtifactRuntime
from scheduler_core.errors import InputError
from scheduler_core.shell.table_files import open_parquet, readable

#: Maximum losses of quality: drop of R2 of mu and of Kendall's tau between predicted and fitted medians, change of the
#: coverage of P50, P90 or P99, mean absolute change of urgency and bucket probabilities, and change of an output due to
#: other prompts in the batch, relative to the standard deviation of the output.
LIMITS = {
    "r2_drop": 0.01,
    "tau_drop": 0.01,
    "coverage_shift": 0.01,
    "probability_shift": 0.01,
    "batch_mates": 0.01,
}
#: Limit of `batch_mates` for variants in single precision.
EXACT = 1e-5
LEVELS = ("p50", "p90", "p99")

Metrics = Mapping[str, float | None]
#: Outputs of the graph that are probabilities.
PROBABILITIES = ("urgency", "bucket")
#: Maximum fraction of the prompts used for calibration.
CALIBRATION_FRACTION = 1 / 3
#: Batch size in the comparison of single rows with batches.
BATCH = 8

#: Prompt, served model, temperature.
PromptRow = tuple[str, str | None, float | None]


def split_prompts(
    path: str, target: Path, num_calibration: int, rng: np.random.Generator
) -> tuple[list[str], list[PromptRow]]:
    """Splits a data file into at most `num_calibration` distinct prompts for calibration, and one row of each
    other prompt. All rows of the others are written to `target`. InputError for fewer than three prompts."""
    with open_parquet(path, "data") as file, readable(path, "data", "Parquet"):
        table = file.read()
    if "prompt" not in table.column_names or table["prompt"].null_count == len(table):
        raise InputError("data, columns", table.column_names, "also prompt, with text")
    prompts = sorted(table["prompt"].drop_null().unique().to_pylist())
    if len(prompts) < 3:
        allowed = "at least 3, for calibration and evaluation"
        raise InputError("data", f"{len(prompts)} distinct prompts", allowed)
    count = max(1, min(num_calibration, int(len(prompts) * CALIBRATION_FRACTION)))
    calibration = [prompts[number] for number in rng.choice(len(prompts), count, replace=False)]
    others = table.filter(pc.invert(pc.is_in(table["prompt"], pa.array(calibration))))
    pq.write_table(others, target)
    rows: dict[str, list[PromptRow]] = {}
    for row in others.to_pylist():
        if (prompt := row["prompt"]) is not None:
            temperature = row.get("temperature")
            finite = temperature is not None and np.isfinite(temperature)
            condition = (prompt, row.get("model"), float(temperature) if finite else None)
            rows.setdefault(prompt, []).append(condition)
    # The served model changes from prompt to prompt, so that all served models are used.
    varied = [candidates[number % len(candidates)] for number, candidates in enumerate(rows.values())]
    return calibration, varied


def compare_outputs(
    reference: ArtifactRuntime, runtime: ArtifactRuntime, rows: Sequence[PromptRow]
) -> dict[str, dict[str, float]]:
    """Differences of the outputs of `runtime` from those of `reference`, by output of the graph.

    Returns:
        rms_to_artifact: Root mean squared difference, relative to the standard deviation of the reference
            outputs (maximum over columns). probability_shift: Mean absolute difference of probabilities.
            batch_mates: Largest relative change due to other rows in the batch.
    """
    expected, single = _outputs(reference, rows, 1), _outputs(runtime, rows, 1)
    # In the file's order, so that short and long prompts share batches and most rows are padded.
    batched = _outputs(runtime, rows, BATCH)
    names = ("rms_to_artifact", "probability_shift", "batch_mates")
    differences: dict[str, dict[str, float]] = {name: {} for name in names}
    for name, values in expected.items():
        difference, scale = single[name] - values, values.std(axis=0).max() or 1.0
        differences["rms_to_artifact"][name] = float(np.sqrt((difference**2).mean()) / scale)
        if name in PROBABILITIES:
            differences["probability_shift"][name] = float(np.abs(difference).mean())
        differences["batch_mates"][name] = float(np.abs(batched[name] - single[name]).max() / scale)
    return differences


def _outputs(
    runtime: ArtifactRuntime, rows: Sequence[PromptRow], batch_size: int
) -> dict[str, NDArray[np.float64]]:
    prompts, served_models, temperatures = zip(*rows, strict=True)
    tokens = [prompt.ids for prompt in runtime.tokenizer(prompts)]
    batches = [slice(start, start + batch_size) for start in range(0, len(rows), batch_size)]
    parts = [runtime.run(tokens[b], served_models[b], temperatures[b]).arrays() for b in batches]
    names = [tensor.name for tensor in runtime.artifact.manifest.outputs]
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def select_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """r2, tau, p50, p90, p99 and crps_tokens from a predictor's metrics; None if unknown."""
    coverage = metrics["coverage"]
    return {
        "r2": metrics["mu"]["r2"],
        "tau": metrics["kendall_tau"]["median_vs_fitted_mu"],
        **{level: coverage.get(level, {}).get("estimate") for level in LEVELS},
        "crps_tokens": metrics["crps_tokens"],
    }


def rejection_reasons(plain: Metrics, result: Mapping[str, Any]) -> Iterator[str]:
    """Descriptions of the `LIMITS` that a variant exceeds. `plain` are the metrics of the artifact; `result`
    has precision, metrics (on the same rows), probability_shift and batch_mates of the variant."""
    checks = [("r2", "R2 of mu", LIMITS["r2_drop"]), ("tau", "Kendall's tau", LIMITS["tau_drop"])]
    checks += [(level, f"coverage of {level.upper()}", LIMITS["coverage_shift"]) for level in LEVELS]
    for name, label, limit in checks:
        value, reference = result["metrics"].get(name), plain.get(name)
        if reference is None:
            continue
        if value is None:
            yield f"{label} is unknown"
            continue
        loss = abs(value - reference) if name in LEVELS else reference - value
        if not loss <= limit:
            yield f"{label} changes by {value - reference:+.4f}, allowed {limit:g}"
    for name, value in result["probability_shift"].items():
        if not value <= (limit := LIMITS["probability_shift"]):
            yield f"probabilities of {name} shift by {value:.4f} on average, allowed {limit:g}"
    limit = EXACT if result["precision"] == "fp32" else LIMITS["batch_mates"]
    for name, value in result["batch_mates"].items():
        if not value <= limit:
            yield f"batch mates change {name} by {value:.2g} of its standard deviation, allowed {limit:g}"
