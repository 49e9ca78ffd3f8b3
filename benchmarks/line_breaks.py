"""Line breaks as tokens of an encoder whose tokenizer drops them: the shipped recipe with and without them.

    python -m benchmarks.line_breaks --data ../shared/data

Both trainings use the same prompts of CASTILLO, a fraction of those of the shipped predictor, without a teacher. Scores are
of the report prompts. Takes about 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import pandas as pd

from examples.pretrained.__main__ import RECIPES
from examples.pretrained.prepare import prepare
from scheduler_core.errors import TailcastError
from training.cli_train import main as train
from training.evaluating.cli import EvaluateConfig
from training.evaluating.run import evaluate


def scores(line_breaks: bool, table: Path, calibration: Path, report: Path) -> list[float]:
    """R2 of mu, Kendall's tau, CRPS in tokens and nll of the trained predictor."""
    name = str(line_breaks).lower()
    checkpoint = table.parent / f"checkpoint-{name}"
    options = [
        "--config",
        RECIPES / "minilm.yaml",
        "--line_breaks",
        name,
        "--data",
        table,
        "--progress",
        "false",
    ]
    if train([*map(str, options), "--validation", str(calibration), "--out", str(checkpoint)]):
        raise TailcastError("training failed")
    result = table.parent / f"evaluation-{name}.json"
    config = EvaluateConfig(
        predictor=str(checkpoint), data=str(report), json=str(result), ceiling=False, progress=False
    )
    model = evaluate(config)["model"]
    tau = model["kendall_tau"]["median_vs_fitted_mu"]
    return [model["mu"]["r2"], tau, model["crps_tokens"], model["nll"]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of public length sets")
    parser.add_argument("--prompts", type=int, default=1300, help="prompts of castillo_train in addition")
    options = parser.parse_args()
    lines = ["| line breaks | R2 of mu | tau | CRPS, tokens | nll |", "| --- | ---: | ---: | ---: | ---: |"]
    with tempfile.TemporaryDirectory() as folder:
        files = prepare(options.data, Path(folder) / "data")
        tune, train_part = (pd.read_parquet(file) for file in list(files.training)[:2])
        chosen = sorted(train_part.prompt_id.unique())[: options.prompts]
        table = Path(folder) / "train.parquet"
        pd.concat([tune, train_part[train_part.prompt_id.isin(chosen)]]).to_parquet(table)
        for line_breaks in (False, True):
            r2, tau, crps, nll = scores(line_breaks, table, files.calibration, files.report)
            name = "tokens" if line_breaks else "dropped"
            lines.append(f"| {name} | {r2:.3f} | {tau:.3f} | {crps:.1f} | {nll:.3f} |")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
