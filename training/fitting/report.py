"""The report on a file of fits: one self-contained page, whatever the file's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.report.page import Page
from scheduler_core.report.plotting import svg
from training.fitting.figures import (
    MAX_POINTS,
    FitRow,
    draw_fits,
    draw_parameters,
    draw_pit,
    draw_standard_errors,
    pit_rows,
    read_rows,
    shortened,
)
from training.fitting.fits import FLAGS, FitOptions
from training.fitting.summary import FAMILY_NAMES, FitNumbers, fixed, percent, read_numbers

_NUM_WORST = 10
_NUM_LISTED_SAMPLES = 24


def write_report(
    fits_path: str | Path, html_path: str | Path, summary: dict[str, Any], options: FitOptions
) -> None:
    """Writes the page.

    Args:
        fits_path: A file `fits/2`; figures show a random part of its rows.
        html_path: Page to write.
        summary: The result of `summarize_file`.
        options: Of the fit.
    """
    numbers = read_numbers(fits_path)
    page = Page(
        f"Fits of {Path(fits_path).name}",
        f"{FAMILY_NAMES[summary['family']]} distributions of output length, one for each of {summary['num_groups']} "
        "groups.",
    )
    _add_counts(page, summary)
    _add_families(page, summary)
    if numbers.tested.any():
        _add_figures(page, numbers, summary, options)
        _add_worst(page, numbers)
    page.write(html_path)


def _add_counts(page: Page, summary: dict[str, Any]) -> None:
    page.heading("Contents of the file")
    censored = summary["num_censored"]
    rows: list[tuple[str, object]] = [
        ("groups", summary["num_groups"]),
        ("samples", summary["num_samples"]),
        ("censored samples", f"{censored} ({100 * censored / max(summary['num_samples'], 1):.2f} %)"),
        ("groups not converged", summary["num_not_converged"]),
    ]
    if "num_errors_left_out" in summary:
        rows.append(("failed samples left out", summary["num_errors_left_out"]))
    page.table(("", "number"), rows)
    flags = []
    for name, text in FLAGS.items():
        count = summary["flags"].get(name, 0)
        flags.append((name, count, percent(count / max(summary["num_groups"], 1)), text))
    page.table(("flag", "groups", "fraction", "meaning"), flags, text_columns=(3,))
    page.note("Groups are flagged, never left out; a group may carry several flags.")


def _add_families(page: Page, summary: dict[str, Any]) -> None:
    page.heading("Goodness of fit")
    rows = [
        (
            FAMILY_NAMES[label] + (" (the fit)" if label == summary["family"] else ""),
            percent(row["pass_rate"]),
            percent(row["pass_rate_boot"]),
            fixed(row["mean_p"]),
            fixed(row["mean_ad"]),
            fixed(row["log_likelihood_ratio"]),
            fixed(row["mean_aic"], 2),
            percent(row["best_aic"]),
            row["num_tested"],
        )
        for label, row in summary["ks"].items()
    ]
    header = ("family", "KS p > 0.05", "by bootstrap", "mean p", "mean AD", "mean ln L ratio")
    page.table((*header, "mean AIC", "best AIC", "groups"), rows)
    page.note(
        "The plain Kolmogorov-Smirnov p-value ignores that the parameters come from the same samples (Lilliefors) and "
        "that lengths are integers: the first makes it too high, the second too low where many lengths are equal, so it "
        "only compares families. The bootstrap treats its replicates like the samples; if the family were true, 95 % "
        "would pass. AD: Anderson-Darling statistic. Ratio: mean of ln L minus ln L of the fit. Groups that are "
        "constant, censored throughout or too small are not tested."
    )


def _add_figures(page: Page, numbers: FitNumbers, summary: dict[str, Any], options: FitOptions) -> None:
    page.heading("Six groups")
    page.figure(
        svg(draw_fits(numbers, options)), "Histograms of six groups' lengths with the fitted densities"
    )
    page.note("From the shortest to the longest typical output, at even steps of rank.")
    page.heading("Parameters")
    page.figure(svg(draw_parameters(numbers)), "Histograms of the parameters over the groups")
    page.table(
        ("parameter", "P5", "median", "P95", "largest"),
        [
            (name, *(quantiles[level] for level in ("p05", "p50", "p95", "max")))
            for name, quantiles in summary["parameters"].items()
            if quantiles is not None
        ],
    )
    page.note(f"Histograms of {min(int(numbers.fitted.sum()), MAX_POINTS)} fitted groups.")
    page.heading("Probability integral transform")
    rows = pit_rows(numbers)
    page.figure(
        svg(draw_pit(rows, options.fitted_family)),
        "Histogram and cumulative curve of F(x) of the samples under their own fits",
    )
    page.note(
        f"F(x) of the samples of {len(rows)} groups, each under its own fit. An integer x counts evenly over "
        "[F(x - 1/2), F(x + 1/2)], a censored sample evenly over [F(limit), 1]. If the fits are right the histogram is "
        "flat and the curve is zero. The samples were used to fit (Lilliefors), which makes both look better than on new "
        "samples, the more so the fewer samples a group has; a slope or a hump is real, flatness is no proof."
    )
    errors = draw_standard_errors(numbers)
    if errors is not None:
        page.heading("Standard errors")
        page.figure(svg(errors), "Standard errors of the parameters over the number of samples")
        page.note(
            "By the observed information. Lines, if all groups have the same nu: expected of a log-t without censored "
            "samples, se(mu) / sigma = sqrt((nu + 3) / ((nu + 1) N)) and se(sigma) / sigma = sqrt((nu + 3) / (2 nu N)) "
            "(nu fixed). Censored samples raise them."
        )


def _add_worst(page: Page, numbers: FitNumbers) -> None:
    p_values = np.where(numbers.tested, numbers.columns[numbers.p_name], np.nan)
    worst = np.argsort(p_values, kind="stable")[: min(_NUM_WORST, int(np.isfinite(p_values).sum()))]
    page.heading("Worst fits")
    page.table(
        (
            "group",
            "bootstrap p" if numbers.p_name == "ks_p_boot" else "KS p",
            "parameters",
            "samples in tokens",
        ),
        [
            (
                shortened(row.title, 90),
                f"{p_values[number]:.2g}",
                ", ".join(f"{name} {value:.3g}" for name, value in row.parameters.items()),
                _listed_samples(row),
            )
            for number, row in zip(worst, read_rows(numbers.path, worst), strict=True)
        ],
        text_columns=(0, 2, 3),
    )
    page.note(
        "Lowest p-values first; among many groups some are low by chance. + marks a sample that is censored there."
    )


def _listed_samples(row: FitRow) -> str:
    order = np.lexsort((~row.finished, row.lengths))
    if len(order) > _NUM_LISTED_SAMPLES:  # at even steps of rank, ends included
        order = order[np.linspace(0, len(order) - 1, _NUM_LISTED_SAMPLES).round().astype(np.int64)]
    text = " ".join(f"{row.lengths[at]}{'' if row.finished[at] else '+'}" for at in order)
    return text if len(order) == len(row.lengths) else f"{text} ({len(order)} of {len(row.lengths)})"
