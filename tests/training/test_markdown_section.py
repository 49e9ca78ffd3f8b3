"""Tables inside pages of prose."""

from __future__ import annotations

import pytest

from benchmarks.pages import put_section
from scheduler_core.errors import InputError
from scheduler_core.report.page import markdown_table


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


def test_a_page_that_is_not_there_is_made(tmp_path):
    put_section(tmp_path / "page.md", "a", "text")
    assert (tmp_path / "page.md").read_text() == "<!-- a -->\ntext\n<!-- end of a -->\n"


HALF = ("<!-- a --> alone", "<!-- end of a -->", "<!-- end of a --><!-- a -->")


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
