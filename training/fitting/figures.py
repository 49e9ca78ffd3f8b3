"""Figures of a file of fits: some groups with their densities, parameters, PIT, standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from scheduler_core.lengths import Exponential, Gamma, LengthDistribution, LogT, Weibull
from scheduler_core.report.plotting import COLORS, GRAY, INK, new_figure, write_png
from training.fitting.estimate import Family, FloatArray, SortedLengths, compared_families, estimate
from training.fitting.fits import FitOptions
from training.fitting.samples import CARRIED
from training.fitting.summary import FAMILY_NAMES, PARAMETERS, FitNumbers, read_numbers

MAX_POINTS = 20_000
_SEED = 20_260_101
_NUM_PANELS = 6
_FAMILY_COLORS = dict(zip(FAMILY_NAMES, (INK, *(COLORS[i] for i in (3, 0, 1, 2)), GRAY), strict=True))
#: Parameter -> label of its axis, and whether that is logarithmic.
_AXES = {
    "mu": ("mu (ln tokens)", False),
    "sigma": ("sigma (ln tokens)", True),
    "nu": ("nu", True),
    "shape": ("shape", True),
    "scale": ("scale (tokens)", True),
}
_PIT_GROUPS, _PIT_SAMPLES, _PIT_BINS = 2_000, 100_000, 20
# Samples of one group that enter the PIT at most: one huge group is not the file.
_PIT_SAMPLES_PER_GROUP = 1_000


@dataclass(frozen=True, slots=True)
class FitRow:
    """One row of a fits file with its samples.

    Attributes:
        title: Its prompt, or its keys.
        parameters: Of the family.
        p_value: Of the plain test and, if the file has one, of the bootstrap; NaN for null.
        lengths, finished, weights: Samples [N]; weights 1 if the file has none.
    """

    title: str
    parameters: dict[str, float]
    ks_p: float
    lengths: NDArray[np.int64]
    finished: NDArray[np.bool_]
    weights: FloatArray


def read_rows(path: str | Path, rows: Sequence[int] | NDArray[np.int64]) -> list[FitRow]:
    """The rows of these numbers, in this order."""
    numbers = [int(row) for row in rows]
    with duckdb.connect(config={"threads": 1}) as connection:
        table = connection.sql(
            "SELECT * FROM read_parquet($1, file_row_number = true) WHERE file_row_number IN (SELECT unnest($2))",
            params=[str(path), numbers],
        ).to_arrow_table()
    by_number = {row["file_row_number"]: _fit_row(row) for row in table.to_pylist()}
    return [by_number[number] for number in numbers]


def _fit_row(row: dict[str, Any]) -> FitRow:
    names = list(row)
    first = min(names.index(name) for name in PARAMETERS if name in row)
    keys = [name for name in names[:first] if name not in CARRIED]
    title = row.get("prompt") or ", ".join(f"{key}={row[key]!r}" for key in keys)
    weights = row.get("weights")
    return FitRow(
        " ".join(str(title).split()),
        {name: row[name] for name in PARAMETERS if name in row},
        math.nan if row["ks_p"] is None else row["ks_p"],
        np.array(row["output_tokens"], dtype=np.int64),
        np.array(row["finished"], dtype=bool),
        np.ones(len(row["finished"])) if weights is None else np.array(weights, dtype=np.float64),
    )


def distribution_of(family: Family, parameters: Mapping[str, Any]) -> LengthDistribution:
    """The length distribution(s) with these parameters."""
    if "mu" in parameters:
        return LogT(parameters["mu"], parameters["sigma"], parameters["nu"])
    if family.label == "exponential":
        return Exponential(parameters["scale"])
    kind = Gamma if family.label == "gamma" else Weibull
    return kind(parameters["shape"], parameters["scale"])


def random_rows(numbers: FitNumbers, usable: NDArray[np.bool_], count: int = MAX_POINTS) -> NDArray[np.int64]:
    """Up to `count` of the usable rows in random order, the same ones each time."""
    return np.random.default_rng(_SEED).permutation(np.flatnonzero(usable))[:count]


def rows_by_length(numbers: FitNumbers, count: int) -> list[int]:
    """Up to `count` rows of tested fits at even steps of rank, from the shortest to the longest typical length."""
    columns = numbers.columns
    typical = (
        columns["mu"] if "mu" in columns else np.log(columns["scale"] * columns.get("shape", np.ones(1)))
    )
    rows = np.flatnonzero(numbers.tested)
    rows = rows[np.argsort(typical[rows], kind="stable")]
    if len(rows) > count:
        rows = rows[(np.linspace(0.05, 0.95, count) * (len(rows) - 1)).astype(np.int64)]
    return [int(row) for row in rows]


def write_figure(fits_path: str | Path, png_path: str | Path, options: FitOptions) -> None:
    """Writes the figure of `draw_fits` as PNG."""
    write_png(draw_fits(read_numbers(fits_path), options), png_path)


def draw_fits(numbers: FitNumbers, options: FitOptions) -> Any:
    """Up to six groups of a fits file, from the shortest to the longest typical output, with their densities.

    The file's own family is drawn as the file has it; those it was compared with are fitted again. A mark stands where
    samples were censored; they count in no bar: bars and curve agree left of it. Without a group to
    draw, where each is constant, censored throughout or too small, the figure is a line of text.

    Args:
        numbers: Of the file.
        options: Of the fit.
    """
    rows = read_rows(numbers.path, rows_by_length(numbers, _NUM_PANELS))
    if not rows:
        figure, axes = new_figure(6, 1)
        axes[0].set_axis_off()
        figure.text(0.5, 0.5, "no group has samples of several lengths to fit", ha="center", va="center")
        return figure
    others = {
        label: family
        for label, family in compared_families(options.nu).items()
        if f"{label}_log_likelihood" in numbers.columns and label != options.fitted_family.label
    }
    lines = -(-len(rows) // 3)
    figure, axes = new_figure(12, 0.6 + 3.2 * lines, rows=lines, columns=3)
    handles: dict[str, Any] = {}
    for number, axis in enumerate(axes):
        if number >= len(rows):
            axis.set_visible(False)
            continue
        _draw_group(axis, rows[number], options, others)
        curves, names = axis.get_legend_handles_labels()
        handles |= dict(zip(names, curves, strict=True))
        if number % 3 == 0:
            axis.set_ylabel("probability per token", fontsize=8)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=8, fontsize=8, frameon=False
    )
    return figure


def _draw_group(axis: Any, row: FitRow, options: FitOptions, others: Mapping[str, Family]) -> None:
    lengths = row.lengths.astype(np.float64)
    limits = np.unique(lengths[~row.finished])
    extent = max(lengths.max() - lengths.min(), 1.0)
    low, high = (
        max(0.0, lengths.min() - 0.35 * extent),
        lengths.max() + (0.8 if len(limits) else 0.35) * extent,
    )
    width = max(1.0, np.ceil((high - low) / 20))
    # Integers stand in the middle of their bin.
    edges = np.arange(np.floor(low) - 0.5, high + width, width)
    mass = row.weights / (row.weights.sum() * width)
    heights, _, _ = axis.hist(
        lengths[row.finished],
        bins=edges.tolist(),
        weights=mass[row.finished],
        color=COLORS[0],
        alpha=0.4,
        label="finished samples",
    )
    at = np.linspace(max(edges[0], 0.5), edges[-1], 500)
    curves: dict[str, FloatArray] = {}
    finished = row.finished if options.censoring == "right" else np.ones_like(row.finished)
    sample = SortedLengths.of(row.lengths, finished, np.array([0, len(lengths)]), row.weights)
    for label, family in others.items():
        fits = estimate(sample, family, integers=options.integers)
        if fits.fitted[0]:
            values, _ = family.parameters(fits.solution)
            parameters = {name: value[0] for name, value in values.items()}
            curves[label] = distribution_of(family, parameters).pdf(at)
    main = options.fitted_family
    curves[main.label] = distribution_of(main, row.parameters).pdf(at)
    for label, density in curves.items():
        is_main = label == main.label
        axis.plot(
            at,
            density,
            color=_FAMILY_COLORS[label],
            linewidth=2.0 if is_main else 1.0,
            label=FAMILY_NAMES[label] + (" (the fit)" if is_main else ""),
        )
    # A nearly constant group has a density like a needle, which would flatten everything else.
    tallest = float(np.max(heights))
    top = 1.15 * max(tallest, min(float(curves[main.label].max()), 1.8 * tallest))
    axis.set_ylim(0, top)
    axis.set_xlim(edges[0], edges[-1])
    if len(limits):
        # Of a censored sample only a lower bound is known.
        marks = np.full(len(limits), 0.03 * top)
        axis.plot(limits, marks, ">", color=COLORS[1], markersize=7, label="censored here", zorder=5)
        if len(limits) == 1:
            axis.axvline(limits[0], color=COLORS[1], linewidth=1, linestyle=":")
    axis.set_title(_title(row), fontsize=8)
    axis.set_xlabel("output tokens", fontsize=8)
    axis.tick_params(labelsize=7)


def _title(row: FitRow) -> str:
    values = ", ".join(
        f"{name} {value:.2f}" if value < 1000 else f"{name} {value:.4g}"
        for name, value in row.parameters.items()
    )
    num_censored = int((~row.finished).sum())
    samples = f"{len(row.lengths)} samples" + (f", {num_censored} censored" if num_censored else "")
    # A dollar sign would start a formula.
    title = shortened(row.title, 52).replace("$", r"\$")
    return f"{title}\n{values}; {samples}; KS p {row.ks_p:.2g}"


def shortened(text: str, limit: int) -> str:
    """Text of at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def draw_parameters(numbers: FitNumbers) -> Any:
    """Histograms of the parameters that differ between groups, and sigma over mu if there are both."""
    rows = random_rows(numbers, numbers.fitted)
    columns = {name: numbers.columns[name][rows] for name in numbers.parameters}
    varying = [name for name, values in columns.items() if len(np.unique(values[np.isfinite(values)])) > 1]
    both = {"mu", "sigma"} <= set(varying)
    count = max(len(varying) + both, 1)
    figure, axes = new_figure(4.2 * count, 3.6, columns=count)
    for axis, name in zip(axes, varying, strict=False):
        values = columns[name][np.isfinite(columns[name])]
        label, is_log = _AXES[name]
        edges = np.linspace(values.min(), values.max(), 41)
        if is_log:
            edges = np.geomspace(values.min(), values.max() * 1.001, 41)
            axis.set_xscale("log")
        axis.hist(values, bins=edges.tolist(), color=COLORS[0])
        num_infinite = len(rows) - len(values)
        axis.set_xlabel(label + (f"; {num_infinite} groups at infinity not drawn" if num_infinite else ""))
        axis.set_ylabel("groups")
    if both:
        points = {"s": 5, "alpha": 0.25, "color": INK, "linewidths": 0, "rasterized": True}
        axes[-1].scatter(columns["mu"], columns["sigma"], **points)
        axes[-1].set_yscale("log")
        axes[-1].set_xlabel(_AXES["mu"][0])
        axes[-1].set_ylabel(_AXES["sigma"][0])
    if not varying:
        axes[0].text(0.5, 0.5, "all groups have the same parameters", ha="center")
    return figure


