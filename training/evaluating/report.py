"""The whole comparison as JSON content: the predictor, baselines, others beside it, and the noise ceiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.evaluating.baselines import Baselines
from training.evaluating.ceiling import ceilings
from training.evaluating.judging import BREAKDOWNS, Judged, largest_shifts
from training.evaluating.predictors import Prediction
from training.evaluating.rows import EvaluationRows

SCHEMA = "evaluation/2"
#: What the rows of a table are called, where their name says too little.
LABELS = {
    "constant": "constant",
    "marginal": "one distribution",
    "per_model": "per-model median",
    "prompt_length": "prompt length",
    "seen_half": "half of the answers seen",
    "true_parameters": "true parameters (simulated)",
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A predictor that stands beside the main one: its label, what it is, and what it says of the rows."""

    label: str
    what: Mapping[str, Any]
    prediction: Prediction
    bucket_edges: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A finished comparison.

    Attributes:
        content: For JSON.
        judged: The main predictor, for figures.
        others: Name in tables -> judged baselines and contenders, for figures.
    """

    content: dict[str, Any]
    judged: Judged
    others: Mapping[str, Judged]


def compare(
    rows: EvaluationRows,
    main: Contender,
    baselines: Baselines | None = None,
    beside: Sequence[Contender] = (),
    *,
    ceiling_seed: int | None = None,
) -> Report:
    """Judges all predictors on the same rows.

    Args:
        rows: Prompts, answers and fits.
        main: The predictor in question, broken down by served model, data set and category.
        baselines: Of its training data.
        beside: Others.
        ceiling_seed: Of the noise ceiling; None: without it.
    """
    judged = Judged.of(rows, main.prediction, main.bucket_edges)
    parts = {column: part for column in BREAKDOWNS if (part := judged.by(column)) is not None}
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "model": judged.metrics(),
        "baselines": {},
        "beside": {},
        "ceiling": {},
        **{f"by_{column}": part for column, part in parts.items()},
        "coverage_by_model_and_dataset": judged.coverage_by_model_and_dataset(),
        "largest_shift": largest_shifts(
            {column: part for column, part in parts.items() if column != "category"}
        ),
    }
    others: dict[str, Judged] = {}
    for name, prediction in _baseline_predictions(rows, baselines).items():
        others[name] = Judged.of(rows, prediction)
        content["baselines"][name] = others[name].metrics()
    for contender in beside:
        other = Judged.of(rows, contender.prediction, contender.bucket_edges)
        others[contender.label] = other
        content["beside"][contender.label] = {"predictor": dict(contender.what), **other.metrics()}
    if ceiling_seed is not None:
        found, info = ceilings(rows, ceiling_seed)
        content["ceiling"] = info | {
            name: Judged.of(ceiling.rows, ceiling.prediction).metrics() for name, ceiling in found.items()
        }
    by_dataset = {name: part for name, other in others.items() if (part := other.by("dataset")) is not None}
    content["others_by_dataset"] = by_dataset
    return Report(content, judged, others)


def _baseline_predictions(rows: EvaluationRows, baselines: Baselines | None) -> dict[str, Prediction]:
    if baselines is None:
        return {}
    found = baselines.predict(rows.prompts, rows.served_models)
    return {name: Prediction(mu, sigma, baselines.nu) for name, (mu, sigma) in found.items()}


def table_rows(content: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """All predictors of a report in the order of its tables: label and metrics."""
    beside = content.get("beside", {})
    ceiling = content.get("ceiling", {})
    return [
        ("predictor", content["model"]),
        *beside.items(),
        *((LABELS.get(name, name), metrics) for name, metrics in content["baselines"].items()),
        *((LABELS[name], ceiling[name]) for name in ("seen_half", "true_parameters") if name in ceiling),
    ]


#: Heading -> where the number is in the metrics, and its format.
COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "R2 mu": (("mu", "r2"), ".3f"),
    "MAE mu": (("mu", "mae"), ".3f"),
    "RMSE mu": (("mu", "rmse"), ".3f"),
    "R2 log1p sigma": (("sigma_log1p", "r2"), ".3f"),
    "MAE sigma": (("sigma", "mae"), ".3f"),
    "tau": (("kendall_tau", "median_vs_fitted_mu"), ".3f"),
    "pairs right": (("pair_accuracy", "fitted_mu"), ".3f"),
    "P50": (("coverage", "p50", "estimate"), ".3f"),
    "P90": (("coverage", "p90", "estimate"), ".3f"),
    "P99": (("coverage", "p99", "estimate"), ".3f"),
    "CRPS": (("crps_tokens",), ".1f"),
    "CRPS log": (("crps_log_tokens",), ".4f"),
    "nll": (("nll",), ".3f"),
}


def number_at(metrics: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """A number inside metrics; None where it is missing or unknown."""
    found: Any = metrics
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return None if found is None else float(found)


def shown(metrics: Mapping[str, Any], column: str) -> str:
    """A number of a table as text; - where there is none."""
    path, form = COLUMNS[column]
    value = number_at(metrics, path)
    return "-" if value is None else format(value, form)


def report_lines(content: Mapping[str, Any]) -> list[str]:
    """The main numbers of a report as lines of a table."""
    columns = ("R2 mu", "R2 log1p sigma", "tau", "P50", "P90", "P99", "CRPS", "CRPS log", "nll")
    lines = [f"{'predictor':<28}" + "".join(f"{name:>15}" for name in columns)]
    for label, metrics in table_rows(content):
        lines.append(f"{label:<28}" + "".join(f"{shown(metrics, name):>15}" for name in columns))
    return lines
