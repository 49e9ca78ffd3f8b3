"""Reports of an evaluation: a table for the log, a Markdown page, and an HTML page with figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler_core.report.page import Page, markdown_table
from scheduler_core.report.plotting import COLORS, GRAY, new_figure, svg
from scheduler_core.shell.files import atomic_file
from training.evaluating.evaluation import MIN_COMPARED, ScoredPredictor

#: Key of a baseline or bound -> its name in tables.
LABELS = {
    "constant": "constant",
    "marginal": "one distribution",
    "per_model": "per-model median",
    "prompt_length": "prompt length",
    "half_of_outputs": "half of the outputs",
    "true_parameters": "true parameters (simulated)",
}
#: Column heading -> path of the number in the metrics, and its format.
COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "fits": (("num_fits_compared",), "d"),
    "R2 mu": (("mu", "r2"), ".3f"),
    "MAE mu": (("mu", "mae"), ".3f"),
    "RMSE mu": (("mu", "rmse"), ".3f"),
    "R2 log1p sigma": (("sigma_log1p", "r2"), ".3f"),
    "MAE sigma": (("sigma", "mae"), ".3f"),
    "tau": (("kendall_tau", "median_vs_fitted_mu"), ".3f"),
    "pairs right": (("pair_accuracy", "fitted_mu"), ".3f"),
    "outputs": (("num_samples",), "d"),
    "tau, one output": (("kendall_tau", "median_vs_one_output"), ".3f"),
    "MAE tokens": (("point", "mae_tokens"), ".1f"),
    "P50": (("coverage", "p50", "estimate"), ".3f"),
    "P90": (("coverage", "p90", "estimate"), ".3f"),
    "P99": (("coverage", "p99", "estimate"), ".3f"),
    "CRPS": (("crps_tokens",), ".1f"),
    "CRPS log": (("crps_log_tokens",), ".4f"),
    "nll": (("nll",), ".3f"),
}
#: Columns that are shown on the pages but not in the log.
_PAGES_ONLY = {"MAE mu", "RMSE mu", "R2 log1p sigma", "MAE sigma", "pairs right", "nll"}
MEANINGS = {
    "fits": f"number of prompts with a fit (at least 3 outputs), used for the columns up to `outputs`; - below {MIN_COMPARED}.",
    "outputs": "number of outputs, used for the remaining columns.",
    "tau, one output": f"Kendall's tau-b of predicted order and one output of each prompt; - below {MIN_COMPARED} prompts.",
    "MAE tokens": "mean absolute error of the predicted median against the mean length of a prompt's outputs.",
    "R2, MAE, RMSE": "predicted parameters against log-t fits to each prompt's own outputs (mu: log tokens; sigma as log(1 + sigma)).",
    "tau, pairs right": "Kendall's tau-b of predicted order and fitted mu; fraction of pairs in the right order (ties: half).",
    "P50, P90, P99": "fraction of outputs at most as long as the predicted quantile, over prompts whose quantile is below max_tokens.",
    "CRPS, CRPS log, nll": "CRPS of the served length in tokens and in log tokens, and negative log-likelihood in nats; smaller is better.",
    "half of the outputs": "a fit to one half of a prompt's outputs, scored on the other half. Not an upper bound, because such fits are noisy.",
    "true parameters (simulated)": "outputs drawn from each fit, scored with the parameters of the fit: a perfect predictor with the same number of outputs per prompt. Slightly too high, because fits vary more than the true parameters.",
}

Rows = Sequence[Sequence[str]]


def table_rows(content: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Name and metrics of all predictors, in the order of the tables."""
    parts = {**content["baselines"], **content["ceiling"]}
    labelled = [(label, parts[name]) for name, label in LABELS.items() if name in parts]
    return [("predictor", content["model"]), *content["compared"].items(), *labelled]


def format_metric(metrics: Mapping[str, Any], column: str) -> str:
    """Formats a metric for a table; "-" if it is missing."""
    path, form = COLUMNS[column]
    value: Any = metrics
    for name in path:
        value = (value or {}).get(name)
    return "-" if value is None else format(value, form)


def report_lines(content: Mapping[str, Any]) -> list[str]:
    """Lines of a plain-text table of the main metrics."""
    columns = [name for name in COLUMNS if name not in _PAGES_ONLY]
    rows = [(name, [format_metric(part, column) for column in columns]) for name, part in table_rows(content)]
    return [
        f"{name:<28}" + "".join(f"{cell:>16}" for cell in cells)
        for name, cells in [("predictor", columns), *rows]
    ]


