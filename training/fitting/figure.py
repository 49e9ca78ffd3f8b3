"""Histograms of some groups' answer lengths with the fitted densities, and what all figures of fits share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler_core.files import atomic_file
from scheduler_core.lengths import LengthDistribution
from training.fitting.families import Family
from training.fitting.fit_rows import (
    FitRow,
    Fitting,
    compared_in,
    distribution_of,
    fitting_of,
    read_rows,
    scan_fits,
    spread_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 6
INK, ACCENT, WARM, GREY, RED = "#1c2733", "#2a7f9e", "#d97b29", "#9aa5b1", "#b3202c"
COLOURS = {
    "log_t": INK,
    "log_t_free": "#7b4fa3",
    "log_normal": ACCENT,
    "gamma": WARM,
    "weibull": "#7a9e2a",
    "exponential": GREY,
}
LABELS = {
    "log_t": "log-t",
    "log_t_free": "log-t, free nu",
    "log_normal": "log-normal",
    "gamma": "gamma",
    "weibull": "Weibull",
    "exponential": "exponential",
}


def new_figure(width: float, height: float) -> Figure:
    """A figure of that size in inches that belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str | Path) -> None:
    """Writes a PNG, atomically."""
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def shortened(text: str, limit: int) -> str:
    """Text of at most `limit` characters in which no dollar sign starts a formula."""
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    return short.replace("$", r"\$")


def draw_fits(fits_path: str | Path, png_path: str | Path) -> None:
    """Draws up to six groups of a fits file, from the shortest to the longest typical answer, with their densities.

    The file's own family is drawn as the file has it; those it was compared with are fitted again. A mark
    stands where answers were cut, which count in no bar: bars and curve agree left of it. The figure says so if no group can be shown, which is
    when each is constant, cut throughout or too small.
    """
    scan = scan_fits(fits_path)
    rows = read_rows(fits_path, spread_rows(scan, PANELS))
    if not rows:
        figure = new_figure(6, 1)
        figure.text(0.5, 0.5, "no group has answers of several lengths to fit", ha="center", va="center")
        save(figure, png_path)
        return
    fitting = fitting_of(rows)
    others = compared_in(scan.names, fitting.family.nu if fitting.family.label == "log_t" else 3.5)
    others.pop(fitting.family.label, None)
    lines = -(-len(rows) // 3)
    figure = new_figure(12, 0.6 + 3.2 * lines)
    axes = figure.subplots(lines, 3, squeeze=False)
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    handles: dict[str, Any] = {}
    for axis, row in zip(axes.flat, rows, strict=False):
        _panel(axis, row, fitting, others)
        found, names = axis.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    for line in axes:
        line[0].set_ylabel("probability per token", fontsize=8)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=8, fontsize=8, frameon=False
    )
    save(figure, png_path)


def _panel(axis: Axes, row: FitRow, fitting: Fitting, others: dict[str, Family]) -> None:
    lengths = row.lengths.astype(np.float64)
    cut = np.unique(lengths[~row.finished])
    span = max(lengths.max() - lengths.min(), 1.0)
    low, high = max(0.0, lengths.min() - 0.35 * span), lengths.max() + (0.8 if len(cut) else 0.35) * span
    width = max(1.0, np.ceil((high - low) / 20))
    # Whole numbers stand in the middle of their bin.
    edges = np.arange(np.floor(low) - 0.5, high + width, width)
    weights = np.ones(len(lengths)) if row.weights is None else row.weights
    mass = weights / (weights.sum() * width)
    heights, _, _ = axis.hist(
        lengths[row.finished],
        bins=edges.tolist(),
        weights=mass[row.finished],
        color=ACCENT,
        alpha=0.4,
        label="finished answers",
    )
    at = np.linspace(max(edges[0], 0.5), edges[-1], 500)
    drawn: dict[str, LengthDistribution] = {}
    for label, family in others.items():
        fits = fitting.again(row, family)
        if fits.fitted[0]:
            found, _ = family.parameters(fits.solution)
            drawn[label] = distribution_of(family, {name: values[0] for name, values in found.items()})
    main = fitting.family.label
    drawn[main] = distribution_of(fitting.family, row.parameters)
    for label, distribution in drawn.items():
        axis.plot(
            at,
            distribution.pdf(at),
            color=COLOURS[label],
            linewidth=2.0 if label == main else 1.0,
            label=LABELS[label] + (" (the fit)" if label == main else ""),
        )
    # A nearly constant group has a density like a needle, which would flatten everything else.
    tallest = float(np.max(heights))
    top = 1.15 * max(tallest, min(float(drawn[main].pdf(at).max()), 1.8 * tallest))
    axis.set_ylim(0, top)
    axis.set_xlim(edges[0], edges[-1])
    if len(cut):
        # All that is known of a cut answer is that it lies further right.
        axis.plot(
            cut, np.full(len(cut), 0.03 * top), ">", color=WARM, markersize=7, label="cut here", zorder=5
        )
        if len(cut) == 1:
            axis.axvline(cut[0], color=WARM, linewidth=1, linestyle=":")
    axis.set_title(_title(row), fontsize=8)
    axis.set_xlabel("answer tokens", fontsize=8)
    axis.tick_params(labelsize=7)


def _title(row: FitRow) -> str:
    values = ", ".join(
        f"{name} {value:.2f}" if value < 1000 else f"{name} {value:.4g}"
        for name, value in row.parameters.items()
    )
    num_cut = int((~row.finished).sum())
    answers = f"{len(row.lengths)} answers" + (f", {num_cut} cut" if num_cut else "")
    return f"{shortened(row.title, 52)}\n{values}; {answers}; KS p {row.numbers.get('ks_p', np.nan):.2g}"
