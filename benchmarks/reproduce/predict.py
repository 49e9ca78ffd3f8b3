"""Predictions of real prompts by trained predictors, for the studies of TIE.

    python -m benchmarks.reproduce.predict DATA [--work out/tie_predictions] --out predictions.parquet

DATA is the folder of public sets that `python -m examples.pretrained` takes. Columns "length" and "within" are from the shipped
predictor; all others from heads on the published all-MiniLM-L6-v2, frozen, which differ only in outputs, loss and
training outputs. That encoder was not trained on the training prompts: with features fitted to these, a free nu or sigma
would not generalize. A row of the result is a report prompt, which no predictor was trained on, with the outputs of a served
model and all predictions.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from benchmarks.reproduce.frozen_heads import (
    EPOCHS,
    HEADS,
    FittedLogT,
    LogT,
    Rows,
    TrainableHead,
    few_prompts,
    one_output,
    outputs_of,
    read_rows,
    train,
)
from benchmarks.reproduce.tie_requests import ABOUT, COLUMNS
from benchmarks.reproduce.tie_systems import SETTINGS
from benchmarks.shared.command import Parser
from benchmarks.shared.pooled import ENCODER
from examples.pretrained.prepare import prepare
from predictors.heads import Predicted
from predictors.manifest import MANIFEST
from predictors.pretrained import PRETRAINED, shipped_folder
from scheduler_core.errors import TailcastError
from scheduler_core.shell.files import atomic_file
from training.evaluating.batch_predictor import InferenceOptions, open_batch_predictor
from training.network.data import SampleLengths
from training.network.losses import list_mle

#: Lengths within a group of this many tokens are equal for LTR.
GROUP_TOKENS = 10.0


@dataclass(frozen=True)
class LogLength:
    """Point prediction, trained on the absolute error of ln length. Source: SSJF."""

    sizes: ClassVar[tuple[int, ...]] = (1,)

    def loss(self, outputs: Sequence[Tensor], samples: SampleLengths) -> Tensor:
        """Loss of each row, mean over its samples [R]."""
        return samples.mean((outputs[0] - torch.log(samples.tokens)).abs())


@dataclass(frozen=True)
class Rank:
    """Ranking score, larger = longer, trained by ListMLE over the rows of a batch. Source: LTR."""

    sizes: ClassVar[tuple[int, ...]] = (1,)

    def loss(self, outputs: Sequence[Tensor], samples: SampleLengths) -> Tensor:
        """Loss of the order by mean length [R]."""
        return list_mle(outputs[0][:, 0], samples.mean(samples.tokens), group_tokens=GROUP_TOKENS)


BASELINES: dict[str, TrainableHead] = {
    "regression_tokens": LogLength(),
    "rank": Rank(),
    "same outputs": FittedLogT(),
}
#: CASTILLO's outputs of a prompt and served model. With the paper's budget TIE learns from all of them, of one prompt in so
#: many, and the others from one output of every prompt (section 6.1; there 20).
NUM_OUTPUTS = 10
#: Heads with the paper's budget, by column.
ONE_OUTPUT: dict[str, TrainableHead] = {"equal budget tokens": LogLength(), "equal budget rank": Rank()}
FEW_PROMPTS: dict[str, TrainableHead] = {"equal budget": FittedLogT()}
#: Of 4, 8 and 16, the number with the lowest loss on the tuning prompts.
FEW_EPOCHS = 16


def head_columns(
    heads: Mapping[str, TrainableHead],
    rows: Rows,
    tune: Rows,
    report: Rows,
    names: Sequence[str],
    epochs: int = EPOCHS,
) -> tuple[dict[str, list[object]], dict[str, float]]:
    """A column per head and the log-likelihood of each family on `report`; `tune` is for early stopping.

    Args:
        heads: Heads by column.
        rows, tune, report: Rows with the same encoder; served models are numbered as in `names`.
        names: Served models.
        epochs: Passes over the rows.
    """
    columns: dict[str, list[object]] = {}
    likelihood: dict[str, float] = {}
    for name, head in heads.items():
        outputs = outputs_of(train(head, rows, tune, names, seed=0, epochs=epochs), report)
        if isinstance(head, LogT):
            mu, sigma, nu = head.parameters(outputs)
            columns[name] = torch.cat([mu, sigma, nu], dim=1).tolist()
            likelihood[name] = -float(head.loss(outputs, report.samples).mean())
        else:
            score = outputs[0][:, 0]
            columns[name] = (torch.exp(score) if isinstance(head, LogLength) else score).tolist()
    return columns, likelihood


def prediction_table(report: pd.DataFrame, shipped: Predicted) -> pa.Table:
    """Table with `COLUMNS` for all rows.

    Args:
        report: Rows of `prepare`, with prompt_tokens and the columns of `head_columns`.
        shipped: Predictions of the shipped predictor for these rows.
    """
    table = report.rename(columns={"model": "served_model"})
    for name, sigma in (("length", shipped.sigma), ("within", shipped.sigma_within)):
        parameters = pd.DataFrame({"mu": shipped.mu, "sigma": sigma, "nu": shipped.nu})
        table[name] = parameters.to_numpy().tolist()
    return pa.Table.from_pandas(table[list(COLUMNS)], preserve_index=False)


def _about(folder: Path, likelihood: Mapping[str, float], nu: Sequence[float]) -> str:
    """Text for the page: training of the predictors, and fit of the families."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    low, median, high = np.percentile(nu, (10, 50, 90))
    fits = ", ".join(f"{name} {value:.4f}" for name, value in likelihood.items())
    return (
        "TIE, SSJF and LTR are not trained end to end: they are heads on the frozen, published all-MiniLM-L6-v2, with the "
        "same layers and inputs (including served model and temperature), on CASTILLO's training prompts and 60 % of its "
        "validation prompts: TIE by the squared errors of the mean and the scale of ln length of a prompt, SSJF by the absolute error of ln length, LTR by ListMLE, all "
        "with early stopping on 15 % of the validation prompts. With the paper's equal budget, SSJF and LTR learn from one "
        f"output of each prompt and model, TIE from {NUM_OUTPUTS} outputs of every {NUM_OUTPUTS}th prompt. "
        f"The shipped predictor is {manifest['artifact_id']} (version {manifest['artifact_version']}), also trained on 21 "
        "smaller sources; the prompts here are 25 % of the validation prompts. The families of table 4 are heads with the "
        f"same training. Their mean log-likelihood of ln length here: {fits}; the median of the free nu is {median:.1f} "
        f"({low:.1f} to {high:.1f} from P10 to P90)"
    )


