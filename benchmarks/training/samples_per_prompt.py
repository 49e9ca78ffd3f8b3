"""Number of outputs per prompt that training needs: likelihood of raw outputs or MSE of fitted parameters.

    python -m benchmarks.training.samples_per_prompt --train FILE [FILE] --calibration FILE --report FILE [--counts 1,3,10]
        [--markdown docs/samples.md]

FILEs are samples (samples/2) with several outputs per (prompt, served model). All variants train the same
heads, conditioned on the served model, on the same frozen encoder with the same number of steps. They differ
in the objective:

- nll-K: log-t likelihood of the first K outputs of each row, truncated ones as censored;
- mse-K: mean squared error of the z-scores of parameters fitted to these K outputs (TIE's objective; K >= 3).

Both are evaluated on all outputs of --report. mse does not model its own error in mu. For a fair comparison
of coverage and CRPS, both are also calibrated (`calibrate`) on the prompts of --calibration.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from benchmarks.shared.study import METRICS, Values, metrics_of, run_study, study_parser, write_selected
from training.correcting.calibrate import calibrate
from training.correcting.config import CalibrateConfig
from training.evaluating.config import EvaluateConfig
from training.evaluating.run import evaluate
from training.network.config import ConditioningOptions, StageConfig, TrainConfig
from training.network.tasks import LengthTask
from training.network.train import train

SECTION = "samples per prompt"


def main(args: Sequence[str] | None = None) -> int:
    """Trains, evaluates and prints a line for each variant; returns 2 if a file is missing or invalid."""
    parser = study_parser(__doc__)
    parser.add_argument("--counts", default="1,3,10", help="outputs per row")
    options = parser.parse_args(args)
    return run_study(options, SECTION, ("objective", *METRICS), _rows(options))


def _rows(options: argparse.Namespace) -> Iterator[tuple[list[str], Values]]:
    counts = [int(count) for count in options.counts.split(",")]
    sides = [("nll", count) for count in counts] + [("mse", count) for count in counts if count >= 3]
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        for objective, count in sides:
            name = f"{objective}-{count}"
            for stage, report in _measure(Path(folder) / name, objective, count, options).items():
                label = f"{name} calibrated" if stage == "calibrated" else name
                yield [label], metrics_of(report, METRICS)


def _measure(folder: Path, objective: Any, count: int, options: argparse.Namespace) -> dict[str, Any]:
    folder.mkdir()
    few = write_selected(options.train, folder, lambda table: pc.less(table["sample_index"], count))
    train(
        TrainConfig(
            data=few,
            validation=options.calibration,
            out=str(folder / "checkpoint"),
            encoder=options.encoder,
            max_length=options.max_length,
            prompt_length=True,
            # sigma of nll includes the predictor's error; the variance within a prompt needs several outputs.
            length=LengthTask(objective=objective, within=objective == "nll" and count >= 3),
            conditioning=ConditioningOptions(),
            stage1=StageConfig(epochs=0, learning_rate=1e-3),
            stage2=StageConfig(
                epochs=options.epochs, learning_rate=5e-4, warmup_fraction=0.05, batch_size=64, patience=4
            ),
            progress=False,
        )
    )
    calibrate(
        CalibrateConfig(
            predictor=str(folder / "checkpoint"),
            data=options.calibration,
            out=str(folder / "calibrated"),
            progress=False,
        )
    )
    reports = {}
    for stage in ("checkpoint", "calibrated"):
        report = evaluate(
            EvaluateConfig(
                predictor=str(folder / stage),
                data=options.report,
                json=str(folder / f"{stage}.json"),
                ceiling=False,
                progress=False,
            )
        )
        reports[stage] = report["model"]
    return reports


if __name__ == "__main__":
    sys.exit(main())