def write_markdown(content: Mapping[str, Any], path: Path) -> None:
    """Writes the report as a Markdown page."""
    parts = ["# Evaluation", _summary(content)]
    for title, introduction, header, rows in _tables(content):
        parts += [f"## {title}", introduction, markdown_table(header, rows)]
    parts.append("\n".join(f"- {name}: {text}" for name, text in MEANINGS.items()))
    parts.append(
        f"Command:\n\n    {_command(content)} --json ... --markdown ...\n\nwith {_versions(content)}."
    )
    with atomic_file(path) as temporary:
        temporary.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def write_html(scored: ScoredPredictor, content: Mapping[str, Any], path: Path) -> None:
    """Writes the report as an HTML page, with figures."""
    page = Page("Evaluation of a length predictor", _summary(content))
    for title, introduction, header, rows in _tables(content):
        page.heading(title)
        if introduction:
            page.paragraph(introduction)
        page.table(header, rows)
    page.table(("name", "meaning"), MEANINGS.items(), text_columns=(0, 1))
    if scored.scores is not None:
        page.heading("Reliability")
        caption = "Predicted against fitted parameters, and observed coverage against its nominal level"
        page.figure(svg(_figure(scored, content)), caption)
    page.heading("Configuration")
    settings = [(name, "-" if value is None else str(value)) for name, value in content["config"].items()]
    page.table(("option", "value"), settings, text_columns=(0, 1))
    page.note(_versions(content))
    page.write(path)


def _figure(scored: ScoredPredictor, content: Mapping[str, Any]) -> Any:
    """Draws predicted against fitted mu and sigma, and coverage against its nominal level, overall and by served model."""
    figure, axes = new_figure(13, 4.2, columns=3)
    rows, prediction = scored.rows, scored.prediction
    sigma = prediction.sigma if prediction.sigma_within is None else prediction.sigma_within
    values = (("mu", rows.fits.mu, prediction.mu, "linear"), ("sigma", rows.fits.sigma, sigma, "log"))
    for axis, (name, fitted, predicted, scale) in zip(axes[:2], values, strict=True):
        axis.set(xlabel=f"{name} fitted to the outputs", ylabel=f"{name} predicted from the prompt")
        if predicted is None or len(rows.compared) == 0:
            continue
        x, y = fitted[rows.compared], predicted[rows.compared]
        axis.hexbin(x, y, xscale=scale, yscale=scale, gridsize=60, bins="log", mincnt=1, linewidths=0)
        axis.axline((x.mean(), x.mean()), (2 * x.mean(), 2 * x.mean()), color=COLORS[1], linewidth=1)
    axis = axes[2]
    axis.plot([0, 1], [0, 1], color=GRAY, linewidth=1, linestyle=":")
    parts = {**content.get("by_model", {}), "all": content["model"]}
    for name, metrics in parts.items():
        points = [point for point in metrics["calibration"] if point["estimate"] is not None]
        style = {"linewidth": 2, "label": "all"} if name == "all" else {"linewidth": 0.8, "alpha": 0.45}
        axis.plot(
            *zip(*((point["level"], point["estimate"]) for point in points), strict=True),
            color=COLORS[0],
            **style,
        )
    axis.set(xlabel="nominal probability", ylabel="fraction of outputs below the quantile")
    return figure


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


def _cells(metrics: Mapping[str, Any]) -> list[str]:
    return [format_metric(metrics, column) for column in COLUMNS]


def _tables(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Sequence[str], Rows]]:
    """Title, introduction, header and rows of each table in the content."""
    rows: Rows = [(name, *_cells(metrics)) for name, metrics in table_rows(content)]
    yield "All predictors", "", ("predictor", *COLUMNS), rows
    if reliability := content["ceiling"].get("reliability"):
        text = (
            "Correlation of the fits to both halves of the outputs, with Spearman-Brown correction. It estimates the R2 "
            "of the true parameters against the fits."
        )
        values = ["-" if value is None else f"{value:.3f}" for value in reliability.values()]
        yield "Reliability of the fits", text, ("parameter", *reliability), [("reliability", *values)]
    for column, title in (("dataset", "data set"), ("model", "served model")):
        if parts := content.get(f"by_{column}"):
            rows = [(name, str(part["num_prompts"]), *_cells(part)) for name, part in parts.items()]
            yield f"By {title}", "", (title, "prompts", *COLUMNS), rows


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