def pit_rows(numbers: FitNumbers) -> list[FitRow]:
    """Rows whose samples enter the PIT: random ones with up to 100,000 samples together."""
    rows = random_rows(numbers, numbers.tested)
    counts = np.minimum(numbers.columns["num_samples"][rows], _PIT_SAMPLES_PER_GROUP)
    fitting = int(np.searchsorted(np.cumsum(counts), _PIT_SAMPLES, side="right"))
    return read_rows(numbers.path, rows[: max(1, min(fitting, _PIT_GROUPS))])


def pit_masses(rows: Iterable[FitRow], family: Family, bins: int = _PIT_BINS) -> FloatArray:
    """Fraction of the samples' probability integral transform in each of `bins` equal bins of [0, 1].

    After Czado et al. 2009: an integer x counts evenly over [F(x - 1/2), F(x + 1/2)], a censored sample over
    [F(limit), 1]; each group under the parameters of its row.
    """
    rng = np.random.default_rng(0)
    edges = np.linspace(0.0, 1.0, bins + 1)
    total = np.zeros(bins + 1)
    weight = 0.0
    for row in rows:
        part = rng.permutation(len(row.lengths))[:_PIT_SAMPLES_PER_GROUP]
        x, finished, weights = row.lengths[part].astype(np.float64), row.finished[part], row.weights[part]
        distribution = distribution_of(family, row.parameters)
        low = np.asarray(distribution.cdf(np.where(finished, np.maximum(x - 0.5, 0.0), x)))
        high = np.where(finished, np.asarray(distribution.cdf(x + 0.5)), 1.0)
        width = np.maximum(high - low, 1e-12)
        total += weights @ np.clip((edges[None, :] - low[:, None]) / width[:, None], 0.0, 1.0)
        weight += float(weights.sum())
    masses = np.diff(total / weight)
    # What lies below 0 or above 1 by rounding belongs to the outer bins.
    masses[0] += total[0] / weight
    return np.asarray(masses)


