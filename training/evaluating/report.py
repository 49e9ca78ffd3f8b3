"""Reports of an evaluation: a table for the log, a page in Markdown (`docs/evaluation.md`), a page in HTML with figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_core.files import atomic_file
from scheduler_core.report.markdown import markdown_table
from scheduler_core.report.page import Page
from scheduler_core.report.plotting import svg
from training.evaluating import figures
from training.evaluating.evaluation import Evaluation

#: Names of the rows of a table, where the key is not clear enough.
LABELS = {
    "constant": "constant",
    "marginal": "one distribution",
    "per_model": "per-model median",
    "prompt_length": "prompt length",
    "half_of_outputs": "half of the outputs",
    "true_parameters": "true parameters (simulated)",
}
#: Heading -> path of the number in the metrics, and its format.
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
MEANINGS = (
    (
        "R2, MAE, RMSE",
        "predicted parameters against log-t fits to each prompt's own outputs (mu: log tokens; sigma as log(1 + sigma)).",
    ),
    (
        "tau, pairs right",
        "Kendall's tau-b of predicted order and fitted mu; fraction of pairs in the right order (ties: half).",
    ),
    (
        "P50, P90, P99",
        "fraction of outputs at most as long as the predicted quantile, over prompts whose quantile is below max_tokens.",
    ),
    (
        "CRPS, CRPS log",
        "of the served length, in tokens and in log tokens; smaller is better, and nll (nats) too.",
    ),
    ("constant", "the mean of the fitted parameters of the training data, for every prompt."),
    ("one distribution", "one log-t fitted to all outputs of the training data."),
    ("per-model median", "one log-t for each served model."),
    ("prompt length", "a line in the logarithm of the prompt's length, with one sigma."),
    (
        "half of the outputs",
        "a fit to one half of a prompt's outputs, scored on the other half. Not an upper bound: such fits are noisy.",
    ),
    (
        "true parameters (simulated)",
        "outputs drawn from each fit, scored with the parameters they were drawn from: a perfect predictor with so many "
        "outputs per prompt. A little too high, because the fits vary more than the truth.",
    ),
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table under a paragraph that introduces it; cells are text."""

    introduction: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def table_rows(content: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Name and metrics of all predictors, in the order of the tables."""
    ceiling = content.get("ceiling", {})
    return [
        ("predictor", content["model"]),
        *content.get("compared", {}).items(),
        *((LABELS.get(name, name), metrics) for name, metrics in content["baselines"].items()),
        *(
            (LABELS[name], ceiling[name])
            for name in ("half_of_outputs", "true_parameters")
            if name in ceiling
        ),
    ]


def format_metric(metrics: Mapping[str, Any], column: str) -> str:
    """A number of a table as text; - where there is none."""
    path, form = COLUMNS[column]
    value = figures.number_at(metrics, path)
    return "-" if value is None else format(value, form)


def report_lines(content: Mapping[str, Any]) -> list[str]:
    """The main numbers as lines of a table."""
    columns = ("R2 mu", "R2 log1p sigma", "tau", "P50", "P90", "P99", "CRPS", "CRPS log", "nll")
    lines = [f"{'predictor':<28}" + "".join(f"{name:>15}" for name in columns)]
    for name, metrics in table_rows(content):
        lines.append(f"{name:<28}" + "".join(f"{format_metric(metrics, column):>15}" for column in columns))
    return lines


def write_markdown(content: Mapping[str, Any], path: Path) -> None:
    """Writes the page in Markdown."""
    parts = [
        "# Evaluation",
        _summary(content),
        _markdown(_overview(content)),
        "\n".join(f"- {name}: {text}" for name, text in MEANINGS),
    ]
    for title, tables in _sections(content):
        parts += [f"## {title}", *map(_markdown, tables)]
    parts.append(
        f"Command:\n\n    {_command(content)} --json ... --markdown ...\n\nwith {_versions(content)}."
    )
    with atomic_file(path) as temporary:
        temporary.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def write_html(evaluation: Evaluation, content: Mapping[str, Any], path: Path) -> None:
    """Writes the page in HTML, with figures."""
    page = Page("Evaluation of a length predictor", _summary(content))
    page.heading("All predictors")
    _add_table(page, _overview(content))
    page.table(("name", "meaning"), MEANINGS, text_columns=(0, 1))
    if content["model"]["mu"]["r2"] is not None and evaluation.scored.prediction.mu is not None:
        page.heading("Predicted against fitted")
        page.figure(svg(figures.parameters(evaluation.scored)), "Predicted against fitted mu and sigma")
    if evaluation.scored.scores is not None:
        page.heading("Reliability")
        text = (
            "Observed coverage over its level, and its shift from nominal at P50, P90 and P99 by served model"
        )
        page.figure(svg(figures.reliability(content)), text)
        text = "Histogram of the probability integral transform; flat where the distributions are right"
        page.figure(svg(figures.pit(content, LABELS)), text)
    if content.get("by_dataset"):
        text = "R2 of mu, Kendall's tau and CRPS of log tokens by data set"
        page.figure(svg(figures.datasets(content, LABELS)), text)
    for title, tables in _sections(content):
        page.heading(title)
        for table in tables:
            _add_table(page, table)
    page.heading("Made with")
    settings = [(name, "-" if value is None else str(value)) for name, value in content["config"].items()]
    page.table(("option", "value"), settings, text_columns=(0, 1))
    page.note(_versions(content))
    page.write(path)


def _markdown(table: Table) -> str:
    text = markdown_table(table.header, table.rows) if table.rows else ""
    return f"{table.introduction}\n\n{text}".strip()


def _add_table(page: Page, table: Table) -> None:
    if table.introduction:
        page.paragraph(table.introduction)
    if table.rows:
        page.table(table.header, table.rows)


def _summary(content: Mapping[str, Any]) -> str:
    model, data, predictor = content["model"], content["data"], content["predictor"]
    name = predictor.get("artifact_id") or predictor.get("folder")
    version = f", version {predictor['artifact_version']}" if "artifact_version" in predictor else ""
    limit = "" if data["max_tokens"] is None else f", max_tokens {data['max_tokens']}"
    return (
        f"{predictor['kind'].capitalize()} `{name}`{version}, on `{data['name']}` (SHA-256 {data['sha256'][:12]}, split "
        f"{data['split']}{limit}): {model['num_prompts']} pairs of prompt and served model, {model['num_samples']} "
        f"outputs, {model['num_censored']} of them truncated."
    )


def _overview(content: Mapping[str, Any]) -> Table:
    rows = [(name, *_cells(metrics)) for name, metrics in table_rows(content)]
    return Table("", ("predictor", *COLUMNS), rows)


def _cells(metrics: Mapping[str, Any]) -> list[str]:
    return [format_metric(metrics, column) for column in COLUMNS]


def _sections(content: Mapping[str, Any]) -> Iterator[tuple[str, list[Table]]]:
    """Heading and tables of each section that the content has."""
    ceiling = content.get("ceiling") or {}
    reliability = {
        name: value for name, value in (ceiling.get("reliability") or {}).items() if value is not None
    }
    if reliability:
        text = (
            "Correlation of fits to halves of the outputs, stepped up by Spearman and Brown: the R2 of the true "
            "parameters against the fits."
        )
        row = [f"{value:.3f}" for value in reliability.values()]
        yield "Reliability of the fits", [Table(text, ("parameter", *reliability), [("reliability", *row)])]
    for column, title in (("dataset", "data set"), ("model", "served model")):
        parts = content.get(f"by_{column}")
        if parts:
            rows = [(name, str(part["num_prompts"]), *_cells(part)) for name, part in parts.items()]
            tables = [Table("", (title, "prompts", *COLUMNS), rows)]
            yield f"By {title}", tables + (_compared_by_dataset(content) if column == "dataset" else [])
    coverage = [table for table in (_shifts(content), _coverage(content), _conformal(content)) if table.rows]
    if coverage:
        yield "Coverage", coverage


def _compared_by_dataset(content: Mapping[str, Any]) -> list[Table]:
    own, others = content["by_dataset"], content.get("others_by_dataset") or {}
    header = ("data set", "predictor", *(LABELS.get(name, name) for name in others))
    return [
        Table(
            f"{column} by data set:",
            header,
            [
                (name, *(format_metric(part[name], column) for part in (own, *others.values())))
                for name in own
            ],
        )
        for column in ("tau", "R2 mu", "CRPS")
        if others
    ]


def _shifts(content: Mapping[str, Any]) -> Table:
    rows = [
        (column, level.upper(), shift["of"], f"{100 * shift['shift']:+.1f}", str(shift["num_samples"]))
        for column, levels in (content.get("largest_shift") or {}).items()
        for level, shift in levels.items()
        if shift is not None
    ]
    return Table("Largest shifts from nominal:", ("by", "level", "of", "points", "outputs"), rows)


def _coverage(content: Mapping[str, Any]) -> Table:
    table = content.get("coverage_by_model_and_dataset") or {}
    datasets = sorted({name for row in table.values() for name in row})
    rows = [(model, *(_levels(row.get(name)) for name in datasets)) for model, row in sorted(table.items())]
    text = "P50 / P90 / P99 in percent, for each served model and data set:"
    return Table(text, ("served model", *datasets), rows)


def _levels(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    estimates = [figures.number_at(cell, (level, "estimate")) for level in ("p50", "p90", "p99")]
    return " / ".join("-" if estimate is None else f"{100 * estimate:.0f}" for estimate in estimates)


def _conformal(content: Mapping[str, Any]) -> Table:
    conformal = content.get("conformal") or {"levels": [], "coverage": {}}
    rows = [
        (name, *("-" if fraction is None else f"{100 * fraction:.1f}" for fraction in levels.values()))
        for name, levels in conformal["coverage"].items()
    ]
    text = (
        "Coverage in percent of the conformal quantiles of `calibrate`, which have a finite-sample guarantee for rows "
        "exchangeable with the calibration rows:"
    )
    return Table(text, ("served model", *(level.upper() for level in conformal["levels"])), rows)


def _command(content: Mapping[str, Any]) -> str:
    config = content["config"]
    words = ["evaluate", config["predictor"], "--data", config["data"]]
    for entry in config["compare"] or []:
        words += ["--compare+", entry]
    for name in ("baselines_from", "split", "seed", "max_groups"):
        if config[name] not in (None, "all", 0):
            words += [f"--{name}", str(config[name])]
    return " ".join(words)


def _versions(content: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in content["versions"].items())
