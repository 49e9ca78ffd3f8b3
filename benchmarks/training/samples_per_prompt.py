"""Number of outputs per prompt that training needs: likelihood of raw outputs or MSE of fitted parameters.

    python -m benchmarks.training.samples_per_prompt --train FILE [FILE] --calibration FILE --report FILE [--counts 1 3 10]
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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section
from benchmarks.shared.pooled import ENCODER
from scheduler_core.report.page import markdown_table
from training.correcting.calibrate import calibrate
from training.correcting.config import CalibrateConfig
from training.evaluating.config import EvaluateConfig
from training.evaluating.run import evaluate
from training.network.config import ConditioningOptions, StageConfig, TrainConfig
from training.network.tasks import LengthTask
from training.network.train import train

SECTION = "samples per prompt"
#: Column -> path of the metric in the report of `evaluate`.
METRICS = {
    "R2 mu": ("mu", "r2"),
    "tau": ("kendall_tau", "median_vs_fitted_mu"),
    "R2 log1p sigma": ("sigma_log1p", "r2"),
    "CRPS": ("crps_tokens",),
    **{level.upper(): ("coverage", level, "estimate") for level in ("p50", "p90", "p99")},
}


def main(args: Sequence[str] | None = None) -> None:
    """Trains, evaluates and prints the table."""
    parser = Parser(__doc__)
    parser.add_argument("--train", nargs="+", required=True, help="samples to train on")
    parser.add_argument("--calibration", required=True, help="samples for early stopping and calibration")
    parser.add_argument("--report", required=True, help="samples to evaluate on")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 3, 10], help="outputs per row")
    parser.add_argument("--epochs", type=int, default=12, help="maximum number of epochs")
    parser.add_argument("--markdown", help="page whose table is replaced")
    options = parser.parse_args(args)
    sides = [("nll", count) for count in options.counts]
    sides += [("mse", count) for count in options.counts if count >= 3]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for objective, count in sides:
            name = f"{objective}-{count}"
            for label, report in _reports(Path(folder) / name, objective, count, options):
                lines.append([f"{name}{label}", *_cells(report)])
                print(*lines[-1], sep=" | ", flush=True)
    text = markdown_table(("objective", *METRICS), lines)
    print(f"\n{text}")
    if options.markdown:
        put_section(options.markdown, SECTION, text)


def _cells(report: Mapping[str, Any]) -> Iterator[str]:
    for path in METRICS.values():
        value: Any = report
        for key in path:
            value = value[key]
        yield "-" if value is None else f"{value:.3f}"


def _reports(
    folder: Path, objective: Any, count: int, options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reports of `evaluate` of the trained predictor, and of the calibrated one."""
    folder.mkdir()
    files = []
    for number, file in enumerate(options.train):
        rows = pq.read_table(file)
        files.append(str(folder / f"{number}.parquet"))
        pq.write_table(rows.filter(pc.less(rows["sample_index"], count)), files[-1])

    checkpoint, calibrated = (str(folder / name) for name in ("checkpoint", "calibrated"))
    train(
        TrainConfig(
            data=files,
            validation=options.calibration,
            out=checkpoint,
            encoder=ENCODER,
            max_length=192,
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
    calibrate(CalibrateConfig(predictor=checkpoint, data=options.calibration, out=calibrated, progress=False))
    for predictor, label in ((checkpoint, ""), (calibrated, " calibrated")):
        report = evaluate(
            EvaluateConfig(
                predictor=predictor,
                data=options.report,
                json=f"{predictor}.json",
                ceiling=False,
                progress=False,
            )
        )
        yield label, report["model"]


if __name__ == "__main__":
    main()
