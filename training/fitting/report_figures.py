"""The figures of the report on a file of fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.fitting.families import FloatArray
from training.fitting.figure import ACCENT, GREY, INK, WARM, new_figure, save
from training.fitting.fit_rows import FitRow, FitsScan, distribution_of, fitting_of

_AXES = {
    "mu": ("mu (ln tokens)", False),
    "sigma": ("sigma (ln tokens)", True),
    "nu": ("nu", True),
    "shape": ("shape", True),
    "scale": ("scale (tokens)", True),
}
_PIT_GROUPS, _PIT_ANSWERS, _PIT_BINS = 2_000, 100_000, 20
# Answers of one group that enter the PIT at most: one huge group is not the file.
_PIT_OF_ONE = 1_000


def draw_parameters(scan: FitsScan, path: Path) -> None:
    """Histograms of the parameters that differ between groups, and sigma over mu if there are both."""
    shown = [name for name in scan.parameters if _varies(scan.numbers[name])]
    both = {"mu", "sigma"} <= set(shown)
    count = max(len(shown) + both, 1)
    figure = new_figure(4.2 * count, 3.6)
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis, name in zip(axes, shown, strict=False):
        values = scan.numbers[name][np.isfinite(scan.numbers[name])]
        label, log_scale = _AXES[name]
        if log_scale:
            edges = np.geomspace(values.min(), values.max() * 1.001, 41)
            axis.set_xscale("log")
        else:
            edges = np.linspace(values.min(), values.max(), 41)
        axis.hist(values, bins=edges.tolist(), color=ACCENT)
        infinite = len(scan.numbers[name]) - len(values)
        axis.set_xlabel(label + (f"; {infinite} groups at infinity not shown" if infinite else ""))
        axis.set_ylabel("groups")
    if both:
        axes[-1].scatter(scan.numbers["mu"], scan.numbers["sigma"], s=5, alpha=0.25, color=INK, linewidths=0)
        axes[-1].set_yscale("log")
        axes[-1].set_xlabel(_AXES["mu"][0])
        axes[-1].set_ylabel(_AXES["sigma"][0])
    if not shown:
        axes[0].text(0.5, 0.5, "all groups have the same parameters", ha="center")
    save(figure, path)


def _varies(values: FloatArray) -> bool:
    finite = values[np.isfinite(values)]
    return bool(len(finite) and finite.max() > finite.min())


def pit_rows(scan: FitsScan) -> NDArray[np.int64]:
    """Rows whose answers enter the PIT: the first drawn, as many as have up to 100,000 answers together."""
    counts = np.minimum(scan.numbers["num_samples"][scan.usable], _PIT_OF_ONE)
    fitting = int(np.searchsorted(np.cumsum(counts), _PIT_ANSWERS, side="right"))
    return scan.rows[scan.usable][: max(1, min(fitting, _PIT_GROUPS))]


def pit_masses(rows: Sequence[FitRow], bins: int = _PIT_BINS) -> FloatArray:
    """Share of the answers' probability integral transform in each of `bins` equal bins of [0, 1] (Czado et al. 2009).

    A whole number x spreads evenly over [F(x - 1/2), F(x + 1/2)], a cut answer over [F(cap), 1]; each group under the
    parameters its row has.
    """
    fitting = fitting_of(rows[:20])
    family = fitting.family
    rng = np.random.default_rng(0)
    total = np.zeros(bins + 1)
    edges = np.linspace(0.0, 1.0, bins + 1)
    answers = 0.0
    for row in rows:
        lengths, finished = row.lengths, row.finished
        weights = np.ones(len(lengths)) if row.weights is None else row.weights
        if len(lengths) > _PIT_OF_ONE:
            part = rng.choice(len(lengths), _PIT_OF_ONE, replace=False)
            lengths, finished, weights = lengths[part], finished[part], weights[part]
        law = distribution_of(family, row.parameters)
        x = lengths.astype(np.float64)
        low = np.asarray(law.cdf(np.where(finished, np.maximum(x - 0.5, 0.0), x)))
        high = np.where(finished, np.asarray(law.cdf(x + 0.5)), 1.0)
        width = np.maximum(high - low, 1e-12)
        total += weights @ np.clip((edges[None, :] - low[:, None]) / width[:, None], 0.0, 1.0)
        answers += float(weights.sum())
    shares = np.diff(total / answers)
    # What lies below 0 or above 1 by rounding belongs to the outer bins.
    shares[0] += total[0] / answers
    return np.asarray(shares)


def draw_pit(rows: Sequence[FitRow], path: Path) -> None:
    """Histogram and cumulative curve of the PIT."""
    shares = pit_masses(rows)
    edges = np.linspace(0.0, 1.0, len(shares) + 1)
    figure = new_figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    left.bar(edges[:-1], shares * len(shares), 1 / len(shares), align="edge", color=ACCENT, edgecolor="white")
    left.axhline(1, color=INK, linewidth=1, linestyle="--", label="if the fits are right")
    left.set_xlabel("F(x), the fit's probability of a shorter answer")
    left.set_ylabel("density")
    left.set_ylim(0, 1.25 * max(1.0, float(shares.max()) * len(shares)))
    left.legend(fontsize=8)
    observed = np.concatenate([[0.0], np.cumsum(shares)])
    right.plot(edges, observed - edges, color=ACCENT, marker="o", markersize=3)
    right.axhline(0, color=INK, linewidth=1, linestyle="--", label="if the fits are right")
    largest = max(0.02, 1.3 * float(np.abs(observed - edges).max()))
    right.set_ylim(-largest, largest)
    right.set_xlabel("probability by the fit")
    right.set_ylabel("share of answers below, minus that")
    right.legend(fontsize=8)
    save(figure, path)


def draw_standard_errors(scan: FitsScan, path: Path) -> bool:
    """Standard errors relative to sigma (or to the parameter itself); False if the file has none."""
    pairs = [
        (name, scan.numbers[f"se_{name}"], scan.numbers["sigma" if name == "mu" else name])
        for name in scan.parameters
        if f"se_{name}" in scan.numbers
    ]
    pairs = [pair for pair in pairs if np.isfinite(pair[1]).any()]
    if not pairs:
        return False
    counts = scan.numbers["num_samples"]
    several = len(np.unique(counts)) > 3
    figure = new_figure(4.6 * len(pairs), 3.6)
    axes = figure.subplots(1, len(pairs), squeeze=False)[0]
    for axis, (name, errors, unit) in zip(axes, pairs, strict=True):
        known = np.isfinite(errors) & (errors > 0) & np.isfinite(unit)
        ratio = errors[known] / unit[known]
        label = f"standard error of {name} / {'sigma' if name == 'mu' else name}"
        if several:
            jitter = np.exp(np.random.default_rng(0).uniform(-0.02, 0.02, len(ratio)))
            axis.scatter(counts[known] * jitter, ratio, s=6, alpha=0.3, color=ACCENT, linewidths=0)
            at = np.unique(counts)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xlabel("answers of the group")
            axis.set_ylabel(label)
            if (curve := _expected(scan, name, at)) is not None:
                axis.plot(at, curve, color=WARM, linewidth=1.5, label="expected")
        else:
            low, high = np.quantile(ratio, [0.002, 0.998])
            edges = np.geomspace(low, max(high, 1.01 * low), 41)
            axis.hist(np.clip(ratio, low, high), bins=edges.tolist(), color=ACCENT)
            axis.set_xscale("log")
            axis.set_xlabel(label)
            axis.set_ylabel("groups")
            for count in np.unique(counts):
                if (curve := _expected(scan, name, np.array([count]))) is not None:
                    axis.axvline(curve[0], color=WARM, linewidth=1.5, label=f"expected of {count:g} answers")
        _plain_log_ticks(axis, several)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].tick_params(color=GREY)
    save(figure, path)
    return True


def _plain_log_ticks(axis: object, both: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for side in [axis.xaxis, axis.yaxis] if both else [axis.xaxis]:  # type: ignore[attr-defined]
        side.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        side.set_minor_formatter(NullFormatter())


def _expected(scan: FitsScan, name: str, counts: FloatArray) -> FloatArray | None:
    """Of a log-t of one nu for all groups, by its Fisher information."""
    nu = np.unique(scan.numbers["nu"]) if "nu" in scan.numbers else np.empty(0)
    if len(nu) != 1 or name == "nu":
        return None
    # (nu + 3) / (nu + 1) and (nu + 3) / (2 nu) with nu -> inf allowed.
    inverse = 1.0 / nu[0]
    above = (1 + 3 * inverse) / (1 + inverse) if name == "mu" else (1 + 3 * inverse) / 2
    return np.asarray(np.sqrt(above / counts))
