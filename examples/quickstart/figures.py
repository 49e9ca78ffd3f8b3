"""The figures of the report; each function draws one PNG from results of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.lengths import LogT
from scheduler_core.report.plotting import GRAY, INK, new_figure, svg, write_png
from scheduler_core.shell.files import atomic_file

ACCENT, WARM = "#2a7f9e", "#d97b29"
POLICY_COLORS = (GRAY, WARM, ACCENT, INK)


def length_distributions(fits: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Sampled lengths of some prompts with their fitted log-t densities; truncated samples are at `max_tokens`."""
    columns = 3
    rows = (len(fits) + columns - 1) // columns
    figure, axes = new_figure(11, 2.9 * rows, rows=rows, columns=columns)
    for axis in axes[len(fits) :]:
        axis.set_visible(False)
    for axis, fit in zip(axes, fits, strict=False):
        lengths = np.asarray(fit["output_tokens"], dtype=float)
        finished = np.asarray(fit["finished"], dtype=bool)
        max_tokens = float(fit["max_tokens"])
        bins = np.linspace(0, max_tokens, 17)
        axis.hist(
            [lengths[finished], lengths[~finished]],
            bins=bins,
            stacked=True,
            density=True,
            color=[ACCENT, WARM],
            alpha=0.55,
            label=["finished", "truncated"],
        )
        grid = np.linspace(1, 1.35 * max_tokens, 400)
        axis.plot(grid, LogT(fit["mu"], fit["sigma"], fit["nu"]).pdf(grid), color=INK, label="log-t fit")
        axis.axvline(max_tokens, color=WARM, linewidth=1, linestyle=":")
        # Limit the y axis, because the density of nearly constant lengths would flatten the histogram.
        tallest = max(patch.get_height() + patch.get_y() for group in axis.containers for patch in group)
        axis.set_ylim(0, 1.6 * tallest)
        axis.set_title(_shortened(str(fit["prompt"]), 44), fontsize=9)
        axis.tick_params(labelsize=8)
        axis.set_xlabel(f"output tokens; mu {fit['mu']:.2f}, sigma {fit['sigma']:.2f}", fontsize=8)
    axes[0].legend(fontsize=8)
    write_png(figure, path)


def calibration(
    predicted: Mapping[str, np.ndarray],
    fitted: Mapping[str, np.ndarray],
    coverage: Sequence[tuple[float, float]],
    path: Path,
) -> None:
    """Left: predicted against fitted mu. Middle: sigma. Right: nominal against observed coverage.

    Args:
        predicted: Arrays `mu` and `sigma`, one entry per test prompt.
        fitted: The same arrays, fitted to the prompts' samples.
        coverage: Pairs (nominal, observed) in increasing order of nominal.
        path: PNG to write.
    """
    figure, (left, middle, right) = new_figure(11, 3.7, columns=3)
    for axis, name in ((left, "mu"), (middle, "sigma")):
        axis.scatter(fitted[name], predicted[name], s=14, alpha=0.6, color=ACCENT)
        low = min(fitted[name].min(), predicted[name].min())
        high = max(fitted[name].max(), predicted[name].max())
        axis.plot([low, high], [low, high], color=GRAY, linewidth=1)
        axis.set_xlabel(f"{name} fitted to the prompt's samples")
        axis.set_ylabel(f"{name} predicted from the text")
    nominal, observed = np.asarray(coverage, dtype=float).T
    right.plot([0, 1], [0, 1], color=GRAY, linewidth=1)
    right.plot(nominal, observed, color=ACCENT, marker="o", markersize=4)
    right.set_xlabel("nominal probability")
    right.set_ylabel("fraction of outputs below the quantile")
    right.set_xlim(0, 1)
    right.set_ylim(0, 1)
    write_png(figure, path)


def latency_comparison(results: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Mean, P90 and P99 of time to first token and of normalized latency, as PNG and SVG.

    Args:
        results: Policy label -> metric (`ttft_s`, `normalized_latency_s`) -> statistic (`mean`, `p90`, `p99`) -> seconds.
        path: PNG to write; the SVG is written next to it.
    """
    figure, axes = new_figure(11, 3.8, columns=2)
    statistics = ("mean", "p90", "p99")
    titles = {
        "ttft_s": "time to first token (s)",
        "normalized_latency_s": "normalized latency (s per output token)",
    }
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        width = 0.8 / len(results)
        for number, (label, metrics) in enumerate(results.items()):
            positions = np.arange(len(statistics)) + (number - (len(results) - 1) / 2) * width
            heights = [metrics[metric][statistic] for statistic in statistics]
            bars = axis.bar(
                positions, heights, width, label=label, color=POLICY_COLORS[number % len(POLICY_COLORS)]
            )
            axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
        axis.set_xticks(
            range(len(statistics)), [name.upper() if name != "mean" else name for name in statistics]
        )
        axis.set_title(title, fontsize=10)
        axis.grid(visible=False, axis="x")
    axes[0].legend(fontsize=8)
    write_png(figure, path)
    with atomic_file(path.with_suffix(".svg")) as temporary:
        temporary.write_text(svg(figure), encoding="utf-8")


def _shortened(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
