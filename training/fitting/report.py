"""The report on a file of fits: one self-contained page, whatever the file's size."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.files import atomic_file
from training import page
from training.fitting.figure import LABELS, draw_fits, shortened
from training.fitting.fit_rows import FitRow, read_rows, scan_fits
from training.fitting.fits import FLAGS
from training.fitting.report_figures import draw_parameters, draw_pit, draw_standard_errors, pit_rows

_SHOWN_ANSWERS = 24


def write_report(fits_path: str | Path, html_path: str | Path, summary: dict[str, Any]) -> None:
    """Writes the page.

    Args:
        fits_path: A file `fits/2`; it is read in a stream, and figures show a random part of its rows.
        html_path: Page to write.
        summary: What `summarize_file` said of the file.
    """
    scan = scan_fits(fits_path)
    with tempfile.TemporaryDirectory(prefix="fit-report-") as folder:
        work = Path(folder)
        sections = [_counts(summary), _families(summary)]
        if scan.usable.any():
            draw_fits(fits_path, work / "fits.png")
            draw_parameters(scan, work / "parameters.png")
            sampled = read_rows(fits_path, pit_rows(scan))
            draw_pit(sampled, work / "pit.png")
            sections += [
                _examples(work),
                _parameters(summary, work, len(scan.rows)),
                _pit(work, len(sampled)),
            ]
            if draw_standard_errors(scan, work / "errors.png"):
                sections.append(_standard_errors(work))
            sections.append(_worst(read_rows(fits_path, scan.worst), "ks_p_boot" in scan.names))
        content = page.page(
            f"Fits of {Path(fits_path).name}",
            f"{LABELS[summary['family']]} distributions of answer length, one for each of {summary['num_groups']} groups.",
            sections,
        )
    with atomic_file(html_path) as temporary:
        temporary.write_text(content, encoding="utf-8")


def _counts(summary: dict[str, Any]) -> str:
    share = summary["num_censored"] / max(summary["num_samples"], 1)
    rows = [
        ("groups", summary["num_groups"]),
        ("answers", summary["num_samples"]),
        ("of them cut at their cap", f"{summary['num_censored']} ({100 * share:.2f} %)"),
        ("groups not converged", summary["num_not_converged"]),
    ]
    if "num_errors_left_out" in summary:
        rows.append(("failed answers left out", summary["num_errors_left_out"]))
    flags = [
        (
            name,
            summary["flags"].get(name, 0),
            _percent(summary["flags"].get(name, 0) / max(summary["num_groups"], 1)),
            text,
        )
        for name, text in FLAGS.items()
    ]
    return page.section(
        "What is in the file",
        page.table(("", "number"), rows),
        page.table(("flag", "groups", "share", "meaning"), flags, text_columns=(0, 3)),
        page.paragraph("Groups are flagged, never left out; a group may carry several flags.", note=True),
    )


def _families(summary: dict[str, Any]) -> str:
    rows = [
        (
            LABELS[label] + (" (the fit)" if label == summary["family"] else ""),
            _percent(row["pass_rate"]),
            _percent(row["pass_rate_boot"]),
            _number(row["mean_p"]),
            _number(row["mean_ad"]),
            _number(row["log_likelihood_ratio"]),
            _number(row["mean_aic"], 2),
            _percent(row["best_aic"]),
            row["num_tested"],
        )
        for label, row in summary["ks"].items()
    ]
    header = (
        "family",
        "KS p > 0.05",
        "by bootstrap",
        "mean p",
        "mean AD",
        "mean ln L ratio",
        "mean AIC",
        "best AIC",
        "groups",
    )
    return page.section(
        "How well it fits",
        page.table(header, rows),
        page.paragraph(
            "The plain Kolmogorov-Smirnov p-value takes the parameters for given although they come from the same answers "
            "(Lilliefors) and lengths for continuous: the first makes it too high, the second too low where many lengths are equal, so it only compares families. The bootstrap "
            "does to its replicates all that was done to the answers; if the family were true, 95 % would pass. AD: "
            "Anderson-Darling statistic. Ratio: mean of ln L minus ln L of the fit. Groups that are constant, wholly cut or "
            "too small are not tested.",
            note=True,
        ),
    )


def _examples(work: Path) -> str:
    return page.section(
        "Six groups",
        page.figure(work / "fits.png", "Histograms of six groups' answers with the fitted densities"),
        page.paragraph("From the shortest to the longest typical answer, at even steps of rank.", note=True),
    )


def _parameters(summary: dict[str, Any], work: Path, shown: int) -> str:
    rows = [
        (name, *(_significant(found[level]) for level in ("p05", "p50", "p95", "max")))
        for name, found in summary["parameters"].items()
        if found is not None
    ]
    return page.section(
        "Parameters",
        page.figure(work / "parameters.png", "Histograms of the parameters over the groups"),
        page.table(("parameter", "P5", "median", "P95", "largest"), rows),
        page.paragraph(f"Histograms of {shown} fitted groups.", note=True),
    )


def _pit(work: Path, count: int) -> str:
    return page.section(
        "Probability integral transform",
        page.figure(
            work / "pit.png", "Histogram and quantile plot of F(x) of the answers under their own fits"
        ),
        page.paragraph(
            f"F(x) of the answers of {count} groups, each under its own fit. A whole number x counts evenly over [F(x - 1/2), "
            "F(x + 1/2)], a cut answer evenly over [F(cap), 1]. If the fits are right the histogram is flat and the curve "
            "lies on the diagonal. The answers were used to fit (Lilliefors), which makes both look better than they would "
            "on new answers, the more so the fewer answers a group has; a slope or a hump is real, flatness is no proof.",
            note=True,
        ),
    )


def _standard_errors(work: Path) -> str:
    return page.section(
        "Standard errors",
        page.figure(work / "errors.png", "Standard errors of the parameters over the number of answers"),
        page.paragraph(
            "By the observed information. Lines, if all groups have the same nu: expected of a log-t without cut answers, se(mu) / sigma = "
            "sqrt((nu + 3) / ((nu + 1) N)) and se(sigma) / sigma = sqrt((nu + 3) / (2 nu N)) (nu fixed). Cut answers raise "
            "them.",
            note=True,
        ),
    )


def _worst(rows: list[FitRow], booted: bool) -> str:
    name = "ks_p_boot" if booted else "ks_p"
    cells = [
        (
            shortened(row.title, 90).replace(r"\$", "$"),
            f"{row.numbers[name]:.2g}",
            ", ".join(f"{parameter} {value:.3g}" for parameter, value in row.parameters.items()),
            _answers(row),
        )
        for row in rows
    ]
    return page.section(
        "Worst fits",
        page.table(
            ("group", "bootstrap p" if booted else "KS p", "parameters", "answers in tokens"),
            cells,
            text_columns=(0, 2, 3),
        ),
        page.paragraph(
            "Lowest p-values first; among many groups some are low by chance. + marks an answer that was cut there.",
            note=True,
        ),
    )


def _answers(row: FitRow) -> str:
    order = np.lexsort((~row.finished, row.lengths))
    if len(order) > _SHOWN_ANSWERS:  # at even steps of rank, ends included
        order = order[np.linspace(0, len(order) - 1, _SHOWN_ANSWERS).round().astype(np.int64)]
    shown = " ".join(f"{row.lengths[at]}{'' if row.finished[at] else '+'}" for at in order)
    return shown if len(order) == len(row.lengths) else f"{shown} ({len(order)} of {len(row.lengths)})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def _significant(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return "-" if math.isnan(value) else f"{value:.4g}"
