"""Prompts that calibrate and those that evaluate, and differences of outputs between variants."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from predictors.runtime import ArtifactRuntime
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file

#: Outputs of the graph that are probabilities.
PROBABILITIES = ("urgency", "bucket")
#: Upper limit of the fraction of the prompts that calibrates.
CALIBRATION_FRACTION = 1 / 3
#: Rows of a batch, where outputs of single rows and of batches are compared.
BATCH = 8

#: Prompt, served model, temperature.
PromptRow = tuple[str, str | None, float | None]


def split_prompts(
    path: str, target: Path, num_calibration: int, rng: np.random.Generator
) -> tuple[list[str], list[PromptRow]]:
    """Splits a data file by prompt.

    Args:
        path: Parquet file with a column prompt.
        target: File to write: all rows with the other prompts, for the evaluation.
        num_calibration: Maximum number of prompts that calibrate.
        rng: Draws them.

    Returns:
        Distinct prompts that calibrate; rows with other prompts, one per prompt.

    Raises:
        InputError: The file has no prompts, or fewer than three.
    """
    try:
        table = pq.read_table(existing_file(path, "data"))
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError("data", path, f"a Parquet file ({error})") from error
    if "prompt" not in table.column_names or table["prompt"].null_count == len(table):
        raise InputError("data, columns", table.column_names, "also prompt, with text")
    prompts = sorted(table["prompt"].drop_null().unique().to_pylist())
    if len(prompts) < 3:
        allowed = "at least 3: some calibrate, others evaluate"
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
    # The served model changes from prompt to prompt, so that all of them take part.
    varied = [candidates[number % len(candidates)] for number, candidates in enumerate(rows.values())]
    return calibration, varied


def compare_outputs(
    reference: ArtifactRuntime, runtime: ArtifactRuntime, rows: Sequence[PromptRow]
) -> dict[str, dict[str, float]]:
    """Differences of the outputs of `runtime` from those of `reference`, by output of the graph.

    Args:
        reference: The artifact's runtime.
        runtime: Of a variant of it.
        rows: Prompts with conditions, at least two distinct ones.

    Returns:
        rms_to_artifact: Root mean squared difference from the artifact's outputs, relative to their standard deviation
            (largest of all columns). probability_shift: Of probabilities, mean absolute difference. batch_mates: Largest
            change of an output by other rows in its batch, relative to the standard deviation.
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
