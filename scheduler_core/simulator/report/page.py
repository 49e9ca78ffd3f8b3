"""A self-contained HTML page: headings, tables, figures as inline SVG."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from pathlib import Path

from scheduler_core.files import atomic_file

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; color: #555; }
div.wide { overflow-x: auto; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; } figcaption, p.note { color: #555; }
pre { background: #f6f6f6; padding: .7rem; overflow-x: auto; font-size: 12px; }
"""


def cell(value: object) -> str:
    """A value as a table shows it: four significant digits, and a dash for what is not there."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.0f}"


class Page:
    """Puts a page together from top to bottom.

    Args:
        title: Heading, and title of the window.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = [f"<h1>{html.escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        """A section begins."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def note(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(f'<p class="note">{html.escape(text)}</p>')

    def code(self, text: str) -> None:
        """Text as it is."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(
        self, head: Sequence[str], rows: Sequence[Sequence[object]], texts: Collection[int] = ()
    ) -> None:
        """A table; numbers get four significant digits. The columns in `texts` are prose, to the left."""

        def line(kind: str, values: Sequence[object]) -> str:
            cells = (
                f"<{kind}{' class=text' if place in texts else ''}>{html.escape(cell(value))}</{kind}>"
                for place, value in enumerate(values)
            )
            return "<tr>" + "".join(cells) + "</tr>"

        body = "".join(line("td", row) for row in rows)
        self._parts.append(
            f"<div class=wide><table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table></div>"
        )

    def figure(self, svg: str, caption: str) -> None:
        """A figure, SVG text that was drawn by `figures`."""
        self._parts.append(f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>")

    def text(self) -> str:
        """The whole page."""
        body = "\n".join(self._parts)
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(self._title)}</title>'
            f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
        )

    def write(self, path: str | Path) -> None:
        """Writes the page, atomically."""
        with atomic_file(path) as temporary:
            temporary.write_text(self.text(), encoding="utf-8")
