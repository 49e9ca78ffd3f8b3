"""The report of the quickstart: a self-contained page from the results of the steps."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from examples.quickstart import figures
from examples.quickstart.steps import POLICIES
from examples.shell import StepRecord
from scheduler_core.report.page import Page
from training.fitting.fits import NOT_FITTED, NOT_TESTED
from training.fitting.report import FAMILY_NAMES, fixed, percent

NUM_EXAMPLES = 6
PACKAGES = ("tailcast", "torch", "transformers", "onnxruntime", "numpy", "scipy")


def write_report(out: Path, records: Sequence[StepRecord]) -> Path:
    """Writes `report.html` into `out` and returns its path."""
    page = Page(
        "tailcast quickstart",
        "Output lengths of a real LLM: sampled, fitted, predicted from the prompt only, served, and used for scheduling.",
    )
    _add_steps(page, records)
    _add_lengths(page, out)
    _add_prediction(page, out)
    _add_scheduling(page, out)
    _add_versions(page)
    page.write(out / "report.html")
    return out / "report.html"


def _add_steps(page: Page, records: Sequence[StepRecord]) -> None:
    rows = [(r.letter, r.title, f"{r.seconds:.1f}", r.result) for r in records]
    commands = [(r.letter, line) for r in records for line in r.command.splitlines()]
    page.heading("Steps")
    page.table(("step", "command", "seconds", "result"), rows, text_columns=(0, 1, 3))
    page.note("Commands to run the steps manually:")
    page.table(("step", "command line"), commands, text_columns=(0, 1))


def _add_lengths(page: Page, out: Path) -> None:
    fits = pq.read_table(out / "fits.parquet").to_pylist()
    summary = _read(out / "fit-dist.json")
    examples = _rows_by_median(
        [fit for fit in fits if set(NOT_TESTED).isdisjoint(fit["flags"])], NUM_EXAMPLES
    )
    png = out / "length-distributions.png"
    figures.length_distributions(examples, png)
    rows = [
        (FAMILY_NAMES[name], percent(row["pass_rate"]), fixed(row["mean_p"]), row["num_tested"])
        for name, row in summary["ks"].items()
    ]
    flags = ", ".join(f"{count} {name}" for name, count in summary["flags"].items()) or "none"
    page.heading("Output lengths are distributions")
    page.paragraph(
        f"{len(fits)} prompts; outputs for the same prompt at temperature 1.0. Samples truncated at max_tokens are "
        f"right-censored: the fit treats their lengths as lower bounds. Flagged prompts: {flags} "
        "(median_beyond_cap: the fitted median exceeds the longest sample, so it is an extrapolation)."
    )
    page.figure(png, "Histograms of sampled output lengths of six prompts with fitted log-t densities")
    page.table(("family", "KS p > 0.05", "mean p", "prompts tested"), rows)
    page.note(
        "The Kolmogorov-Smirnov p-values are too high, because the parameters are fitted to the same samples; with at most "
        "20 samples per prompt the test has little power to distinguish families."
    )


def _add_prediction(page: Page, out: Path) -> None:
    report = _read(out / "evaluation-artifact.json")
    fits = {fit["prompt_id"]: fit for fit in pq.read_table(out / "fits.parquet").to_pylist()}
    predictions = [
        row
        for row in _read(out / "predictions.json")
        if set(NOT_FITTED).isdisjoint(fits[row["prompt_id"]]["flags"])
    ]
    png = out / "calibration.png"
    figures.calibration(
        {name: np.array([row[name] for row in predictions]) for name in ("mu", "sigma")},
        {name: np.array([fits[row["prompt_id"]][name] for row in predictions]) for name in ("mu", "sigma")},
        [(row["level"], row["estimate"]) for row in report["model"]["calibration"]],
        png,
    )
    header = ("predictor", "R2 mu", "R2 sigma", "Kendall tau", "P50", "P90", "P99", "CRPS (tokens)")
    rows = [
        _quality(name, metrics)
        for name, metrics in (("artifact (ONNX)", report["model"]), *report["baselines"].items())
    ]
    manifest = _read(out / "artifact" / "manifest.json")
    worst = max(manifest["parity"]["max_abs_diff"].items(), key=lambda item: item[1])
    page.heading("Predicted from the prompt only")
    page.paragraph(
        f"{report['model']['num_prompts']} test prompts, which were not used for training. P50, P90, P99: fraction of "
        "samples below the predicted quantile, over the prompts whose quantile is below max_tokens (elsewhere censored "
        "samples cannot be scored); - if there are none."
    )
    page.figure(png, "Predicted against fitted mu and sigma, and observed against nominal coverage")
    page.table(header, rows)
    page.note(
        f"Exported graph against torch: largest difference {worst[1]:.1e} log tokens, at {worst[0]} (batch x tokens)."
    )


def _quality(name: str, metrics: Mapping[str, Any]) -> tuple[str, ...]:
    levels = metrics["coverage"]
    return (
        name,
        fixed(metrics["mu"]["r2"], 2),
        fixed(metrics["sigma"]["r2"], 2),
        fixed(metrics["kendall_tau"]["median_vs_fitted_mu"], 2),
        *(percent(levels[level]["estimate"]) for level in ("p50", "p90", "p99")),
        fixed(metrics["crps_tokens"], 2),
    )


def _add_scheduling(page: Page, out: Path) -> None:
    results = {label: _read(out / f"simulation-{policy}.json") for label, policy, _ in POLICIES}
    metrics = {label: result["metrics"] for label, result in results.items()}
    png = out / "latency.png"
    figures.latency_comparison(metrics, png)
    statistics = ("mean", "p90", "p99")
    header = ("policy", *(f"TTFT {s} (s)" for s in statistics), *(f"per token {s} (s)" for s in statistics))
    rows = [
        (
            label,
            *(f"{values['ttft_s'][s]:.2f}" for s in statistics),
            *(f"{values['normalized_latency_s'][s]:.3f}" for s in statistics),
        )
        for label, values in metrics.items()
    ]
    any_result = results[POLICIES[0][0]]
    config = any_result["config"]
    page.heading("Effect on scheduling")
    page.paragraph(
        f"{any_result['trace']['num_requests']} requests: the test prompts with their sampled true lengths, Poisson arrivals "
        f"at {config['load']} times what the simulated engine can serve with {config['scheduler']['max_num_seqs']} "
        "sequences at a time. SSJF orders by the predicted median, TIE by mean plus tail risk, bounded shortest first by the "
        "predicted median within a bound on the wait, all with predictions from the running endpoint; the last row uses "
        "the true lengths."
    )
    page.figure(png, "Time to first token and normalized latency of five policies")
    page.table(header, rows)
    page.note(
        "Shortest-first policies delay long outputs: compare the P90 and P99 of the time to first token with FCFS."
    )
    page.note(f"Predictions that TIE received: {_flat(results['TIE']['predictor'])}")


def _add_versions(page: Page) -> None:
    rows = [("Python", platform.python_version()), *((name, metadata.version(name)) for name in PACKAGES)]
    timestamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page.heading("Versions")
    page.table(("package", "version"), rows)
    page.note(f"{timestamp}, {platform.machine()}")


def _rows_by_median(fits: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """`count` fits at equally spaced ranks of the median, in ascending order."""
    ordered = sorted(fits, key=lambda fit: float(fit["mu"]))
    at = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int)
    return [ordered[index] for index in at]


def _flat(statistics: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in statistics.items()
        if isinstance(value, (int, float, str))
    )


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