def draw_pit(rows: Sequence[FitRow], family: Family) -> Any:
    """Histogram and cumulative curve of the PIT."""
    masses = pit_masses(rows, family)
    edges = np.linspace(0.0, 1.0, len(masses) + 1)
    figure, (left, right) = new_figure(10, 3.6, columns=2)
    heights = masses * len(masses)
    left.bar(edges[:-1], heights, 1 / len(masses), align="edge", color=COLORS[0], edgecolor="white")
    left.axhline(1, color=INK, linewidth=1, linestyle="--", label="if the fits are right")
    left.set_xlabel("F(x), the fit's probability of a shorter output")
    left.set_ylabel("density")
    left.set_ylim(0, 1.25 * max(1.0, float(heights.max())))
    left.legend(fontsize=8)
    difference = np.concatenate([[0.0], np.cumsum(masses)]) - edges
    right.plot(edges, difference, color=COLORS[0], marker="o", markersize=3)
    right.axhline(0, color=INK, linewidth=1, linestyle="--", label="if the fits are right")
    largest = max(0.02, 1.3 * float(np.abs(difference).max()))
    right.set_ylim(-largest, largest)
    right.set_xlabel("probability by the fit")
    right.set_ylabel("fraction of samples below, minus that")
    right.legend(fontsize=8)
    return figure


