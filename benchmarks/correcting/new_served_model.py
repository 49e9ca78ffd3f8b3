"""Adding a served model to a trained predictor with outputs to a few prompts.

    python -m benchmarks.correcting.new_served_model --train FILE [FILE] --calibration FILE --report FILE [--leave-out NAME,NAME]
        [--prompts 0,50,200,500] [--markdown docs/new_models.md]

For each held-out served model, heads are trained on the outputs of all other models (frozen encoder), then:
- 0: its lengths are predicted as those of an unknown model;
- N: only its embedding is fitted, to its outputs for N prompts (`train --only_conditioning true`);
- all: heads are trained on the outputs of all models from the start, as an upper bound.

All are evaluated on that model's rows of the report; the last lines are means over the held-out models.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.shared.study import Values, metrics_of, run_study, study_parser, values_of, write_selected
from data_gen.splits import unit_hash
from scheduler_core.errors import InputError
from training.evaluating.config import EvaluateConfig
from training.evaluating.run import evaluate
from training.network.config import ConditioningOptions, StageConfig, TrainConfig
from training.network.train import train

OFF = StageConfig(epochs=0, learning_rate=1e-3)
SECTION = "new served models"
COLUMNS = ("R2 mu", "tau", "CRPS", "P50", "P90")
Chosen = Callable[[pa.Table], pa.Array]


def main(args: Sequence[str] | None = None) -> int:
    """Trains, adds and evaluates; prints a line for each model and number of prompts, and the means."""
    parser = study_parser(__doc__)
    parser.add_argument("--leave_out", help="comma-separated names; default: each served model in turn")
    parser.add_argument("--prompts", default="0,50,200,500", help="numbers of prompts of the new model")
    options = parser.parse_args(args)
    return run_study(options, SECTION, ("left out", "prompts", *COLUMNS), _rows(options))


def _rows(options: argparse.Namespace) -> Iterator[tuple[list[str], Values]]:
    names = sorted(values_of(options.train, "model"))
    chosen = options.leave_out.split(",") if options.leave_out else names
    for name in chosen:
        if name not in names:
            raise InputError("--leave_out", name, f"served models of the training files: {', '.join(names)}")
    by_prompts: dict[str, list[Values]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        checkpoint = _train(Path(folder) / "whole", lambda rows: pc.is_valid(rows["model"]), options)
        for number, name in enumerate(chosen):
            reports = _left_out(Path(folder) / str(number), name, options)
            reports["all"] = _evaluate(checkpoint, name, options)
            for prompts, report in reports.items():
                values = metrics_of(report, COLUMNS)
                by_prompts.setdefault(prompts, []).append(values)
                yield [name, prompts], values
    if len(chosen) > 1:
        for prompts, runs in by_prompts.items():
            known = [[value for value in column if value is not None] for column in zip(*runs, strict=True)]
            yield [f"mean of {len(chosen)}", prompts], [fmean(column) if column else None for column in known]


def _left_out(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    base = _train(folder / "others", lambda rows: pc.not_equal(rows["model"], name), options)
    order = sorted(_prompts_of(options.train, name), key=unit_hash)
    reports = {}
    for number in (int(number) for number in options.prompts.split(",")):
        checkpoint = base
        if number:
            few = pa.array(order[:number])
            checkpoint = _add_model(folder / str(number), _rows_of(name, few), base, options)
        reports[str(number)] = _evaluate(checkpoint, name, options)
    return reports


def _rows_of(name: str, prompts: pa.Array) -> Chosen:
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


def _train(folder: Path, chosen: Chosen, options: argparse.Namespace) -> Path:
    config = _config(folder, chosen, options)
    train(config)
    return Path(config.out)


def _add_model(folder: Path, chosen: Chosen, base: Path, options: argparse.Namespace) -> Path:
    """Checkpoint with the fitted embedding of the model; early stopping uses a fifth of its prompts."""
    config = replace(
        _config(folder, chosen, options),
        validation=None,
        fractions=(0.8, 0.2, 0.0),
        # The split of the files would put all of these prompts on one side.
        split_seed=1,
        init=str(base),
        only_conditioning=True,
        stage2=StageConfig(epochs=60, learning_rate=3e-2, batch_size=32, patience=10),
    )
    train(config)
    return Path(config.out)


def _evaluate(checkpoint: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
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


if __name__ == "__main__":
    sys.exit(main())
