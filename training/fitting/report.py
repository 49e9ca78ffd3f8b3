"""Summary statistics of a file of fits, and its figure as PNG."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from scipy import stats

from scheduler_core.lengths import LogT
from scheduler_core.report.plotting import COLORS, new_figure, write_png
from training.fitting.estimate import FamilyName, FloatArray, compared_families, family_of
from training.fitting.fits import NOT_FITTED, NOT_TESTED, NUM_ERRORS
from training.fitting.samples import CARRIED

PASS_ABOVE = 0.05
PARAMETERS = ("mu", "sigma", "nu", "shape", "scale")
#: Label of a family -> its display name.
FAMILY_NAMES = {
    "log_t": "log-t",
    "log_t_free": "log-t, free nu",
    "log_normal": "log-normal",
    "gamma": "gamma",
    "weibull": "Weibull",
    "exponential": "exponential",
}
_MEASURES = ("log_likelihood", "ks_stat", "ks_p", "ad_stat")


def _read_numbers(path: str | Path) -> Any:
    """Data frame of a fits file without the samples; `fitted` and `tested`: whether a row was fitted, and can be tested."""
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        # Columns of the samples, such as prompt_tokens, come before the parameters.
        first = min(schema.names.index(name) for name in PARAMETERS if name in schema.names)
        names = [item.name for item in list(schema)[first:] if not pa.types.is_nested(item.type)]
        numbers = file.read(columns=[*names, "flags"]).to_pandas()
    for name, excluded in (("fitted", NOT_FITTED), ("tested", NOT_TESTED)):
        numbers[name] = [set(excluded).isdisjoint(flags) for flags in numbers["flags"]]
    return numbers


def summarize_file(path: str | Path, family: FamilyName = "log-t", nu: float | None = 3.5) -> dict[str, Any]:
    """Summarizes a file `fits/2` as JSON content: counts, flags, quantiles of the parameters, tests of the families.

    `family` and `nu` describe the main fit of the file.

    Returns:
        num_groups, num_samples, num_censored, num_errors_left_out, num_not_converged, flags (flag -> number of groups),
        family, parameters (name -> quantiles) and ks: label -> num_tested, pass_rate (plain KS p > 0.05), mean_p, mean_ad,
        mean_aic, best_aic (fraction of groups with the lowest AIC), log_likelihood_ratio (mean of ln L minus ln L of the
        main fit), pass_rate_boot (None without bootstrap). `ks` leaves out groups with a flag of NOT_TESTED."""
    numbers = _read_numbers(path)
    tested = numbers[numbers["tested"]]
    main = family_of(family, nu)
    families = {main.label: main} | compared_families(nu)
    measures = {
        label: {name: tested[prefix + name].to_numpy() for name in _MEASURES}
        for label in families
        for prefix in ["" if label == main.label else f"{label}_"]
        if f"{prefix}log_likelihood" in tested
    }
    aic = {
        label: 2.0 * families[label].num_parameters - 2.0 * values["log_likelihood"]
        for label, values in measures.items()
    }
    best = np.min(np.stack(list(aic.values())), axis=0)
    boot = tested["ks_p_boot"] > PASS_ABOVE if "ks_p_boot" in tested else None
    return {
        "num_groups": len(numbers),
        "num_samples": int(numbers["num_samples"].sum()),
        "num_censored": int(numbers["num_censored"].sum()),
        "num_errors_left_out": int((pq.read_metadata(path).metadata or {}).get(NUM_ERRORS, 0)),
        "num_not_converged": int((~numbers["converged"]).sum()),
        "flags": dict(sorted(Counter(chain.from_iterable(numbers["flags"])).items())),
        "family": main.label,
        "parameters": {
            name: _quantiles(numbers.loc[numbers["fitted"], name].to_numpy())
            for name in PARAMETERS
            if name in numbers
        },
        "ks": {
            label: {
                "num_tested": len(values["ks_p"]),
                "pass_rate": _mean(values["ks_p"] > PASS_ABOVE),
                "pass_rate_boot": _mean(boot) if boot is not None and label == main.label else None,
                "mean_p": _mean(values["ks_p"]),
                "mean_ad": _mean(values["ad_stat"]),
                "mean_aic": _mean(aic[label]),
                "best_aic": _mean(aic[label] <= best + 1e-9),
                "log_likelihood_ratio": _mean(
                    values["log_likelihood"] - measures[main.label]["log_likelihood"]
                ),
            }
            for label, values in measures.items()
        },
    }


_HEADER = ("family", "KS p > 0.05", "by bootstrap", "mean p", "mean AD", "ln L ratio", "best AIC", "tested")


def families_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Table of the goodness of fit of each family of a summary, with a header row."""
    rows = [
        (
            FAMILY_NAMES[label] + (" (the fit)" if label == summary["family"] else ""),
            percent(row["pass_rate"]),
            percent(row["pass_rate_boot"]),
            *(fixed(row[name]) for name in ("mean_p", "mean_ad", "log_likelihood_ratio")),
            percent(row["best_aic"]),
            str(row["num_tested"]),
        )
        for label, row in summary["ks"].items()
    ]
    return [_HEADER, *rows]


