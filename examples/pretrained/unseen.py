"""Evaluation on unseen sources: as the unknown served model, as the mean over all known ones, and by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from examples.pretrained.prepare import served_model
from predictors.manifest import MODEL
from predictors.runtime import open_runtime
from scheduler_core.lengths.distribution import LogT
from scheduler_core.statistics import kendall_tau
from training.evaluating.split_runtime import SplitRuntime
from training.fitting.samples import with_conversations

#: Minimum number of prompts of a served model for a ranking.
MIN_PROMPTS = 20
LEVELS = (0.5, 0.9, 0.99)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SourceScores:
    """Means over the served models of one source.

    Attributes:
        source: Name of the source.
        num_prompts, num_models: Number of prompts, and of served models with at least `MIN_PROMPTS` prompts.
        ceiling: Kendall's tau between the lengths of two served models on the same prompts, mean over pairs; None without
            such a pair.
        unknown, mean, named: Kendall's tau of predicted and true length: as the unknown served model; by the mean of mu
            over all other known ones; by name, over the known served models. None: not available.
        coverage: Fraction of outputs at most as long as the predicted P50, P90 and P99, as the unknown served model.
        crps_log: CRPS in log tokens as the unknown served model, and with the mean mu of the other known ones instead.
    """

    source: str
    num_prompts: int
    num_models: int
    ceiling: float | None
    unknown: float | None
    mean: float | None
    named: float | None
    coverage: tuple[float, ...]
    crps_log: tuple[float, float]


#: Prompts -> (mu, sigma, nu) [3, N] for each served model by name, and for the unknown one ("").
Predict = Callable[[Sequence[str]], Mapping[str, Array]]


def score_sources(artifact: Path, files: Mapping[str, Path], *, threads: int = 1) -> list[SourceScores]:
    """Scores an artifact on each source."""
    runtime = open_runtime(artifact, provider="cpu", threads_per_run=threads)
    form = runtime.artifact.manifest.form
    names = [*runtime.artifact.manifest.served_models, ""]
    split = SplitRuntime(runtime, threads) if MODEL in runtime.artifact.manifest.files else None

    def predict(prompts: Sequence[str]) -> Mapping[str, Array]:
        if split is not None:
            by_name = split.predict_as(prompts, names)
        else:
            by_name = {name: runtime.predict(prompts, [name] * len(prompts)) for name in names}
        parameters = {name: each.arrays() for name, each in by_name.items()}
        return {
            name: np.stack([row[key] for key in ("mu", "sigma", "nu")]) for name, row in parameters.items()
        }

    return [
        score_source(predict, name, with_conversations(pq.read_table(file), file, form).to_pandas())
        for name, file in files.items()
    ]


def score_source(predict: Predict, name: str, table: pd.DataFrame) -> SourceScores:
    """Scores a table of (prompt, served model, lengths), with served models named as in the source."""
    prompts = table.drop_duplicates("prompt_id").set_index("prompt_id").prompt
    row_of = pd.Series(np.arange(len(prompts)), index=prompts.index)
    predicted = predict(prompts.tolist())
    unknown = predicted[""]
    by_model = {model: values[0] for model, values in predicted.items() if model}

    def by_name(model: str) -> str | None:
        return (
            model if model in by_model else served_model(model) if served_model(model) in by_model else None
        )

    @cache
    def mean_of_others(model: str) -> Array:
        own = by_name(model)
        return np.asarray(np.mean([mu for other, mu in by_model.items() if other != own], axis=0))

    log_lengths = table.assign(log=[np.log(values).mean() for values in table.output_tokens])
    wide = log_lengths.pivot_table(index="prompt_id", columns="model", values="log")
    wide = wide.loc[:, wide.notna().sum() >= MIN_PROMPTS]
    taus: dict[str, list[float]] = {"unknown": [], "mean": [], "named": []}
    for model in map(str, wide.columns):
        true = wide[model].dropna()
        scores = {"unknown": unknown[0], "mean": mean_of_others(model)}
        if (own := by_name(model)) is not None:
            scores["named"] = by_model[own]
        for kind, score in scores.items():
            tau = kendall_tau(score[row_of[true.index].to_numpy()], true.to_numpy())
            taus[kind].append(tau or 0.0)
    means = np.stack(
        [
            mean_of_others(str(model))[row_of[prompt]]
            for prompt, model in zip(table.prompt_id, table.model, strict=True)
        ]
    )
    coverage, crps = _distribution_scores(table, unknown[:, row_of[table.prompt_id].to_numpy()], means)
    return SourceScores(
        source=name,
        num_prompts=len(prompts),
        num_models=wide.shape[1],
        ceiling=_ceiling(wide),
        unknown=_mean(taus["unknown"]),
        mean=_mean(taus["mean"]),
        named=_mean(taus["named"]),
        coverage=coverage,
        crps_log=crps,
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _ceiling(wide: pd.DataFrame) -> float | None:
    """Mean tau over at most 400 pairs of served models with at least `MIN_PROMPTS` common prompts."""
    pairs = list(combinations(wide.columns, 2))
    chosen = np.random.default_rng(0).permutation(len(pairs))[:400]
    taus = []
    for first, second in (pairs[number] for number in chosen):
        both = wide[[first, second]].dropna()
        if len(both) >= MIN_PROMPTS:
            taus.append(kendall_tau(both[first], both[second]) or 0.0)
    return _mean(taus)


def _distribution_scores(
    table: pd.DataFrame, unknown: Array, known_mu: Array
) -> tuple[tuple[float, ...], tuple[float, float]]:
    """Coverage and CRPS over all outputs; each of the R rows of the table has the same weight.

    Args:
        unknown: mu, sigma and nu of each row as the unknown served model [3, R].
        known_mu: Mean of mu over the known served models [R].
    """
    counts = table.output_tokens.map(len).to_numpy()
    row = np.repeat(np.arange(len(table)), counts)
    log = np.log(np.concatenate(table.output_tokens.to_numpy()).astype(float))
    weight = 1.0 / counts[row] / len(table)
    mu, sigma, nu = unknown[:, row]
    cdf = LogT(mu, sigma, nu).cdf(np.exp(log))
    levels = (np.arange(50) + 0.5) / 50
    z = np.log(LogT(0.0, 1.0, float(nu[0])).ppf(levels))
    crps = []
    for center in (mu, known_mu[row]):
        gap = log[:, None] - (center[:, None] + sigma[:, None] * z)
        crps.append(float(weight @ (2 * np.maximum(levels * gap, (levels - 1) * gap).mean(axis=1))))
    return tuple(float(weight @ (cdf <= level)) for level in LEVELS), (crps[0], crps[1])


def markdown(scores: Sequence[SourceScores]) -> str:
    """Markdown table with a row for each source."""
    lines = [
        "| source | prompts | served models | tau, other model's length | tau, unknown | tau, mean of known | tau, by name | P50 / P90 / P99 | CRPS log, unknown | CRPS log, mean of known |",
        "|---|" + "---:|" * 9,
    ]
    for row in scores:
        numbers = [row.ceiling, row.unknown, row.mean, row.named]
        texts = ["-" if number is None else f"{number:.3f}" for number in numbers]
        coverage = " / ".join(f"{100 * value:.0f}" for value in row.coverage)
        crps = " | ".join(f"{value:.3f}" for value in row.crps_log)
        lines.append(
            f"| {row.source} | {row.num_prompts:,} | {row.num_models} | {' | '.join(texts)} | {coverage} | {crps} |"
        )
    return "\n".join(lines) + "\n"