def draw_standard_errors(numbers: FitNumbers) -> Any | None:
    """Standard errors relative to sigma (or to the parameter itself); None if the file has none."""
    rows = random_rows(numbers, numbers.fitted)
    columns = {name: values[rows] for name, values in numbers.columns.items()}
    ratios: dict[str, FloatArray] = {}
    for name in numbers.parameters:
        if f"se_{name}" in columns:
            ratio = columns[f"se_{name}"] / columns["sigma" if name == "mu" else name]
            if (np.isfinite(ratio) & (ratio > 0)).any():
                ratios[name] = ratio
    if not ratios:
        return None
    counts = columns["num_samples"]
    figure, axes = new_figure(4.6 * len(ratios), 3.6, columns=len(ratios))
    for axis, (name, ratio) in zip(axes, ratios.items(), strict=True):
        usable = np.isfinite(ratio) & (ratio > 0)
        label = f"standard error of {name} / {'sigma' if name == 'mu' else name}"
        if len(np.unique(counts)) > 3:
            jitter = np.exp(np.random.default_rng(0).uniform(-0.02, 0.02, int(usable.sum())))
            points = {"s": 6, "alpha": 0.3, "color": COLORS[0], "linewidths": 0, "rasterized": True}
            axis.scatter(counts[usable] * jitter, ratio[usable], **points)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xlabel("samples of the group")
            axis.set_ylabel(label)
            curve = _expected_ratio(columns, name, np.unique(counts))
            if curve is not None:
                axis.plot(np.unique(counts), curve, color=COLORS[1], linewidth=1.5, label="expected")
        else:
            low, high = np.quantile(ratio[usable], [0.002, 0.998])
            edges = np.geomspace(low, max(high, 1.01 * low), 41)
            axis.hist(np.clip(ratio[usable], low, high), bins=edges.tolist(), color=COLORS[0])
            axis.set_xscale("log")
            axis.set_xlabel(label)
            axis.set_ylabel("groups")
            for count in np.unique(counts):
                curve = _expected_ratio(columns, name, np.array([count]))
                if curve is not None:
                    axis.axvline(
                        curve[0], color=COLORS[1], linewidth=1.5, label=f"expected of {count:g} samples"
                    )
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    return figure


def _expected_ratio(columns: Mapping[str, FloatArray], name: str, counts: FloatArray) -> FloatArray | None:
    """Standard error of a log-t of one nu for all groups, by its Fisher information."""
    nu = np.unique(columns["nu"]) if "nu" in columns else np.empty(0)
    if len(nu) != 1 or name == "nu":
        return None
    # (nu + 3) / (nu + 1) and (nu + 3) / (2 nu) with nu -> inf allowed.
    inverse = 1.0 / nu[0]
    numerator = (1 + 3 * inverse) / (1 + inverse) if name == "mu" else (1 + 3 * inverse) / 2
    return np.asarray(np.sqrt(numerator / counts))
