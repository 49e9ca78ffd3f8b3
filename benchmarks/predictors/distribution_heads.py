"""Comparison of output-length distributions: log-t, mixtures of log-t, and quantiles.

    python -m benchmarks.predictors.distribution_heads DATA [--encoder ENCODER] [--seeds 3] [--work FOLDER]

DATA is the folder of public sets that `python -m examples.pretrained` takes. The training, tuning and report
prompts and the held-out sources are those of the shipped predictor. All heads use the same frozen encoder, towers,
conditions, steps and learning rates; they differ in outputs and loss. The epoch with the lowest loss on the tuning
prompts is used. There, too, each head gets a shift and a scale about its median (lowest CRPS of ln tokens), as in
`calibrate`. The encoder must not have been trained on the training prompts: its features would fit them better
than new prompts.
Scores use min(length, 15,000 tokens), weight each (prompt, served model) equally, and are means over seeds.
Intervals are paired bootstraps over prompts against the first head. For held-out sources the served model is
unknown.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.predictors.frozen_heads import (
    HEADS,
    Kind,
    Network,
    Rows,
    outputs_of,
    read_rows,
    served_models,
    train,
)
from benchmarks.predictors.grid_scores import GRID, LEVELS, LIMIT, Array, crps, mean_over, scores, shifted
from benchmarks.shared.command import Parser
from benchmarks.shared.pooled import ENCODER
from examples.pretrained.prepare import prepare
from scheduler_core.report.page import markdown_table
from training.evaluating.scores import kendall_tau

log = logging.getLogger(__name__)


def measure(
    kind: Kind, network: Network, tune: Rows, report: Rows, others: Mapping[str, Rows]
) -> dict[str, Array]:
    """Scores of each row of each set by "SET/SCORE"."""
    # One served model in four per prompt is enough to fit two parameters.
    at = torch.arange(0, len(tune.prompt), 4)
    cdf, every = kind.cdf(outputs_of(network, tune, at)), np.arange(len(at))
    present = tune.samples.present[at].numpy()
    served = np.minimum(tune.samples.tokens[at].numpy().astype(float), LIMIT)

    def score(x: Array) -> float:
        part = shifted(cdf, x[0], math.exp(x[1]))
        return float(mean_over(present, crps(part, served, GRID, every)).mean())

    simplex = [[0.0, 0.0], [0.2, 0.0], [0.0, 0.2]]
    options = {"xatol": 0.01, "fatol": 1e-5, "initial_simplex": simplex}
    solution = minimize(score, np.zeros(2), method="Nelder-Mead", options=options).x
    shift, scale = float(solution[0]), math.exp(solution[1])
    result: dict[str, Array] = {}
    raw, every = kind.cdf(outputs_of(network, report)), np.arange(len(report.prompt))
    sets = {"report": (shifted(raw, shift, scale), report, every)}
    for name, rows in others.items():
        _, first, of = np.unique(rows.prompt.numpy(), return_index=True, return_inverse=True)
        unknown = kind.cdf(outputs_of(network, rows, torch.from_numpy(first), hidden=True))
        sets[name] = (shifted(unknown, shift, scale), rows, of)
    for name, (cdf, rows, of) in sets.items():
        result |= {f"{name}/{key}": value for key, value in scores(cdf, rows.samples, of).items()}
    return result


def gain(
    base: Array, other: Array, prompt: NDArray[Any], rng: np.random.Generator
) -> tuple[float, float, float]:
    """1 - mean(other) / mean(base), both [R], and its 95 % bootstrap interval over prompts."""
    sums = np.zeros((2, prompt.max() + 1))
    for side, values in zip(sums, (base, other), strict=True):
        np.add.at(side, prompt, values)
    drawn = sums[:, rng.integers(sums.shape[1], size=(2000, sums.shape[1]))].sum(axis=2)
    low, high = np.percentile(1 - drawn[1] / drawn[0], (2.5, 97.5))
    return float(1 - sums[1].sum() / sums[0].sum()), float(low), float(high)


def summary(
    runs: Sequence[Mapping[str, Array]],
    base: Sequence[Mapping[str, Array]],
    part: str,
    table: pd.DataFrame,
    keep: NDArray[np.bool_],
) -> dict[str, Any]:
    """Metrics of one head on the rows `keep` of one set, means over seeds."""
    at = np.flatnonzero(keep)
    prompt, model = (pd.factorize(table[column].iloc[at])[0] for column in ("prompt_id", "model"))

    def of(name: str, source: Sequence[Mapping[str, Array]] = runs) -> Array:
        return np.stack([run[f"{part}/{name}"][at] for run in source])

    rng = np.random.default_rng(0)
    result: dict[str, Any] = {"prompts": int(prompt.max() + 1), "rows": len(at)}
    for name in ("crps_tokens", "crps_log", "nll"):
        result[name] = float(of(name).mean())
        result[f"{name}_sd"] = float(of(name).mean(axis=1).std())
    for name in ("crps_tokens", "crps_log"):
        result[f"{name}_gain"] = gain(of(name, base).mean(axis=0), of(name).mean(axis=0), prompt, rng)
    for level in LEVELS:
        covered = of(f"p{100 * level:g}").mean(axis=0)
        by_model = pd.Series(covered).groupby(model).mean()
        result[f"p{100 * level:g}"] = float(covered.mean())
        result[f"p{100 * level:g}_by_model"] = float((by_model - level).abs().mean())
    result["tau"] = float(np.mean([kendall_tau(run, of("mean_log")[0]) or 0.0 for run in of("median")]))
    result["tau_expected"] = float(
        np.mean([kendall_tau(run, of("mean_log")[0]) or 0.0 for run in of("expected")])
    )
    result["expected_mae"] = float(np.abs(of("expected") - of("mean_length")).mean())
    result["expected_ratio"] = float(of("expected").sum() / of("mean_length").sum())
    result["cvar_ratio"] = float((of("cvar") * of("over")).sum() / of("over_length").sum())
    return result


def reasoning(data: Path, name: str, table: pd.DataFrame) -> NDArray[np.bool_]:
    """Rows of served models for which most outputs have thinking tokens that the source counts."""
    raw = pd.read_parquet(data / f"more/{name}.parquet")
    if "api_tokens" not in raw.columns:
        return np.zeros(len(table), dtype=bool)
    thought = raw.n_tokens_reasoning.fillna(0).gt(0) | raw.api_tokens.gt(2 * raw.n_tokens)
    share = thought.groupby(raw.model).mean()
    return np.asarray(table.model.isin(share[share > 0.5].index))


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "CRPS, tokens": lambda one: f"{one['crps_tokens']:.1f}",
    "gain, %": lambda one: interval(one["crps_tokens_gain"]),
    "CRPS, ln": lambda one: f"{one['crps_log']:.4f}",
    "gain, % ": lambda one: interval(one["crps_log_gain"]),
    "nll": lambda one: f"{one['nll']:.3f}",
    "P50 / P90 / P99, %": lambda one: " / ".join(f"{100 * one[key]:.1f}" for key in ("p50", "p90", "p99")),
    "error by served model, points": lambda one: " / ".join(
        f"{100 * one[f'{key}_by_model']:.1f}" for key in ("p50", "p90", "p99")
    ),
    "tau": lambda one: f"{one['tau']:.3f}",
    "tau of E": lambda one: f"{one['tau_expected']:.3f}",
    "MAE of E": lambda one: f"{one['expected_mae']:.0f}",
    "E, ratio": lambda one: f"{one['expected_ratio']:.3f}",
    "CVaR, ratio": lambda one: f"{one['cvar_ratio']:.3f}",
}


def interval(values: Sequence[float]) -> str:
    """A gain with its interval, in percent."""
    mean, low, high = (100 * value for value in values)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Table of one set with a row for each head."""
    rows = [(name, *(cell(one) for cell in COLUMNS.values())) for name, one in results.items()]
    return markdown_table(("head", *COLUMNS), rows) + "\n"


