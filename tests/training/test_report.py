"""The figure and the report of a fits file."""

from __future__ import annotations

import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_gen.tables import read_parquet
from scheduler_core.errors import InputError
from tests.training.data import write_lists
from training.fitting.figures import pit_masses, random_rows, read_rows, rows_by_length, write_figure
from training.fitting.fits import FitOptions, fit_groups, fits_table
from training.fitting.report import write_report
from training.fitting.samples import group_table
from training.fitting.summary import read_numbers, summarize_file

MAX_TOKENS = 300


def fit(tmp_path, *, num_groups=12, num_samples=15, special=True, prompt=None, **options):
    """A fits file of log-t groups, some censored, and of constant, wholly censored and too small ones."""
    rng = np.random.default_rng(1)
    lengths, finished = [], []
    for group in range(num_groups):
        drawn = np.exp(3.5 + 0.15 * group + 0.35 * rng.standard_t(3.5, num_samples))
        lengths.append([int(length) for length in np.clip(np.rint(drawn), 1, MAX_TOKENS)])
        finished.append([bool(length <= MAX_TOKENS) for length in drawn])
    if special:
        lengths += [[7] * 5, [MAX_TOKENS] * 5, [5, 9]]
        finished += [[True] * 5, [False] * 5, [True, True]]
    columns = {"finished": finished, "max_tokens": [MAX_TOKENS] * len(lengths)}
    if prompt is not None:
        columns["prompt"] = [prompt] * len(lengths)
    samples = write_lists(tmp_path / "samples.parquet", lengths, **columns)
    choice = FitOptions(**options)
    path = tmp_path / "fits.parquet"
    groups = group_table(read_parquet(samples, "samples"), samples)
    pq.write_table(fits_table(fit_groups(groups, choice)), path)
    return path, summarize_file(path, choice.family, choice.nu), choice


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
    path, summary, choice = fit(tmp_path, **options)
    write_report(path, tmp_path / "report.html", summary, choice)
    text = (tmp_path / "report.html").read_text()
    assert text.count("<svg") == 4
    for flag in ("constant", "all_censored", "too_few_samples"):
        assert f">{flag}</td><td>{summary['flags'].get(flag, 0)}</td>" in text
    assert f"<td>{summary['num_samples']}</td>" in text
    assert not re.search(r"(?:src|href)=.http", text)


def test_what_comes_from_the_data_is_escaped(tmp_path):
    path, summary, choice = fit(tmp_path, num_groups=3, prompt="<script>alert($x$)</script> & more")
    write_report(path, tmp_path / "report.html", summary, choice)
    text = (tmp_path / "report.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;alert($x$)" in text


def test_a_file_of_hopeless_groups_still_has_a_report_and_a_figure(tmp_path):
    path, summary, choice = fit(tmp_path, num_groups=0)
    write_report(path, tmp_path / "report.html", summary, choice)
    assert "all_censored" in (tmp_path / "report.html").read_text()
    write_figure(path, tmp_path / "fits.png", choice)
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_has_two_lines_for_six_groups_and_one_for_three(tmp_path):
    sizes = []
    for count in (3, 12):
        path, _, choice = fit(tmp_path, num_groups=count, alternatives=True)
        write_figure(path, tmp_path / "fits.png", choice)
        header = (tmp_path / "fits.png").read_bytes()[16:24]
        sizes.append((int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")))
    assert sizes[0][0] == sizes[1][0]
    assert sizes[0][1] < sizes[1][1]


def test_drawn_rows_are_a_random_part_and_even_steps_of_length(tmp_path):
    path, *_ = fit(tmp_path)
    numbers = read_numbers(path)
    mu = numbers.columns["mu"]
    assert len(numbers) == 15
    assert sorted(random_rows(numbers, numbers.fitted)) == list(
        range(13)
    )  # not the wholly censored nor the too small
    assert np.flatnonzero(numbers.fitted & ~numbers.tested).tolist() == [12]  # constant
    assert len(random_rows(numbers, numbers.fitted, 5)) == 5
    rows = rows_by_length(numbers, 6)
    assert len(rows) == 6
    assert (np.diff(mu[rows]) > 0).all()


def test_rows_come_back_in_the_order_asked_for_across_row_groups(tmp_path):
    path, *_ = fit(tmp_path)
    table = pq.read_table(path)
    pq.write_table(table, path, row_group_size=4)
    rows = read_rows(path, [11, 2, 6])
    for number, row in zip([11, 2, 6], rows, strict=True):
        assert row.lengths.tolist() == table["output_tokens"][number].as_py()
        assert row.finished.tolist() == table["finished"][number].as_py()
        assert row.parameters["sigma"] == table["sigma"][number].as_py()


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
        return pit_masses(
            read_rows(tmp_path / "fits.parquet", np.arange(200)), FitOptions().fitted_family, 10
        )

    true = masses(4.0)
    assert true.sum() == pytest.approx(1.0)
    assert true == pytest.approx(np.full(10, 0.1), abs=0.02)  # about 4 standard errors of 6,000 answers
    assert masses(4.5)[0] > 0.15


def test_other_files_are_refused(tmp_path):
    path = write_lists(tmp_path / "x.parquet", [[5, 6, 7]])
    with pytest.raises(InputError, match=r"x\.parquet, columns"):
        write_figure(path, tmp_path / "fits.png", FitOptions())
