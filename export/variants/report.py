"""Results of variants: acceptance, choice, JSON and Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from export.variants.config import AcceptanceLimits
from export.variants.evaluate import LEVELS, Metrics, OutputDifferences
from scheduler_core.report.markdown import markdown_table

SCHEMA = "variants/1"
#: Name of the artifact itself among its variants.
PLAIN = "fp32"
#: Limit of `batch_mates` for variants in single precision.
EXACT = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """Result of one variant.

    Attributes:
        name: The variant, or fp32 for the artifact itself.
        precision: Of weights and activations.
        num_bytes: Of the graph with its weights.
        steps: Number of rewrites of the graph, by kind.
        metrics: Of the evaluation.
        differences: Of the graph's outputs.
        reasons: Of its rejection; empty: it is accepted.
    """

    name: str
    precision: str
    num_bytes: int
    steps: Mapping[str, int] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    differences: OutputDifferences | None = None
    reasons: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """All limits hold."""
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """Content of the report and of the manifest."""
        differences = self.differences
        return {
            "accepted": self.accepted,
            "reasons": list(self.reasons),
            "precision": self.precision,
            "bytes": self.num_bytes,
            "steps": dict(self.steps),
            "metrics": dict(self.metrics),
            "rms_to_artifact": {} if differences is None else differences.to_artifact,
            "probability_shift": {} if differences is None else differences.probability,
            "batch_mates": {} if differences is None else differences.batch_mates,
        }


def rejection_reasons(
    plain: Metrics,
    metrics: Metrics,
    differences: OutputDifferences,
    limits: AcceptanceLimits,
    *,
    exact: bool,
) -> tuple[str, ...]:
    """Limits that a variant exceeds; empty if all hold.

    Args:
        plain: Metrics of the artifact.
        metrics: Of the variant, on the same rows.
        differences: Of its outputs.
        limits: Of the losses.
        exact: It is in single precision, where batch mates may change next to nothing.
    """
    return tuple(_rejections(plain, metrics, differences, limits, exact))


def _rejections(
    plain: Metrics, metrics: Metrics, differences: OutputDifferences, limits: AcceptanceLimits, exact: bool
) -> Iterator[str]:
    for name, limit, label in (("r2", limits.r2_drop, "R2 of mu"), ("tau", limits.tau_drop, "Kendall's tau")):
        drop = _difference(plain.get(name), metrics.get(name))
        if drop is None and plain.get(name) is not None:
            yield f"{label} is unknown"
        elif drop is not None and not drop <= limit:
            yield f"{label} drops by {drop:.4f}, allowed {limit:g}"
    for level in LEVELS:
        shift = _difference(metrics.get(level), plain.get(level))
        if shift is None and plain.get(level) is not None:
            yield f"coverage of {level.upper()} is unknown"
        elif shift is not None and not abs(shift) <= limits.coverage_shift:
            yield f"coverage of {level.upper()} shifts by {shift:+.4f}, allowed {limits.coverage_shift:g}"
    for name, value in differences.probability.items():
        if not value <= limits.probability_shift:
            yield (
                f"probabilities of {name} shift by {value:.4f} on average, allowed {limits.probability_shift:g}"
            )
    allowed = min(EXACT, limits.batch_mates) if exact else limits.batch_mates
    for name, value in differences.batch_mates.items():
        if not value <= allowed:
            yield (f"batch mates change {name} by {value:.2g} of its standard deviation, allowed {allowed:g}")


def _difference(value: float | None, reference: float | None) -> float | None:
    return None if value is None or reference is None else value - reference


def best_of(results: Sequence[VariantResult], latency_ms: Mapping[str, Mapping[str, float]]) -> str:
    """The accepted variant with the smallest geometric mean of times over all shapes."""

    def log_time(name: str) -> float:
        return math.fsum(math.log(times[name]) for times in latency_ms.values())

    return min((result.name for result in results if result.accepted), key=log_time)


def report_markdown(content: Mapping[str, Any], command: str) -> str:
    """The report as a page."""
    machine, data, limits = content["machine"], content["data"], content["limits"]
    artifact, versions = content["artifact"], content["versions"]
    best = ", ".join(f"{name} on {provider}" for provider, name in content["best"].items())
    plain = content["variants"][PLAIN]["metrics"]
    quality = [_quality_row(name, variant, plain) for name, variant in content["variants"].items()]
    parts = [
        f"# Variants of {artifact['artifact_id']}",
        f"`{command}`",
        f"Artifact version {artifact['artifact_version']}, tailcast {versions['tailcast']}, ONNX Runtime "
        f"{versions['onnxruntime']}, {machine['processor']} ({machine['instructions']}), "
        f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}, {content['created']}.",
        f"Best here: **{best}**.",
        "## Quality",
        f"{data['num_groups']} (prompt, served model) groups of `{data['name']}`; int8 was calibrated on "
        f"{data['calibration_prompts']} other prompts. In brackets: the difference from {PLAIN}.",
        markdown_table(
            ("variant", "MB", "R2 mu", "tau", "P50", "P90", "P99", "CRPS", "batch mates", "accepted"), quality
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
            f"{provider}, minimum {'CPU' if provider == 'cpu' else 'wall-clock'} time of "
            f"{content['config']['repetitions']} calls in ms, variants interleaved; in brackets the speed-up over {PLAIN}.",
            markdown_table(("batch x tokens", *names), rows),
        ]
    return "\n\n".join(parts) + "\n"


def _quality_row(name: str, variant: Mapping[str, Any], plain: Metrics) -> list[str]:
    metrics = variant["metrics"]
    cells = []
    for key in ("r2", "tau", *LEVELS):
        value, difference = metrics.get(key), _difference(metrics.get(key), plain.get(key))
        text = "-" if value is None else f"{value:.4f}"
        cells.append(text if name == PLAIN or difference is None else f"{text} ({difference:+.4f})")
    crps = metrics.get("crps_tokens")
    mates = max(variant["batch_mates"].values(), default=None)
    return [
        name,
        f"{variant['bytes'] / 1e6:.1f}",
        *cells,
        "-" if crps is None else f"{crps:.2f}",
        "-" if mates is None else f"{mates:.1g}",
        "yes" if variant["accepted"] else f"no: {'; '.join(variant['reasons'])}",
    ]
