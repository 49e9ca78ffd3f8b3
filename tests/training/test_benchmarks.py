"""Studies under benchmarks/: their pages and tables, and lengths whose answer is known."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.reproduce.study import Effort
from benchmarks.reproduce.tie_lengths import figure_7, figure_8, tails
from benchmarks.shared.pages import put_section
from scheduler_core.errors import InputError
from scheduler_core.report.page import markdown_table

HALF = ("<!-- a --> alone", "<!-- end of a -->", "<!-- end of a --><!-- a -->")
QUICK = Effort(quick=True)


def test_only_the_section_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- a -->\nold\n<!-- end of a -->\n\nProse behind it.\n", encoding="utf-8")
    put_section(page, "a", "new\n")
    assert page.read_text() == "# Title\n\n<!-- a -->\nnew\n<!-- end of a -->\n\nProse behind it.\n"
    put_section(page, "b", "more")
    assert page.read_text().endswith("Prose behind it.\n\n<!-- b -->\nmore\n<!-- end of b -->\n")
    put_section(page, "a", "newer")
    assert page.read_text().count("newer") == 1
    assert "more" in page.read_text()
    # A page that is not there is made.
    put_section(tmp_path / "new.md", "a", "text")
    assert (tmp_path / "new.md").read_text() == "<!-- a -->\ntext\n<!-- end of a -->\n"


@pytest.mark.parametrize(
    ("page", "message"), [*((page.encode(), "or neither") for page in HALF), (b"\xff\xfe", "UTF-8")]
)
def test_a_broken_page_is_refused(page, message, tmp_path):
    path = tmp_path / "page.md"
    path.write_bytes(page)
    with pytest.raises(InputError, match=message):
        put_section(path, "a", "text")
    assert path.read_bytes() == page


def test_a_table_escapes_its_bars():
    assert markdown_table(("a", "b"), [("x|y", "1")]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_tail_measures_equal_numpys_and_scipys():
    x = np.array([[*range(1, 20), 400], [*range(3, 22), 25], [6] * 20])
    measures = tails(x)
    p50, p90, p99 = np.quantile(x, [0.5, 0.9, 0.99], axis=1)
    assert measures["cv"] == pytest.approx(x.std(axis=1) / x.mean(axis=1))
    assert measures["P90 / P50"] == pytest.approx(p90 / p50)
    assert measures["P99 / P50"] == pytest.approx(p99 / p50)
    assert measures["skewness"][:2] == pytest.approx(stats.skew(x[:2], axis=1))
    assert np.isnan(measures["skewness"][2])
    # The longest tenth: two samples of 20; 0.3 of the longest of 3.
    assert measures["top decile"][0] == pytest.approx((400 + 19) / 590)
    assert tails(np.array([[3, 5, 8]]))["top decile"] == pytest.approx([0.3 * 8 / 16])


def test_the_best_nu_is_near_the_one_that_was_drawn():
    findings = figure_8(QUICK)
    assert 2.0 <= findings.rows[0].ours <= 6.0
    assert findings.claims[0].holds


def test_errors_fall_with_the_number_of_samples():
    findings = figure_7(QUICK)
    errors = [row.ours for row in findings.rows]
    assert errors == sorted(errors, reverse=True)
    assert findings.claims[0].holds
