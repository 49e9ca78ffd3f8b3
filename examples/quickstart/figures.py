"""The figures of the report; each function draws one PNG from data that earlier steps wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scheduler_core.files import atomic_file
from scheduler_core.lengths import LogT

INK, ACCENT, WARM, GREY = "#1c2733", "#2a7f9e", "#d97b29", "#9aa5b1"
POLICY_COLOURS = (GREY, WARM, ACCENT, INK)


def length_distributions(fits: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Sampled lengths of some prompts with their fitted log-t densities; censored answers stand at the cap."""
    columns = 3
    rows = (len(fits) + columns - 1) // columns
    figure, axes = plt.subplots(rows, columns, figsize=(11, 2.9 * rows), squeeze=False)
    for axis in axes.flat[len(fits) :]:
        axis.set_visible(False)
    for axis, fit in zip(axes.flat, fits, strict=False):
        lengths = np.asarray(fit["output_tokens"], dtype=float)
        finished = np.asarray(fit["finished"], dtype=bool)
        cap = float(fit["max_tokens"])
        bins = np.linspace(0, cap, 17)
        axis.hist(
            [lengths[finished], lengths[~finished]],
            bins=bins,
            stacked=True,
            density=True,
            color=[ACCENT, WARM],
            alpha=0.55,
            label=["finished", "cut at the cap"],
        )
        grid = np.linspace(1, 1.35 * cap, 400)
        axis.plot(grid, LogT(fit["mu"], fit["sigma"], fit["nu"]).pdf(grid), color=INK, label="log-t fit")
        axis.axvline(cap, color=WARM, linewidth=1, linestyle=":")
        # A nearly constant answer has a density like a needle, which would flatten everything else.
        tallest = max(patch.get_height() + patch.get_y() for group in axis.containers for patch in group)
        axis.set_ylim(0, 1.6 * tallest)
        axis.set_title(_shortened(str(fit["prompt"]), 44), fontsize=9)
        axis.tick_params(labelsize=8)
        axis.set_xlabel(f"answer tokens; mu {fit['mu']:.2f}, sigma {fit['sigma']:.2f}", fontsize=8)
    axes.flat[0].legend(fontsize=8)
    _save(figure, path)


def calibration(
    predicted: Mapping[str, np.ndarray],
    fitted: Mapping[str, np.ndarray],
    coverage: Sequence[tuple[float, float]],
    path: Path,
) -> None:
    """Left: predicted against fitted mu. Middle: sigma. Right: nominal against observed coverage.

    Args:
        predicted: Arrays `mu` and `sigma`, one entry per test prompt.
        fitted: The same from the prompts' own samples.
        coverage: Pairs (nominal, observed) in increasing order of nominal.
        path: PNG to write.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.7))
    for axis, name in ((left, "mu"), (middle, "sigma")):
        axis.scatter(fitted[name], predicted[name], s=14, alpha=0.6, color=ACCENT)
        low = min(fitted[name].min(), predicted[name].min())
        high = max(fitted[name].max(), predicted[name].max())
        axis.plot([low, high], [low, high], color=GREY, linewidth=1)
        axis.set_xlabel(f"{name} fitted to the prompt's samples")
        axis.set_ylabel(f"{name} predicted from the text")
    nominal, observed = np.asarray(coverage, dtype=float).T
    right.plot([0, 1], [0, 1], color=GREY, linewidth=1)
    right.plot(nominal, observed, color=ACCENT, marker="o", markersize=4)
    right.set_xlabel("nominal probability")
    right.set_ylabel("share of answers below the quantile")
    right.set_xlim(0, 1)
    right.set_ylim(0, 1)
    _save(figure, path)


def latency_comparison(results: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Mean, P90 and P99 of time to first token and of per-token latency, one group of bars per statistic.

    Args:
        results: Policy label -> metric (`ttft_s`, `per_token_latency_s`) -> statistic (`mean`, `p90`, `p99`) -> seconds.
        path: PNG to write.
    """
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    statistics = ("mean", "p90", "p99")
    titles = {"ttft_s": "time to first token (s)", "per_token_latency_s": "latency per answer token (s)"}
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        width = 0.8 / len(results)
        for number, (label, metrics) in enumerate(results.items()):
            positions = np.arange(len(statistics)) + (number - (len(results) - 1) / 2) * width
            heights = [metrics[metric][statistic] for statistic in statistics]
            bars = axis.bar(
                positions, heights, width, label=label, color=POLICY_COLOURS[number % len(POLICY_COLOURS)]
            )
            axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
        axis.set_xticks(
            range(len(statistics)), [name.upper() if name != "mean" else name for name in statistics]
        )
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8)
    _save(figure, path)


def _shortened(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)