def main(args: Sequence[str] | None = None) -> int:
    """Trains the heads that are missing in the work folder, and prints the tables."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path, help="folder of the public sets")
    parser.add_argument("--encoder", default=ENCODER, help="encoder not trained on these prompts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--work", type=Path, default=Path("out/distribution_heads"), help="cached results")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    files = prepare(options.data, options.work / "data")
    names = served_models(files.training)

    def read(file: Path) -> Rows:
        return read_rows({file: 1.0}, names, options.encoder, options.work)

    rows = read_rows(files.training, names, options.encoder, options.work)
    tune, report = read(files.calibration), read(files.report)
    others = {name: read(file) for name, file in files.set_aside.items()}
    runs: dict[str, list[dict[str, Array]]] = {name: [] for name in options.heads}
    for seed in range(options.seeds):
        for name in options.heads:
            file = options.work / f"{Path(options.encoder).name}-{name.replace(' ', '-')}-{seed}.npz"
            if not file.is_file():
                since = time.monotonic()
                kind = HEADS[name]
                network = train(kind, rows, tune, names, seed)
                np.savez(file, **measure(kind, network, tune, report, others))  # type: ignore[arg-type]
                log.info("%s, seed %d: %.0f s", name, seed, time.monotonic() - since)
            runs[name].append(dict(np.load(file)))
    thinking = {name: reasoning(options.data, name, other.table) for name, other in others.items()}
    sets = {"report": ("report", report.table, np.ones(len(report.table), dtype=bool))}
    for name, other in others.items():
        for title, keep in ((name, ~thinking[name]), (f"{name}, reasoning", thinking[name])):
            if keep.any():
                sets[title] = (name, other.table, keep)
    base = next(iter(runs.values()))
    for title, part in sets.items():
        results = {name: summary(one, base, *part) for name, one in runs.items()}
        first = results[options.heads[0]]
        print(f"\n{title}: {first['prompts']:,} prompts, {first['rows']:,} rows\n\n{markdown(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
