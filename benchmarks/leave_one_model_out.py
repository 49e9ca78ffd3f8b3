"""Predictions for a served model that is not in the training data: mean over known models, and alternatives.

    python -m benchmarks.leave_one_model_out DATA [--work FOLDER] [--markdown docs/benchmarks.md]

DATA is the folder of public sets that `python -m examples.pretrained` takes; training, tuning and report
prompts are those of the shipped predictor. For each served model of the report prompts, a log-t head is
trained without its rows and then predicts its rows of the report prompts. The encoder is frozen and was not
trained on any of the prompts (as in `benchmarks.distribution_heads`). Rows of the table:

- mean over the known ones: mean of mu; sigma^2 is the mean of sigma^2 plus the variance of mu. This is what
  the shipped predictor does (`Conditioning.unknown_is_mean`).
- learned as unknown: the embedding of the training rows whose served model was hidden (one in five).
- trained on it: a head trained on all rows, with the name as input.
- another served model's lengths: tau of its mean ln lengths on the same prompts, mean over the others.

No prediction is calibrated. Each (prompt, served model) has the same weight. There is one training seed; the
95 % intervals are over served models. Trained heads are cached in the work folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtr

from benchmarks.distribution_heads import (
    GRID,
    LEVELS,
    Array,
    LogTMixture,
    Network,
    Rows,
    mean_over,
    outputs_of,
    read_rows,
    scores,
    train,
)
from benchmarks.pages import put_section
from benchmarks.pooled import ENCODER
from examples.pretrained.prepare import prepare
from scheduler_core.report.page import markdown_table
from scheduler_core.statistics import interval
from training.data import SampleLengths
from training.evaluating.scores import kendall_tau

log = logging.getLogger(__name__)
KIND, NU = LogTMixture(), 3.5
COLUMNS = ("tau", "crps_tokens", "crps_log", *(f"p{100 * level:g}" for level in LEVELS))
CEILING = "another served model's lengths"


def chosen(rows: Rows, keep: torch.Tensor) -> Rows:
    """A subset of the rows; the prompts are unchanged."""
    samples = SampleLengths(*(part[keep] for part in rows.samples))
    return replace(
        rows,
        prompt=rows.prompt[keep],
        model=rows.model[keep],
        temperature=rows.temperature[keep],
        samples=samples,
        weight=rows.weight[keep],
        table=rows.table[keep.numpy()],
    )


def predicted(network: Network, rows: Rows, number: int) -> tuple[Array, Array]:
    """mu and sigma [R] of the rows if their served model has this index."""
    outputs = outputs_of(network, replace(rows, model=torch.full_like(rows.model, number)))
    mu, sigma, *_ = KIND.parameters(outputs)
    return mu[:, 0].numpy(), sigma[:, 0].numpy()


def scored(mu: Array, sigma: Array, rows: Rows) -> dict[str, float]:
    """Means over rows."""
    cdf = stdtr(NU, (GRID - mu[:, None]) / sigma[:, None])
    values = scores(cdf, rows, np.arange(len(mu)))
    tau = kendall_tau(mu, values["mean_log"]) or 0.0
    return {"tau": tau} | {name: float(values[name].mean()) for name in COLUMNS[1:]}


def ceiling(report: Rows, number: int) -> dict[str, float]:
    """tau of other served models' mean lengths on the same prompts."""
    logs = mean_over(report.samples.present.numpy(), np.log(report.samples.tokens.numpy().astype(float)))
    table = pd.DataFrame({"prompt": report.prompt.numpy(), "model": report.model.numpy(), "log": logs})
    by_model = table.pivot_table("log", "prompt", "model")
    taus = []
    for other in by_model.columns.drop(number):
        both = by_model[[number, other]].dropna()
        taus.append(kendall_tau(both[number].to_numpy(), both[other].to_numpy()) or 0.0)
    return {"tau": float(np.mean(taus))}


def markdown(results: Sequence[dict[str, dict[str, float]]]) -> str:
    """Table with a row for each kind of prediction, mean over served models."""
    lines = []
    for way in results[0]:
        cells = []
        for name in COLUMNS:
            if name not in results[0][way]:
                cells.append("-")
                continue
            mean = interval([result[way][name] for result in results])
            half = mean.high - mean.mean
            if name.startswith("p"):
                cells.append(f"{100 * mean.mean:.1f} ± {100 * half:.1f}")
            else:
                digits = 1 if name == "crps_tokens" else 3
                cells.append(f"{mean.mean:.{digits}f} ± {half:.{digits}f}")
        lines.append((way, *cells))
    header = ("prediction", "Kendall tau", "CRPS, tokens", "CRPS of ln tokens", "P50, %", "P90, %", "P99, %")
    return markdown_table(header, lines)


def main(args: Sequence[str] | None = None) -> None:
    """Trains the heads that are missing in the work folder, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder of the public sets")
    parser.add_argument("--work", type=Path, default=Path("out/distribution_heads"), help="cached results")
    parser.add_argument("--markdown", help="page whose table is replaced")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    files = prepare(options.data, options.work / "data")
    served_models: set[str] = set()
    for file in files.training:
        served_models |= set(pd.read_parquet(file, columns=["model"]).model.dropna())
    names = sorted(served_models)
    rows = read_rows(files.training, names, ENCODER, options.work)
    tune, report = (
        read_rows({file: 1.0}, names, ENCODER, options.work) for file in (files.calibration, files.report)
    )

    def network(left_out: int) -> Network:
        file = options.work / f"without-{left_out}.pt"
        if not file.is_file():
            since = time.monotonic()
            others, tuning = (chosen(part, part.model != left_out) for part in (rows, tune))
            torch.save(train(KIND, others, tuning, names, 0).state_dict(), file)
            log.info("without %s: %.0f s", names[left_out - 1], time.monotonic() - since)
        result = Network(KIND, rows.features.shape[1], names, 0)
        result.load_state_dict(torch.load(file, weights_only=True))
        return result

    of_all = network(-1)
    trained = sorted(set(rows.model.tolist()) - {0})
    results = []
    for number in sorted(set(report.model.tolist()) - {0}):
        own, without = chosen(report, report.model == number), network(number)
        each = np.array([predicted(without, own, other) for other in trained if other != number])
        mu, sigma = each[:, 0].mean(0), np.sqrt((each[:, 1] ** 2).mean(0) + each[:, 0].var(0))
        results.append(
            {
                "mean over the known ones": scored(mu, sigma, own),
                "learned as unknown": scored(*predicted(without, own, 0), own),
                "trained on it": scored(*predicted(of_all, own, number), own),
                CEILING: ceiling(report, number),
            }
        )
        log.info("%s: %s", names[number - 1], json.dumps(results[-1]["mean over the known ones"]))
    text = f"{len(results)} served models, {len(trained)} known ones in training:\n\n{markdown(results)}"
    print(text)
    if options.markdown is not None:
        put_section(options.markdown, "left out model, heads", text)


if __name__ == "__main__":
    main()
