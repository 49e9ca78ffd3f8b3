"""Self-contained HTML pages: headings, paragraphs, tables and figures, without external resources."""

import base64
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from scheduler_core.errors import MissingExtraError
from scheduler_core.shell.files import atomic_file


def format_cell(value: object) -> str:
    """A table cell as text: floats with four significant digits, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.0f}"


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as text; the first column is aligned to the left."""
    cells = [[format_cell(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells
    )


class Page:
    """An HTML page, built from top to bottom, with the paragraph `lead` below its title; escapes all text."""

    def __init__(self, title: str, lead: str = "") -> None:
        self._title = title
        self._lead = lead
        self._parts: list[dict[str, Any]] = []

    def heading(self, text: str) -> None:
        self._parts.append({"kind": "heading", "text": text})

    def paragraph(self, text: str) -> None:
        self._parts.append({"kind": "paragraph", "text": text, "note": False})

    def note(self, text: str) -> None:
        """Adds a gray paragraph."""
        self._parts.append({"kind": "paragraph", "text": text, "note": True})

    def code(self, text: str) -> None:
        self._parts.append({"kind": "code", "text": text})

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[object]],
        text_columns: Collection[int] = (),
    ) -> None:
        """Adds a table; `text_columns` are the indices of columns with text instead of numbers."""
        table = {
            "kind": "table",
            "header": list(header),
            "text_columns": set(text_columns),
        }
        self._parts.append(table | {"rows": [[format_cell(value) for value in row] for row in rows]})

    def figure(self, figure: str | Path, caption: str) -> None:
        """Adds a figure: SVG text (see `plotting.svg`), or the path of a PNG file."""
        if isinstance(figure, Path):
            data = base64.b64encode(figure.read_bytes()).decode("ascii")
            self._parts.append({"kind": "png", "data": data, "caption": caption})
        else:
            self._parts.append({"kind": "svg", "svg": figure, "caption": caption})

    def html(self) -> str:
        """The page as HTML."""
        try:
            import jinja2
        except ImportError as error:
            raise MissingExtraError("jinja2", "sim") from error
        template = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        text = environment.from_string(template).render(title=self._title, lead=self._lead, parts=self._parts)
        return text + "\n"

    def write(self, path: str | Path) -> None:
        """Writes the page atomically."""
        with atomic_file(path) as temporary:
            temporary.write_text(self.html(), encoding="utf-8")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
