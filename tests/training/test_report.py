"""The figure and the report of a fits file."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError
from tests.training.data import write_lists
from training.fitting.figure import draw_fits
from training.fitting.fit_rows import fitting_of, read_rows, scan_fits, spread_rows
from training.fitting.fits import fit_groups
from training.fitting.fits_file import fits_table, write_fits
from training.fitting.options import FitOptions
from training.fitting.reading.table import group_table, read_parquet
from training.fitting.report import write_report
from training.fitting.report_figures import pit_masses
from training.fitting.summary import summarize_file

CAP = 300


def fit(tmp_path, *, num_groups=12, num_samples=15, special=True, prompt=None, **options):
    """A fits file of log-t groups, some cut, and of constant, wholly cut and too small ones."""
    rng = np.random.default_rng(1)
    lengths, finished = [], []
    for group in range(num_groups):
        drawn = np.exp(3.5 + 0.15 * group + 0.35 * rng.standard_t(3.5, num_samples))
        lengths.append([int(length) for length in np.clip(np.rint(drawn), 1, CAP)])
        finished.append([bool(length <= CAP) for length in drawn])
    if special:
        lengths += [[7] * 5, [CAP] * 5, [5, 9]]
        finished += [[True] * 5, [False] * 5, [True, True]]
    columns = {"finished": finished, "max_tokens": [CAP] * len(lengths)}
    if prompt is not None:
        columns["prompt"] = [prompt] * len(lengths)
    samples = write_lists(tmp_path / "samples.parquet", lengths, **columns)
    choice = FitOptions(**options)
    path = tmp_path / "fits.parquet"
    write_fits(path, fit_groups(group_table(read_parquet(samples, "samples"), samples), choice))
    with np.errstate(invalid="ignore"):  # quantiles of an infinite nu
        return path, summarize_file(path, choice.family, choice.nu)


@pytest.mark.parametrize(
    "options",
    [
        {"alternatives": True, "bootstrap": 19},
        # Few groups, few panels to draw.
        {"nu": None, "alternatives": True, "num_groups": 3},
        {"family": "gamma", "num_groups": 3},
        {"family": "exponential", "censoring": "none", "num_groups": 3},
    ],
)
def test_the_report_shows_counts_flags_and_figures_of_any_family(tmp_path, options):
    path, summary = fit(tmp_path, **options)
    write_report(path, tmp_path / "report.html", summary)
    text = (tmp_path / "report.html").read_text()
    assert text.count("data:image/png;base64,") == 4
    for flag in ("constant", "all_censored", "too_few_samples"):
        assert f">{flag}</td><td>{summary['flags'].get(flag, 0)}</td>" in text
    assert f"<td>{summary['num_samples']}</td>" in text
    assert "http" not in text


def test_what_comes_from_the_data_is_escaped(tmp_path):
    path, summary = fit(tmp_path, num_groups=3, prompt="<script>alert($x$)</script> & more")
    write_report(path, tmp_path / "report.html", summary)
    text = (tmp_path / "report.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;alert($x$)" in text


def test_a_file_of_hopeless_groups_still_has_a_report_and_a_figure(tmp_path):
    path, summary = fit(tmp_path, num_groups=0)
    write_report(path, tmp_path / "report.html", summary)
    assert "all_censored" in (tmp_path / "report.html").read_text()
    draw_fits(path, tmp_path / "fits.png")
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_has_two_lines_for_six_groups_and_one_for_three(tmp_path):
    sizes = []
    for count in (3, 12):
        path, _ = fit(tmp_path, num_groups=count, alternatives=True)
        draw_fits(path, tmp_path / "fits.png")
        header = (tmp_path / "fits.png").read_bytes()[16:24]
        sizes.append((int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")))
    assert sizes[0][0] == sizes[1][0]
    assert sizes[0][1] < sizes[1][1]


def test_a_scan_keeps_a_part_and_the_worst_of_all(tmp_path):
    path, _ = fit(tmp_path)
    table = pq.read_table(path)
    p = np.array(table["ks_p"].to_pylist()[:12], dtype=float)
    scan = scan_fits(path, keep=5, worst=3)
    assert scan.num_rows == 15
    assert len(scan.rows) == 5
    assert scan.worst.tolist() == np.argsort(p, kind="stable")[:3].tolist()
    mu = np.array(table["mu"].to_pylist())
    assert scan.numbers["mu"].tolist() == mu[scan.rows].tolist()
    everything = scan_fits(path)
    assert sorted(everything.rows.tolist()) == list(range(13))  # not the wholly cut nor the too small one
    assert everything.rows[~everything.usable].tolist() == [12]  # constant
    shown = spread_rows(everything, 6)
    assert len(shown) == 6
    assert (np.diff(mu[shown]) > 0).all()


def test_rows_come_back_in_the_order_asked_for_across_row_groups(tmp_path):
    path, _ = fit(tmp_path)
    table = pq.read_table(path)
    pq.write_table(table, path, row_group_size=4)
    rows = read_rows(path, [11, 2, 6])
    assert [row.row for row in rows] == [11, 2, 6]
    for row in rows:
        assert row.lengths.tolist() == table["output_tokens"][row.row].as_py()
        assert row.finished.tolist() == table["finished"][row.row].as_py()
        assert row.parameters["sigma"] == table["sigma"][row.row].as_py()


@pytest.mark.parametrize(
    ("options", "label", "right", "integers"),
    [
        ({}, "log_t", True, False),
        ({"nu": None}, "log_t_free", True, False),
        ({"family": "log-normal", "integers": True}, "log_normal", True, True),
        ({"family": "weibull", "censoring": "none"}, "weibull", False, False),
        ({"family": "gamma"}, "gamma", True, False),
    ],
)
def test_how_a_file_was_fitted_is_found_again(tmp_path, options, label, right, integers):
    path, _ = fit(tmp_path, special=False, **options)
    found = fitting_of(read_rows(path, np.arange(12)))
    assert (found.family.label, found.right_censored, found.integers) == (label, right, integers)


def test_the_pit_of_the_true_parameters_is_flat_and_of_wrong_ones_is_not(tmp_path):
    rng = np.random.default_rng(4)
    drawn = np.rint(np.exp(4.0 + 0.5 * rng.standard_t(3.5, (200, 30))))
    lengths = np.clip(drawn, 1, 90).astype(int).tolist()
    samples = write_lists(tmp_path / "samples.parquet", lengths, finished=(drawn <= 90).tolist())
    fits = fit_groups(group_table(read_parquet(samples, "samples"), samples), FitOptions())

    def masses(mu: float) -> np.ndarray:
        fits.parameters["mu"][:] = mu
        fits.parameters["sigma"][:] = 0.5
        pq.write_table(fits_table(fits), tmp_path / "fits.parquet")
        return pit_masses(read_rows(tmp_path / "fits.parquet", np.arange(200)), 10)

    true = masses(4.0)
    assert true.sum() == pytest.approx(1.0)
    assert true == pytest.approx(np.full(10, 0.1), abs=0.02)  # about 4 standard errors of 6,000 answers
    assert masses(4.5)[0] > 0.15


def test_other_files_are_refused(tmp_path):
    path = write_lists(tmp_path / "x.parquet", [[5, 6, 7]])
    with pytest.raises(InputError, match=r"x\.parquet, columns"):
        draw_fits(path, tmp_path / "fits.png")