def main() -> int:
    """Entry point; returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path, help="folder of the public sets")
    parser.add_argument("--work", type=Path, default=Path("out/tie_predictions"), help="cached features")
    parser.add_argument("--out", type=Path, required=True, help="Parquet file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = shipped_folder(PRETRAINED)
    try:
        files = prepare(options.data, options.work / "data")
        training = {file: weight for file, weight in files.training.items() if "castillo" in file.stem}
        names = sorted({name for file in training for name in pd.read_parquet(file, columns=["model"]).model})
        parts = (training, {files.calibration: 1.0}, {files.report: 1.0})
        rows, tune, report = (read_rows(part, names, ENCODER, options.work) for part in parts)
        columns, likelihood = head_columns(HEADS, rows, tune, report, names)
        columns |= head_columns(BASELINES, rows, tune, report, names)[0]
        columns |= head_columns(ONE_OUTPUT, one_output(rows), tune, report, names)[0]
        few = few_prompts(rows, NUM_OUTPUTS, seed=0)
        columns |= head_columns(FEW_PROMPTS, few, tune, report, names, FEW_EPOCHS)[0]
        raw = pd.read_parquet(
            options.data / "castillo_validation.parquet", columns=["prompt", "model", "prompt_tokens"]
        )
        table = report.table.assign(**columns)
        table = table[table.model.isin({setting.served_model for setting in SETTINGS.values()})]
        table = table.merge(raw.drop_duplicates(["prompt", "model"]), on=["prompt", "model"])
        shipped = open_batch_predictor(folder, InferenceOptions(threads=1, progress=False)).predict(
            table.prompt.tolist(), table.model.tolist(), table.temperature.tolist()
        )
        nu = [float(row[2]) for row in columns["log-t, free nu"]]  # type: ignore[index]
        about = _about(folder, likelihood, nu)
        result = prediction_table(table, shipped).replace_schema_metadata({ABOUT: about.encode()})
    except TailcastError as error:
        print(error, file=sys.stderr)
        return 2
    with atomic_file(options.out) as file:
        pq.write_table(result, file)
    print(f"{len(table)} rows: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
