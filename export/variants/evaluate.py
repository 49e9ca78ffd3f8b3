"""Quality of variants: metrics on other prompts than those of the calibration, and differences of their outputs.

`training` and `export` do not import each other: the command passes `training`'s evaluation in as a function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from export.variants.config import VariantsConfig
from predictors.runtime import ArtifactRuntime
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import existing_file

LEVELS = ("p50", "p90", "p99")
#: Outputs of the graph that are probabilities.
PROBABILITIES = ("urgency", "bucket")
#: Upper limit of the fraction of the prompts that calibrates.
CALIBRATION_FRACTION = 1 / 3
#: Rows of a batch, where outputs of single rows and of batches are compared.
BATCH = 8

Metrics = Mapping[str, float | None]
Outputs = dict[str, NDArray[np.float64]]


class Evaluate(Protocol):
    """Evaluates an artifact and its variants on the same rows."""

    def __call__(self, config: VariantsConfig, variants: Mapping[str, Path], data: Path) -> Mapping[str, Any]:
        """Content of an evaluation (docs/evaluation-format.md), variants under `compared`.

        Args:
            config: Names the artifact and the options.
            variants: Name -> artifact folder.
            data: Parquet file of output lengths.
        """


def select_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """r2, tau, p50, p90, p99 and crps_tokens of a predictor's metrics; None where unknown."""
    coverage = metrics["coverage"]
    return {
        "r2": metrics["mu"]["r2"],
        "tau": metrics["kendall_tau"]["median_vs_fitted_mu"],
        **{level: coverage.get(level, {}).get("estimate") for level in LEVELS},
        "crps_tokens": metrics["crps_tokens"],
    }


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt with its conditions."""

    prompt: str
    served_model: str | None
    temperature: float | None


@dataclass(frozen=True, slots=True)
class SplitPrompts:
    """Prompts of a data file in two parts.

    Attributes:
        calibration: Distinct prompts that calibrate.
        rows: Rows with other prompts, one per prompt.
        file: All rows of the data file with those other prompts, for the evaluation.
    """

    calibration: tuple[str, ...]
    rows: tuple[PromptRow, ...]
    file: Path


def split_prompts(path: str, target: Path, num_calibration: int, rng: np.random.Generator) -> SplitPrompts:
    """Splits a data file by prompt.

    Args:
        path: Parquet file with a column prompt.
        target: File to write for the evaluation.
        num_calibration: Maximum number of prompts that calibrate.
        rng: Draws them.

    Raises:
        InputError: The file has no prompts, or fewer than three.
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "train") from error
    try:
        table = pq.read_table(existing_file(path, "data"))
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError("data", path, f"a Parquet file ({error})") from error
    if "prompt" not in table.column_names or table["prompt"].null_count == len(table):
        raise InputError("data, columns", table.column_names, "also prompt, with text")
    prompts = sorted(set(table["prompt"].drop_null().to_pylist()))
    if len(prompts) < 3:
        raise InputError(
            "data", f"{len(prompts)} distinct prompts", "at least 3: some calibrate, others evaluate"
        )
    count = max(1, min(num_calibration, int(len(prompts) * CALIBRATION_FRACTION)))
    calibration = [prompts[number] for number in rng.choice(len(prompts), count, replace=False)]
    others = table.filter(pc.invert(pc.is_in(table["prompt"], pa.array(calibration))))
    pq.write_table(others, target)
    return SplitPrompts(tuple(calibration), tuple(_one_per_prompt(others)), target)


def _one_per_prompt(table: Any) -> Sequence[PromptRow]:
    columns = [
        table[name].to_pylist() if name in table.column_names else [None] * len(table)
        for name in ("prompt", "model", "temperature")
    ]
    rows: dict[str, list[PromptRow]] = {}
    for prompt, model, temperature in zip(*columns, strict=True):
        if prompt is not None:
            finite = temperature is not None and np.isfinite(temperature)
            row = PromptRow(prompt, model, float(temperature) if finite else None)
            rows.setdefault(prompt, []).append(row)
    # The served model changes from prompt to prompt, so that all of them take part.
    return [candidates[number % len(candidates)] for number, candidates in enumerate(rows.values())]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDifferences:
    """Differences by output of the graph, over some prompts.

    Attributes:
        to_artifact: Root mean squared difference from the artifact's outputs, relative to their standard deviation.
        probability: Of probabilities, mean absolute difference.
        batch_mates: Largest change of an output by other rows in its batch, relative to the standard deviation.
    """

    to_artifact: dict[str, float]
    probability: dict[str, float]
    batch_mates: dict[str, float]


class OutputComparison:
    """Compares runtimes on the same prompts.

    Args:
        reference: The artifact's runtime.
        rows: Prompts with conditions, at least two distinct ones.
    """

    def __init__(self, reference: ArtifactRuntime, rows: Sequence[PromptRow]) -> None:
        self._rows = rows
        self._tokenized = reference.tokenizer([row.prompt for row in rows])
        self._expected = self._outputs(reference, 1)
        self._scale = {name: _standard_deviation(values) for name, values in self._expected.items()}

    def compare(self, runtime: ArtifactRuntime) -> OutputDifferences:
        """Differences of another runtime."""
        single = self._outputs(runtime, 1)
        # In the file's order, so that short and long prompts share batches and most rows are padded.
        batched = self._outputs(runtime, BATCH)
        differences = {name: single[name] - values for name, values in self._expected.items()}
        return OutputDifferences(
            to_artifact={
                name: float(np.sqrt((values**2).mean()) / self._scale[name])
                for name, values in differences.items()
            },
            probability={
                name: float(np.abs(values).mean())
                for name, values in differences.items()
                if name in PROBABILITIES
            },
            batch_mates={
                name: float(np.abs(batched[name] - values).max() / self._scale[name])
                for name, values in single.items()
            },
        )

    def _outputs(self, runtime: ArtifactRuntime, batch_size: int) -> Outputs:
        parts = []
        for start in range(0, len(self._rows), batch_size):
            batch = slice(start, start + batch_size)
            result = runtime.run(
                [prompt.ids for prompt in self._tokenized[batch]],
                [row.served_model for row in self._rows[batch]],
                [row.temperature for row in self._rows[batch]],
            )
            parts.append(result.arrays())
        names = [tensor.name for tensor in runtime.artifact.manifest.outputs]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _standard_deviation(values: NDArray[np.float64]) -> float:
    """Over the prompts, largest of all columns; 1 for an output that does not vary."""
    largest = float(values.std(axis=0).max())
    return largest if largest > 0 else 1.0
