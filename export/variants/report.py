"""Acceptance of variants, choice of the fastest, and the report in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from export.variants.config import AcceptanceLimits
from scheduler_core.report.markdown import markdown_table

#: Name of the artifact itself among its variants.
PLAIN = "fp32"
#: Limit of `batch_mates` for variants in single precision.
EXACT = 1e-5
LEVELS = ("p50", "p90", "p99")

Metrics = Mapping[str, float | None]


def select_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """r2, tau, p50, p90, p99 and crps_tokens of a predictor's metrics; None where unknown."""
    coverage = metrics["coverage"]
    return {
        "r2": metrics["mu"]["r2"],
        "tau": metrics["kendall_tau"]["median_vs_fitted_mu"],
        **{level: coverage.get(level, {}).get("estimate") for level in LEVELS},
        "crps_tokens": metrics["crps_tokens"],
    }


def rejection_reasons(plain: Metrics, result: Mapping[str, Any], limits: AcceptanceLimits) -> Iterator[str]:
    """Limits that a variant exceeds.

    Args:
        plain: Metrics of the artifact.
        result: precision, metrics (on the same rows), probability_shift and batch_mates of the variant.
        limits: Maximum losses; batch mates may change next to nothing in single precision.
    """
    checks = [("r2", "R2 of mu", limits.r2_drop), ("tau", "Kendall's tau", limits.tau_drop)]
    checks += [(level, f"coverage of {level.upper()}", limits.coverage_shift) for level in LEVELS]
    for name, label, limit in checks:
        value, reference = result["metrics"].get(name), plain.get(name)
        if reference is None:
            continue
        if value is None:
            yield f"{label} is unknown"
            continue
        loss = abs(value - reference) if name in LEVELS else reference - value
        if not loss <= limit:
            yield f"{label} changes by {value - reference:+.4f}, allowed {limit:g}"
    for name, value in result["probability_shift"].items():
        if not value <= (limit := limits.probability_shift):
            yield f"probabilities of {name} shift by {value:.4f} on average, allowed {limit:g}"
    limit = min(EXACT, limits.batch_mates) if result["precision"] == "fp32" else limits.batch_mates
    for name, value in result["batch_mates"].items():
        if not value <= limit:
            yield f"batch mates change {name} by {value:.2g} of its standard deviation, allowed {limit:g}"


def fastest(variants: Mapping[str, Mapping[str, Any]], latency_ms: Mapping[str, Mapping[str, float]]) -> str:
    """The accepted variant with the smallest geometric mean of times over all shapes."""
    accepted = [name for name, variant in variants.items() if variant["accepted"]]
    return min(accepted, key=lambda name: math.prod(times[name] for times in latency_ms.values()))


def report_markdown(content: Mapping[str, Any]) -> str:
    """The report as a page."""
    data, limits, config, artifact = (content[name] for name in ("data", "limits", "config", "artifact"))
    best = ", ".join(f"{name} on {provider}" for provider, name in content["best"].items())
    command = f"export-variants {config['artifact']} --data {config['data']} --out {config['out']}"
    if config["max_groups"] is not None:
        command += f" --max_groups {config['max_groups']}"
    parts = [
        f"# Variants of {artifact['artifact_id']}",
        f"`{command} --repetitions {config['repetitions']}`",
        f"Artifact version {artifact['artifact_version']}, tailcast {content['versions']['tailcast']}, ONNX Runtime "
        f"{content['versions']['onnxruntime']}, {content['processor']}, threads: {config['threads']}, "
        f"{content['created']}.",
        f"Best here: **{best}**.",
        "## Quality",
        f"{data['num_groups']} (prompt, served model) groups of `{data['name']}`; int8 was calibrated on "
        f"{data['calibration_prompts']} other prompts. In brackets: the difference from {PLAIN}.",
        markdown_table(
            ("variant", "MB", "R2 mu", "tau", "P50", "P90", "P99", "CRPS", "batch mates", "accepted"),
            [
                _quality_row(name, variant, content["variants"][PLAIN]["metrics"])
                for name, variant in content["variants"].items()
            ],
        ),
        f"Limits: R2 and tau {limits['r2_drop']:g} and {limits['tau_drop']:g} lower, coverage "
        f"{limits['coverage_shift']:g} off, probabilities {limits['probability_shift']:g} off on average. Batch mates: "
        "largest change of an output by the other prompts in its batch, relative to the output's standard deviation; "
        f"limit {limits['batch_mates']:g}, in single precision {EXACT:g}.",
        "## Latency",
    ]
    for provider, shapes in content["latency_ms"].items():
        names = list(next(iter(shapes.values())))
        rows = [
            (shape, *(f"{times[name]:.1f} ({times[PLAIN] / times[name]:.2f})" for name in names))
            for shape, times in shapes.items()
        ]
        parts += [
            f"{provider}, minimum {'CPU' if provider == 'cpu' else 'wall-clock'} time of {config['repetitions']} calls "
            f"in ms, variants interleaved; in brackets the speed-up over {PLAIN}.",
            markdown_table(("batch x tokens", *names), rows),
        ]
    return "\n\n".join(parts) + "\n"


def _quality_row(name: str, variant: Mapping[str, Any], plain: Metrics) -> list[str]:
    cells = []
    for key in ("r2", "tau", *LEVELS):
        value, reference = variant["metrics"].get(key), plain.get(key)
        text = "-" if value is None else f"{value:.4f}"
        is_compared = name != PLAIN and value is not None and reference is not None
        cells.append(f"{text} ({value - reference:+.4f})" if is_compared else text)
    crps = variant["metrics"].get("crps_tokens")
    mates = max(variant["batch_mates"].values(), default=None)
    return [
        name,
        f"{variant['bytes'] / 1e6:.1f}",
        *cells,
        "-" if crps is None else f"{crps:.2f}",
        "-" if mates is None else f"{mates:.1g}",
        "yes" if variant["accepted"] else f"no: {'; '.join(variant['reasons'])}",
    ]
