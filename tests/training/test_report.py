"""The figure and the report of a fits file."""

from __future__ import annotations

import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from scheduler_core.table_files import read_parquet
from tests.training.data import write_lists
from training.fitting.fits import FitOptions, fit_groups, fits_table
from training.fitting.report import summarize_file, write_figure, write_report
from training.fitting.samples import group_table

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
    assert text.count("<svg") == 1
    for flag in ("constant", "all_censored", "too_few_samples"):
        assert f">{flag}</td><td>{summary['flags'].get(flag, 0)}</td>" in text
    assert f"<td>{summary['num_samples']}</td>" in text
    assert not re.search(r"(?:src|href)=.http", text)


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
    write_figure(path, tmp_path / "fits.png", "log_t")
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")
