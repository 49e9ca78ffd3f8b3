"""What was found about variants: decisions, JSON and Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from export.variants.answers import Differences
from export.variants.config import Limits
from export.variants.judging import LEVELS, Metrics

SCHEMA = "variants/1"
#: The artifact itself among its variants.
PLAIN = "fp32"
#: Of variants in single precision: how much batch mates may change an answer, as a share of the spread.
EXACT = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """What is known of one variant.

    Attributes:
        name: The variant, or fp32 for the artifact itself.
        precision: Of weights and activations.
        num_bytes: Of the graph with its weights.
        steps: What was done to the graph.
        metrics: Task metrics.
        differences: Of answers.
        reasons: Why it is refused; empty: it is accepted.
    """

    name: str
    precision: str
    num_bytes: int
    steps: Mapping[str, int] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    differences: Differences | None = None
    reasons: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether it may be used."""
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


def reasons_against(
    plain: Metrics, metrics: Metrics, differences: Differences, limits: Limits, *, exact: bool
) -> tuple[str, ...]:
    """Why a variant is refused; empty if all limits hold.

    Args:
        plain: Metrics of the artifact.
        metrics: Of the variant, on the same rows.
        differences: Of its answers.
        limits: What it may lose.
        exact: It is in single precision, where batch mates may change next to nothing.
    """
    found = []
    for name, limit, label in (("r2", limits.r2_drop, "R2 of mu"), ("tau", limits.tau_drop, "Kendall's tau")):
        drop = _difference(metrics.get(name), plain.get(name))
        if drop is None and plain.get(name) is not None:
            found.append(f"{label} is unknown")
        elif drop is not None and not -drop <= limit:
            found.append(f"{label} drops by {-drop:.4f}, allowed {limit:g}")
    for level in LEVELS:
        shift = _difference(metrics.get(level), plain.get(level))
        if shift is None and plain.get(level) is not None:
            found.append(f"coverage of {level.upper()} is unknown")
        elif shift is not None and not abs(shift) <= limits.coverage_shift:
            found.append(
                f"coverage of {level.upper()} shifts by {shift:+.4f}, allowed {limits.coverage_shift:g}"
            )
    found += [
        f"probabilities of {name} shift by {value:.4f} on average, allowed {limits.probability_shift:g}"
        for name, value in differences.probability.items()
        if not value <= limits.probability_shift
    ]
    allowed = min(EXACT, limits.batch_mates) if exact else limits.batch_mates
    found += [
        f"batch mates change {name} by {value:.2g} of its spread, allowed {allowed:g}"
        for name, value in differences.batch_mates.items()
        if not value <= allowed
    ]
    return tuple(found)


def _difference(value: float | None, reference: float | None) -> float | None:
    return None if value is None or reference is None else value - reference


def best_of(results: Sequence[VariantResult], latency_ms: Mapping[str, Mapping[str, float]]) -> str:
    """The accepted variant with the smallest geometric mean of times over all shapes."""
    names = [result.name for result in results if result.accepted]

    def slowness(name: str) -> float:
        return math.fsum(math.log(times[name]) for times in latency_ms.values())

    return min(names, key=slowness)


def markdown_of(content: Mapping[str, Any], command: str) -> str:
    """The report as a page."""
    machine, data = content["machine"], content["data"]
    artifact = content["artifact"]
    best = ", ".join(f"{name} on {provider}" for provider, name in content["best"].items())
    lines = [
        f"# Variants of {artifact['artifact_id']}",
        "",
        f"`{command}`",
        "",
        f"Artifact version {artifact['artifact_version']}, tailcast {content['versions']['tailcast']}, ONNX Runtime "
        f"{content['versions']['onnxruntime']}, {machine['processor']} ({machine['instructions']}), "
        f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}, {content['created']}.",
        "",
        f"Best here: **{best}**.",
        "",
        "## Answers",
        "",
        f"{data['num_groups']} (prompt, served model) groups of `{data['name']}`; int8 was calibrated on "
        f"{data['calibration_prompts']} other prompts. In brackets: the difference from fp32.",
        "",
        "| variant | MB | R2 mu | tau | P50 | P90 | P99 | CRPS | batch mates | accepted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    plain = content["variants"][PLAIN]["metrics"]
    for name, variant in content["variants"].items():
        metrics = variant["metrics"]
        cells = [_with_difference(metrics.get(key), plain.get(key), name) for key in ("r2", "tau", *LEVELS)]
        crps = metrics.get("crps_tokens")
        mates = max(variant["batch_mates"].values(), default=None)
        lines.append(
            f"| {name} | {variant['bytes'] / 1e6:.1f} | "
            + " | ".join(cells)
            + f" | {'-' if crps is None else format(crps, '.2f')} | {'-' if mates is None else format(mates, '.1g')}"
            + f" | {'yes' if variant['accepted'] else 'no: ' + '; '.join(variant['reasons'])} |"
        )
    limits = content["limits"]
    lines += [
        "",
        f"Allowed: R2 and tau {limits['r2_drop']:g} and {limits['tau_drop']:g} lower, coverage {limits['coverage_shift']:g} "
        f"off, probabilities {limits['probability_shift']:g} off on average. Batch mates: largest change of an answer by "
        f"the other prompts in its batch, as a share of the output's spread; allowed {limits['batch_mates']:g}, in single "
        f"precision {EXACT:g}.",
        "",
        "## Time of a call",
        "",
    ]
    for provider, shapes in content["latency_ms"].items():
        names = list(next(iter(shapes.values())))
        what = "CPU time" if provider == "cpu" else "wall time"
        lines += [
            f"{provider}, smallest {what} of {content['config']['repetitions']} calls in ms, variants in turn; in brackets "
            f"how many times faster than {PLAIN}.",
            "",
            "| batch x tokens | " + " | ".join(names) + " |",
            "|---" * (len(names) + 1) + "|",
        ]
        for shape, times in shapes.items():
            cells = [f"{times[name]:.1f} ({times[PLAIN] / times[name]:.2f})" for name in names]
            lines.append(f"| {shape} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _with_difference(value: float | None, reference: float | None, name: str) -> str:
    if value is None:
        return "-"
    difference = _difference(value, reference)
    return f"{value:.4f}" if name == PLAIN or difference is None else f"{value:.4f} ({difference:+.4f})"
