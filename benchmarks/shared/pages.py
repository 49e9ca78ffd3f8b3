"""Cells of tables, figures, and generated sections in Markdown pages, delimited by two comments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.report.plotting import svg
from scheduler_core.shell.files import atomic_file, writable_target
from scheduler_core.statistics import interval


def mean_cell(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± half of its 95 % interval; only the mean of one value, and - without a value."""
    if not values:
        return "-"
    mean = interval(values)
    half = f" ± {mean.high - mean.mean:.{digits}f}" if mean.num > 1 else ""
    return f"{mean.mean:.{digits}f}{half}"


def number_cell(value: object, form: str = "{:.3f}") -> str:
    """A number in a format; - for anything that is not a float, such as None."""
    return form.format(value) if isinstance(value, float) else "-"


def write_svg(file: Path, figure: Any, legend_of: Any = None) -> None:
    """Writes a figure, see `scheduler_core.report.plotting.svg`; creates the folder."""
    with atomic_file(writable_target(file, "plot")) as temporary:
        temporary.write_text(svg(figure, legend_of), encoding="utf-8")


def put_section(path: str | Path, name: str, text: str) -> None:
    """Replaces the text between `<!-- NAME -->` and `<!-- end of NAME -->`; appends both if missing.

    Raises:
        InputError: The page cannot be written, is not UTF-8, or has only one of the two comments.
    """
    target = writable_target(path, "markdown")
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    try:
        page = target.read_text(encoding="utf-8") if target.exists() else ""
    except UnicodeDecodeError as error:
        raise InputError("markdown", str(path), f"a page in UTF-8 ({error})") from error
    section = f"{start}\n{text.strip()}\n{end}"
    if (start in page) != (end in page) or page.find(start) > page.find(end):
        raise InputError("markdown", str(path), f"a page with both {start} and {end}, or neither")
    if start in page:
        before, rest = page.split(start, 1)
        page = before + section + rest.split(end, 1)[1]
    else:
        page = (page.rstrip() + "\n\n" if page.strip() else "") + section + "\n"
    with atomic_file(target) as temporary:
        temporary.write_text(page, encoding="utf-8")
