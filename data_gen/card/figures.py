"""The three figures of a data card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data_gen.card.lengths import Lengths
from data_gen.card.statistics import Spread, survival
from scheduler_core.errors import MissingExtraError
from scheduler_core.files import atomic_file

INK, FINISHED, CUT, GUIDE = "#1c2733", "#2a7f9e", "#d97b29", "#9aa5b1"
_BINS = 40
_SHADES = ("#d97b29", "#7a9e2a", "#8a5a9e", "#b0413e", "#9aa5b1")
_TITLES = {
    "cv": "coefficient of variation",
    "p90_p50": "P90 / P50",
    "p99_p50": "P99 / P50",
    "top10_share": "share of tokens in the longest tenth",
    "skewness": "skewness",
}

FIGURES = ("lengths.png", "survival.png", "spread.png")


def draw(lengths: Lengths, spread: Spread, unit: str, folder: Path) -> list[str]:
    """Draws the figures into a folder and returns their names; the spread only if some prompt has enough answers."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingExtraError("matplotlib", "gen") from error
    drawn = []
    for name, painter in zip(FIGURES, (_histogram, _survival, _spread), strict=True):
        if painter is _spread and not len(spread.counts):
            continue
        figure = plt.figure(figsize=(11, 6.4) if painter is _spread else (8, 4.6), layout="constrained")
        try:
            painter(figure, lengths, spread, unit)
            with atomic_file(folder / name) as temporary:
                figure.savefig(temporary, dpi=130, format="png")
        finally:
            plt.close(figure)
        drawn.append(name)
    return drawn


def _tidy(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9)


def _plain_logarithms(axis: Any, low: float, high: float, subdivided: float = 3.2) -> None:
    """Ticks of a logarithmic axis as plain numbers, with 2 and 5 between the powers of ten on short axes."""
    from matplotlib.ticker import LogLocator, NullFormatter

    short = high / low < 10**subdivided
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if short else (1,), numticks=15))
    axis.set_major_formatter(lambda value, position: f"{value:,.0f}" if value >= 1 else f"{value:.3g}")
    axis.set_minor_formatter(NullFormatter())


def _edges(low: float, high: float, num_bins: int) -> np.ndarray:
    """Edges in equal steps of the logarithm that lie between whole numbers, so that no bin of small ones is empty."""
    return np.asarray(np.unique(np.round(np.geomspace(max(low, 1), max(high, 2) + 1, num_bins))) - 0.5)


def _histogram(figure: Any, lengths: Lengths, spread: Spread, unit: str) -> None:
    axis = figure.subplots()
    low, high = float(lengths.length.min()), float(lengths.length.max())
    edges = _edges(low, high, _BINS)
    shares = {
        name: np.histogram(lengths.length[chosen], edges)[0] / len(lengths.length)
        for name, chosen in (("finished", ~lengths.cut), ("cut", lengths.cut))
    }
    widths = np.diff(edges)
    axis.bar(
        edges[:-1], shares["finished"], widths, align="edge", color=FINISHED, label="finished", linewidth=0
    )
    top = 1.3 * float(shares["finished"].max() or shares["cut"].max())
    if lengths.cut.any():
        heights = np.minimum(shares["cut"], top - shares["finished"])
        axis.bar(
            edges[:-1],
            heights,
            widths,
            shares["finished"],
            align="edge",
            color=CUT,
            label="cut at the cap",
            linewidth=0,
        )
        # Answers cut at one cap stand in one bin, which would flatten all others.
        for number in np.flatnonzero(shares["cut"] > heights):
            axis.annotate(
                f"{shares['cut'][number]:.0%} cut",
                (edges[number], 0.97 * top),
                ha="right",
                va="top",
                color=CUT,
                fontsize=9,
            )
    median = float(np.median(lengths.length))
    beyond = "at least " if lengths.cut.mean() >= 0.5 else ""
    axis.axvline(median, color=INK, linewidth=1, linestyle="--", label=f"median {beyond}{median:,.0f}")
    axis.set_ylim(0, top)
    axis.set_xscale("log")
    _plain_logarithms(axis.xaxis, low, high)
    axis.yaxis.set_major_formatter(lambda value, position: f"{value:.1%}")
    axis.set_xlabel(f"answer length ({unit})")
    axis.set_ylabel("share of answers in the bin")
    axis.legend(frameon=False, loc="upper left", fontsize=9)
    axis.set_title(f"{len(lengths.length):,} answers, {lengths.cut.mean():.1%} cut", fontsize=10)
    _tidy(axis)


