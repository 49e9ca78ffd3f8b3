"""An evaluation as Markdown: `docs/evaluation.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from training.evaluating.report import COLUMNS, LABELS, number_at, shown, table_rows

MEANINGS = (
    (
        "R2, MAE, RMSE",
        "predicted parameters against log-t fits to each prompt's own answers (mu: log tokens; sigma as log(1 + sigma)).",
    ),
    (
        "tau, pairs right",
        "Kendall's tau-b of predicted order and fitted mu; share of pairs ordered right (ties: half).",
    ),
    (
        "P50, P90, P99",
        "share of answers at most as long as the predicted quantile, over prompts whose quantile lies below the cap.",
    ),
    (
        "CRPS, CRPS log",
        "of the served length, in tokens and in log tokens; smaller is better, and nll (nats) too.",
    ),
    ("constant", "the mean of the fitted parameters of the training data, for every prompt."),
    ("one distribution", "one log-t fitted to all answers of the training data."),
    ("per-model median", "one log-t for each served model."),
    ("prompt length", "a line in the logarithm of the prompt's length, with one spread."),
    (
        "half of the answers seen",
        "a fit to one half of a prompt's answers, judged on the other half: what somebody knows who has already seen "
        "half of the answers to that very prompt. No bound from above: such fits are noisy.",
    ),
    (
        "true parameters (simulated)",
        "answers drawn anew from each fit, judged by the parameters they were drawn from: what a perfect predictor "
        "would get with so many answers a prompt. A little too high, because the fits vary more than the truth.",
    ),
)


def markdown_of(content: Mapping[str, Any]) -> str:
    """The whole document."""
    parts = [
        "# Evaluation",
        _lead(content),
        _table(("predictor", *COLUMNS), ((name, *_numbers(found)) for name, found in table_rows(content))),
        "\n".join(f"- {name}: {text}" for name, text in MEANINGS),
        *_reliability(content),
        *_breakdowns(content),
        *_coverage(content),
        *_conformal(content),
        _command(content),
    ]
    return "\n\n".join(parts) + "\n"


def _lead(content: Mapping[str, Any]) -> str:
    model, data, predictor = content["model"], content["data"], content["predictor"]
    name = predictor.get("artifact_id") or predictor.get("folder")
    version = f", version {predictor['artifact_version']}" if "artifact_version" in predictor else ""
    cap = "" if data["max_tokens"] is None else f", answers cut at {data['max_tokens']} tokens"
    return (
        f"{predictor['kind'].capitalize()} `{name}`{version}, on `{data['name']}` (SHA-256 {data['sha256'][:12]}, split "
        f"{data['split']}{cap}): {model['num_prompts']} pairs of prompt and served model, {model['num_samples']} "
        f"answers, {model['num_censored']} of them cut."
    )


def _numbers(metrics: Mapping[str, Any]) -> list[str]:
    return [shown(metrics, column) for column in COLUMNS]


def _reliability(content: Mapping[str, Any]) -> list[str]:
    found = content["ceiling"].get("reliability") if content["ceiling"] else None
    if not found or found["mu"] is None:
        return []
    numbers = ", ".join(f"{name} {value:.3f}" for name, value in found.items() if value is not None)
    return [
        f"Reliability of the fits (halves of the answers correlated, stepped up by Spearman and Brown), the R2 that the "
        f"true parameters would reach against them: {numbers}."
    ]


def _breakdowns(content: Mapping[str, Any]) -> list[str]:
    parts = []
    for column, title in (("dataset", "data set"), ("model", "served model")):
        found = content.get(f"by_{column}")
        if found:
            heading = (title, "prompts", *COLUMNS)
            rows = (
                (name, str(metrics["num_prompts"]), *_numbers(metrics)) for name, metrics in found.items()
            )
            parts += [f"## By {title}", _table(heading, rows)]
    tables = _others_by_dataset(content)
    return parts + tables


def _others_by_dataset(content: Mapping[str, Any]) -> list[str]:
    own, others = content.get("by_dataset"), content.get("others_by_dataset")
    if not own or not others:
        return []
    parts = []
    for column in ("tau", "R2 mu", "CRPS"):
        rows = [
            (name, shown(own[name], column), *(shown(found[name], column) for found in others.values()))
            for name in own
        ]
        labels = [LABELS.get(name, name) for name in others]
        parts += [f"### {column} by data set", _table(("data set", "predictor", *labels), rows)]
    return parts


def _coverage(content: Mapping[str, Any]) -> list[str]:
    table = content.get("coverage_by_model_and_dataset")
    shifts = content.get("largest_shift") or {}
    lines = [
        f"- {column}, {level.upper()}: {found['of']}, {100 * found['shift']:+.1f} points ({found['num_samples']} answers)"
        for column, levels in shifts.items()
        for level, found in levels.items()
        if found is not None
    ]
    parts = ["## Coverage", "Largest shifts from nominal:", "\n".join(lines)] if lines else []
    if table:
        datasets = sorted({name for row in table.values() for name in row})
        rows = [
            (model, *(levels_of(row.get(dataset)) for dataset in datasets))
            for model, row in sorted(table.items())
        ]
        parts += [
            "P50 / P90 / P99 in percent, for each served model and data set:",
            _table(("served model", *datasets), rows),
        ]
    return parts


def _conformal(content: Mapping[str, Any]) -> list[str]:
    found = content.get("conformal")
    if not found:
        return []
    rows = [
        (name, *(f"{100 * share:.1f}" if share is not None else "-" for share in levels.values()))
        for name, levels in found["coverage"].items()
    ]
    return [
        "### Conformal quantiles",
        "Coverage in percent of the quantiles that `calibrate` keeps beside the distribution, which have a finite-sample "
        "guarantee for rows exchangeable with those they were made from:",
        _table(("served model", *(level.upper() for level in found["levels"])), rows),
    ]


def levels_of(cell: Mapping[str, Any] | None) -> str:
    """Coverage at P50, P90 and P99 in percent; - where it is not known."""
    if cell is None:
        return "-"
    shares = [number_at(cell, (level, "estimate")) for level in ("p50", "p90", "p99")]
    return " / ".join("-" if share is None else f"{100 * share:.0f}" for share in shares)


def _command(content: Mapping[str, Any]) -> str:
    config = content["config"]
    words = ["evaluate", config["predictor"], "--data", config["data"]]
    for entry in config["beside"] or []:
        words += ["--beside", entry]
    for name in ("baselines_from", "split", "seed", "max_groups"):
        if config[name] not in (None, "all", 0):
            words += [f"--{name.replace('_', '-')}", str(config[name])]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f"Made by\n\n    {' '.join(words)} --json ... --markdown ...\n\nwith {versions}."


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
