"""Report pages: small HTML documents with figures inside, no outside resources."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #d5dbe1; }
p.lead { color: #52606d; margin-top: 0; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .92rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e3e8ee; }
td { white-space: nowrap; } td.text { white-space: normal; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
tr.best td { background: #eef6f1; }
img { max-width: 100%; } code { font-size: .85rem; overflow-wrap: anywhere; } .note { color: #52606d; font-size: .9rem; }
"""


def page(title: str, lead: str, sections: Iterable[str]) -> str:
    """A whole document; `title` and `lead` are plain text, `sections` are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f'<h1>{html.escape(title)}</h1>\n<p class="lead">{html.escape(lead)}</p>\n'
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A headed section of HTML parts."""
    return f"<h2>{html.escape(title)}</h2>\n" + "\n".join(parts)


def paragraph(text: str, *, note: bool = False) -> str:
    """A paragraph of plain text."""
    return f"<p{' class=note' if note else ''}>{html.escape(text)}</p>"


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, text_columns: Sequence[int] = (0,)
) -> str:
    """A table of plain-text cells; columns in `text_columns` are aligned left."""

    def cells(tag: str, values: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=text' if column in text_columns else ''}>{html.escape(str(value))}</{tag}>"
            for column, value in enumerate(values)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>\n{body}\n</tbody></table>"


def figure(png: Path, description: str) -> str:
    """An image inside the page, with a text for those who cannot see it."""
    data = base64.b64encode(png.read_bytes()).decode("ascii")
    return f'<p><img alt="{html.escape(description, quote=True)}" src="data:image/png;base64,{data}"></p>'
