"""The report of the quickstart: reads what the steps left in the folder and writes one self-contained page."""

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
from scheduler_core.files import atomic_file
from training import page
from training.fitting.figure import LABELS
from training.fitting.fits import NOT_FITTED
from training.fitting.summary import NOT_TESTED

NUM_SHOWN_PROMPTS = 6
PACKAGES = ("tailcast", "torch", "transformers", "onnxruntime", "numpy", "scipy")


def write_report(out: Path, records: Sequence[StepRecord]) -> Path:
    """Writes `report.html` into `out` and returns its path."""
    sections = [_steps(records), _lengths(out), _prediction(out), _scheduling(out), _versions()]
    content = page.page(
        "tailcast quickstart",
        "Repeated answers of a real LLM, fitted, predicted from the prompt alone, served, and used for scheduling.",
        sections,
    )
    with atomic_file(out / "report.html") as temporary:
        temporary.write_text(content, encoding="utf-8")
    return out / "report.html"


def _steps(records: Sequence[StepRecord]) -> str:
    rows = [(r.letter, r.title, f"{r.seconds:.1f}", r.result) for r in records]
    commands = [(r.letter, line) for r in records for line in r.command.splitlines()]
    return page.section(
        "What ran",
        page.table(("step", "command", "seconds", "result"), rows, text_columns=(0, 1, 3)),
        page.paragraph("The same by hand:", note=True),
        page.table(("step", "as typed"), commands, text_columns=(0, 1)),
    )


def _lengths(out: Path) -> str:
    fits = pq.read_table(out / "fits.parquet").to_pylist()
    summary = _read(out / "fit-dist.json")
    shown = _spread([fit for fit in fits if set(NOT_TESTED).isdisjoint(fit["flags"])], NUM_SHOWN_PROMPTS)
    png = out / "length-distributions.png"
    figures.length_distributions(shown, png)
    rows = [
        (LABELS[name], _percent(row["pass_rate"]), _number(row["mean_p"], 3), row["num_tested"])
        for name, row in ((name, summary["ks"][name]) for name in LABELS if name in summary["ks"])
    ]
    flags = ", ".join(f"{count} {name}" for name, count in summary["flags"].items()) or "none"
    return page.section(
        "Answer lengths are distributions",
        page.paragraph(
            f"{len(fits)} prompts; answers to the same prompt at temperature 1.0. Answers cut at the cap are "
            f"right-censored: the fit knows only that they would have been longer. Flagged prompts: {flags} (median_beyond_cap: more "
            "than half of the answers were cut, so the fit's centre is an extrapolation)."
        ),
        page.figure(png, "Histograms of sampled answer lengths of six prompts with fitted log-t densities"),
        page.table(("family", "KS p > 0.05", "mean p", "prompts tested"), rows),
        page.paragraph(
            "Kolmogorov-Smirnov with parameters fitted on the same answers flatters every family; with at most 20 "
            "answers per prompt it separates them weakly.",
            note=True,
        ),
    )


def _prediction(out: Path) -> str:
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
    return page.section(
        "Predicted from the prompt alone",
        page.paragraph(
            f"{report['model']['num_prompts']} test prompts whose answers the training never saw. P50, P90, P99: share of "
            "answers below the predicted quantile, over the prompts whose quantile lies below the cap (only there can cut "
            "answers be judged); no figure where there is none."
        ),
        page.figure(png, "Predicted against fitted mu and sigma, and observed against nominal coverage"),
        page.table(header, rows),
        page.paragraph(
            f"Exported graph against torch: largest difference {worst[1]:.1e} log tokens, at {worst[0]} (batch x tokens).",
            note=True,
        ),
    )


def _quality(name: str, metrics: Mapping[str, Any]) -> tuple[str, ...]:
    levels = metrics["coverage"]
    return (
        name,
        _number(metrics["mu"]["r2"], 2),
        _number(metrics["sigma"]["r2"], 2),
        _number(metrics["kendall_tau"]["median_vs_fitted_mu"], 2),
        *(_percent(levels[level]["estimate"]) for level in ("p50", "p90", "p99")),
        _number(metrics["crps_tokens"], 2),
    )


def _scheduling(out: Path) -> str:
    results = {label: _read(out / f"simulation-{policy}.json") for label, policy, _ in POLICIES}
    metrics = {label: result["metrics"] for label, result in results.items()}
    png = out / "latency.png"
    figures.latency_comparison(metrics, png)
    statistics = ("mean", "p90", "p99")
    header = ("policy", *(f"TTFT {s} (s)" for s in statistics), *(f"per token {s} (s)" for s in statistics))
    rows = [
        (
            label,
            *(f"{found['ttft_s'][s]:.2f}" for s in statistics),
            *(f"{found['per_token_latency_s'][s]:.3f}" for s in statistics),
        )
        for label, found in metrics.items()
    ]
    any_result = results[POLICIES[0][0]]
    config = any_result["config"]
    asked = results["TIE"]["predictor"]
    return page.section(
        "What the predictions buy",
        page.paragraph(
            f"{any_result['trace']['num_requests']} requests: the test prompts with their sampled true lengths, Poisson arrivals "
            f"at {config['load']} times what the simulated engine can serve with {config['scheduler']['max_num_seqs']} "
            "sequences at a time. SSJF orders by the predicted median, TIE by mean plus tail risk, both with predictions "
            "fetched from the running endpoint; the last row knows the true lengths."
        ),
        page.figure(png, "Time to first token and per-token latency of four policies"),
        page.table(header, rows),
        page.paragraph(
            "Shortest-first orders make long answers wait: compare the P90 and P99 of the time to first token with FCFS.",
            note=True,
        ),
        page.paragraph(f"Predictor as seen by TIE: {_flat(asked)}", note=True),
    )


def _versions() -> str:
    rows = [("Python", platform.python_version()), *((name, metadata.version(name)) for name in PACKAGES)]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return page.section(
        "Made with",
        page.table(("package", "version"), rows),
        page.paragraph(f"{made}, {platform.machine()}", note=True),
    )


def _spread(fits: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """`count` fits from the shortest to the longest median."""
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


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