def _survival(figure: Any, lengths: Lengths, spread: Spread, unit: str) -> None:
    axis = figure.subplots()
    at, alive = survival(lengths.length, lengths.cut)
    shown = alive > 0
    _tidy(axis)
    if not shown.any():
        axis.text(0.5, 0.5, "no answer is known to be longer than another", ha="center", color=GUIDE)
        axis.set_axis_off()
        return
    axis.step(at[shown], alive[shown], where="post", color=FINISHED, linewidth=1.8, label="all answers")
    counts = np.bincount(lengths.category, minlength=len(lengths.categories))
    named = [
        number
        for number in np.argsort(-counts, kind="stable")[:5]
        if lengths.categories[number] and counts[number]
    ]
    for number, shade in zip(named if len(named) > 1 else [], _SHADES, strict=False):
        chosen = lengths.category == number
        at, alive = survival(lengths.length[chosen], lengths.cut[chosen])
        shown = alive > 0
        axis.step(
            at[shown],
            alive[shown],
            where="post",
            color=shade,
            linewidth=0.9,
            label=lengths.categories[number][:24],
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    _plain_logarithms(axis.xaxis, float(lengths.length.min()), float(lengths.length.max()))
    bottom, _ = axis.get_ylim()
    _plain_logarithms(axis.yaxis, bottom, 1.0, 2.0)
    axis.set_xlabel(f"answer length x ({unit})")
    axis.set_ylabel("share of answers longer than x")
    axis.legend(frameon=False, fontsize=8)
    axis.set_title("a power law would be a straight line; cut answers by Kaplan and Meier", fontsize=10)
    axis.grid(True, which="major", color=GUIDE, alpha=0.3, linewidth=0.6)


def _spread(figure: Any, lengths: Lengths, spread: Spread, unit: str) -> None:
    axes = figure.subplots(2, 3).ravel()
    for axis, (name, values) in zip(axes, spread.measures.items(), strict=False):
        shown = values[np.isfinite(values)]
        axis.set_title(_TITLES[name], fontsize=10)
        _tidy(axis)
        if not len(shown):
            axis.text(0.5, 0.5, "not defined", ha="center", transform=axis.transAxes, color=GUIDE)
            continue
        low, high = (float(edge) for edge in np.percentile(shown, (0.5, 99.5)))
        high = high if high > low else low + 1
        axis.hist(np.clip(shown, low, high), bins=np.linspace(low, high, 41), color=FINISHED)
        axis.axvline(shown.mean(), color=INK, linewidth=1, linestyle="--", label=f"mean {shown.mean():.2f}")
        axis.legend(frameon=False, fontsize=8)
        axis.set_ylabel("prompts", fontsize=8)
    last = axes[-1]
    last.scatter(
        spread.medians, spread.measures["cv"], s=4, color=FINISHED, alpha=0.25, linewidths=0, rasterized=True
    )
    last.set_xscale("log")
    _plain_logarithms(last.xaxis, float(spread.medians.min()), float(spread.medians.max()), 2.0)
    last.set_title("coefficient of variation by median length", fontsize=10)
    last.set_xlabel(f"median length ({unit})", fontsize=8)
    _tidy(last)
    count = (
        f"{spread.counts.min()}"
        if spread.counts.min() == spread.counts.max()
        else (f"{spread.counts.min()} to {spread.counts.max()}")
    )
    figure.suptitle(
        f"spread within {len(spread.counts):,} prompts of {count} answers; the outer bins hold all beyond",
        fontsize=10,
    )