def percent(value: float | None) -> str:
    """Formats a fraction in percent; "-" for None."""
    return "-" if value is None else f"{100 * value:.1f} %"


def fixed(value: float | None, digits: int = 3) -> str:
    """Formats a number with a fixed number of decimals; "-" for None."""
    # + 0.0 converts a rounded -0 to 0.
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _quantiles(values: FloatArray) -> dict[str, float | None] | None:
    """Quantiles of the finite values, and the fraction of infinite ones (possible for nu)."""
    if len(values) == 0:
        return None
    finite = values[np.isfinite(values)]
    levels = {"p05": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
    quantiles = {
        name: float(np.quantile(finite, level)) if len(finite) else None for name, level in levels.items()
    }
    return quantiles | {"infinite": float(1.0 - len(finite) / len(values))}


_NUM_PANELS = 6


def write_figure(path: str | Path, png_path: str | Path, family: str) -> None:
    """Draws histograms and fitted densities of up to six groups, in ascending order of the typical output length.

    Markers show where samples were censored. Censored samples are not part of the histogram, so bars and curve are
    comparable only to the left of the first marker. If no group can be drawn, the figure is a line of text.
    """
    numbers = _read_numbers(path)
    typical = numbers["scale"] * numbers.get("shape", 1.0) if "scale" in numbers else numbers["mu"]
    positions = typical[numbers["tested"]].sort_values(kind="stable").index
    if len(positions) > _NUM_PANELS:
        positions = positions[(np.linspace(0.05, 0.95, _NUM_PANELS) * (len(positions) - 1)).astype(np.int64)]
    rows = ds.dataset(path).take(positions).to_pylist()
    if not rows:
        figure, axes = new_figure(6, 1)
        axes[0].set_axis_off()
        figure.text(0.5, 0.5, "no group has enough samples of different length", ha="center", va="center")
        return write_png(figure, png_path)
    lines = -(-len(rows) // 3)
    figure, axes = new_figure(12, 0.6 + 3.4 * lines, rows=lines, columns=3)
    for axis, row in zip(axes, rows, strict=False):
        _draw_group(axis, row, _distribution(row, family))
    for axis in axes[len(rows) :]:
        axis.set_visible(False)
    axes[0].legend(fontsize=7)
    write_png(figure, png_path)
    return None


def _distribution(row: dict[str, Any], family: str) -> Any:
    """The length distribution, with its density `pdf` per token."""
    if "mu" in row:
        return LogT(row["mu"], row["sigma"], row["nu"])
    kind = stats.gamma if family == "gamma" else stats.weibull_min
    return kind(row.get("shape", 1.0), scale=row["scale"])


def _draw_group(axis: Any, row: dict[str, Any], distribution: Any) -> None:
    lengths, finished = np.array(row["output_tokens"], dtype=np.float64), np.array(row["finished"])
    limits = np.unique(lengths[~finished])
    extent = max(lengths.max() - lengths.min(), 1.0)
    low, high = max(0.0, lengths.min() - 0.35 * extent), lengths.max() + 0.8 * extent
    width = max(1.0, np.ceil((high - low) / 20))
    # Bins are centered on integers.
    edges = np.arange(np.floor(low) - 0.5, high + width, width)
    mass = np.full(int(finished.sum()), 1 / (len(lengths) * width))
    heights, _, _ = axis.hist(
        lengths[finished], edges.tolist(), weights=mass, color=COLORS[0], alpha=0.4, label="finished samples"
    )
    at = np.linspace(max(edges[0], 0.5), edges[-1], 500)
    density = np.asarray(distribution.pdf(at))
    axis.plot(at, density, color=COLORS[0], label="fit")
    # Limit the y axis, because the density of a nearly constant group would flatten the histogram.
    tallest = float(np.max(heights))
    top = 1.15 * max(tallest, min(float(density.max()), 1.8 * tallest))
    axis.set_ylim(0, top)
    axis.set_xlim(edges[0], edges[-1])
    # Right-pointing markers, because a censored length is a lower bound.
    axis.plot(limits, np.full(len(limits), 0.03 * top), ">", color=COLORS[1], label="censored here")
    axis.set_title(_title(row), fontsize=8)
    axis.set_xlabel("output tokens", fontsize=8)
    axis.tick_params(labelsize=7)


def _title(row: dict[str, Any]) -> str:
    names = list(row)
    parameters = [name for name in PARAMETERS if name in row]
    keys = [name for name in names[: names.index(parameters[0])] if name not in CARRIED]
    text = " ".join(str(row.get("prompt") or ", ".join(f"{key}={row[key]!r}" for key in keys)).split())
    # A dollar sign would start a formula.
    title = (text if len(text) <= 52 else text[:51] + "…").replace("$", r"\$")
    values = ", ".join(f"{name} {row[name]:.4g}" for name in parameters)
    samples = f"{row['num_samples']} samples, {row['num_censored']} censored; KS p {row['ks_p']:.2g}"
    return f"{title}\n{values}\n{samples}"
