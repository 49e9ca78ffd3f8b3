"""Predictions of many prompts compared with the prompts' own answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from training.baselines import Baselines
from training.fitting.fits import NOT_FITTED, FittedGroups
from training.metrics import distribution_metrics, kendall_tau, regression

FloatArray = NDArray[np.float64]
# Columns by which a report is broken down.
BREAKDOWNS = ("model", "dataset", "category")
MAX_BREAKDOWN = 40


def evaluate_predictions(fits: FittedGroups, mu: FloatArray, sigma: FloatArray) -> dict[str, Any]:
    """Metrics of predicted parameters; see `training.metrics`.

    Groups whose answers were all cut have no fit to compare parameters with; their answers still count for the
    distribution's metrics.

    Args:
        fits: G groups with their answers and fits.
        mu: Predicted mu [G], log tokens.
        sigma: Predicted sigma [G], log tokens, above 0.
    """
    groups = fits.groups
    compared = np.flatnonzero(~fits.has_flag(*NOT_FITTED))
    counts = np.array([len(lengths) for lengths in groups.lengths], dtype=np.int64)
    owner = np.repeat(np.arange(len(fits)), counts)
    lengths = np.concatenate([np.empty(0), *groups.lengths])
    finished = np.concatenate([np.empty(0, dtype=bool), *groups.finished])
    mean_length = np.array([answers.mean() for answers in groups.lengths])
    return {
        "num_prompts": len(fits),
        "num_samples": int(counts.sum()),
        "num_censored": int((~finished).sum()),
        "num_fits_compared": len(compared),
        "mu": regression(fits.mu[compared], mu[compared]),
        "sigma": regression(fits.sigma[compared], sigma[compared]),
        "sigma_log1p": regression(np.log1p(fits.sigma[compared]), np.log1p(sigma[compared])),
        "kendall_tau": {
            "median_vs_fitted_mu": kendall_tau(mu[compared], fits.mu[compared]),
            "median_vs_mean_served_length": kendall_tau(mu, mean_length),
        },
    } | distribution_metrics(LogT(mu, sigma, fits.nu), owner, lengths, finished, _caps(fits)[owner])


def _caps(fits: FittedGroups) -> FloatArray:
    """Cap on the answers of each group in tokens: the smallest cut, else as declared, else none (infinite)."""
    caps = np.full(len(fits), np.inf)
    for number, declared in enumerate(fits.groups.max_tokens):
        cut = fits.groups.lengths[number][~fits.groups.finished[number]]
        if len(cut):
            caps[number] = cut.min()
        elif declared is not None:
            caps[number] = declared
    return caps


def full_report(
    fits: FittedGroups, mu: FloatArray, sigma: FloatArray, baselines: Baselines | None
) -> dict[str, Any]:
    """The model's metrics beside those of the baselines, and broken down by served model, dataset and category.

    Returns:
        "model": metrics; "baselines": name -> metrics; "by_model" and so on: value -> metrics of the model, where
        the data have that column with several values (at most 40).
    """
    report: dict[str, Any] = {"model": evaluate_predictions(fits, mu, sigma), "baselines": {}}
    if baselines is not None:
        for name, (base_mu, base_sigma) in baselines.predict(prompts_of(fits)).items():
            report["baselines"][name] = evaluate_predictions(fits, base_mu, base_sigma)
    for column in BREAKDOWNS:
        values = fits.groups.column(column)
        kinds = sorted({str(value) for value in values or []})
        if values is None or not 1 < len(kinds) <= MAX_BREAKDOWN:
            continue
        of = np.array([str(value) for value in values])
        rows = {kind: np.flatnonzero(of == kind) for kind in kinds}
        report[f"by_{column}"] = {
            kind: evaluate_predictions(fits.take(at), mu[at], sigma[at]) for kind, at in rows.items()
        }
    return report


def prompts_of(fits: FittedGroups) -> list[str]:
    """Prompt of each group.

    Raises:
        InputError: The data have no prompts.
    """
    prompts = fits.groups.column("prompt")
    if prompts is None:
        raise InputError(f"{fits.groups.path.name}, columns", fits.groups.rows.column_names, "also prompt")
    if None in prompts:
        raise InputError(
            f"{fits.groups.path.name}, group {fits.groups.name(prompts.index(None))}, column prompt",
            None,
            "text",
        )
    return [str(prompt) for prompt in prompts]


def report_lines(report: dict[str, Any]) -> list[str]:
    """The main numbers of a full report as lines of a table."""
    head = ("predictor", "R2 mu", "R2 sigma", "tau", "P50", "P90", "P99", "CRPS", "nll")
    lines = [("{:<14}" + "{:>9}" * 8).format(*head)]
    for name, metrics in [("model", report["model"]), *report["baselines"].items()]:
        levels = [metrics["coverage"].get(level, {}).get("estimate") for level in ("p50", "p90", "p99")]
        numbers: Sequence[float | None] = (
            metrics["mu"]["r2"],
            metrics["sigma"]["r2"],
            metrics["kendall_tau"]["median_vs_fitted_mu"],
            *levels,
            metrics["crps_tokens"],
            metrics["nll"],
        )
        lines.append(f"{name:<14}" + "".join(f"{'-' if x is None else format(x, '.3f'):>9}" for x in numbers))
    return lines
