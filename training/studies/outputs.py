"""What a study writes: DIR/NAME.json, DIR/NAME.png and DIR/NAME.html."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_core.files import atomic_file, write_json
from training import page
from training.studies.tables import StudyTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StudyResult:
    """A finished study.

    Attributes:
        name: Of its files.
        title, lead: Of its page.
        content: For JSON.
        tables: For the log and the page.
        figure_text: What the figure shows, in words.
        draw: Draws the figure.
    """

    name: str
    title: str
    lead: str
    content: dict[str, Any]
    tables: Sequence[StudyTable]
    figure_text: str
    draw: Callable[[Path], None]


def write_study(result: StudyResult, out: Path, run: dict[str, Any]) -> None:
    """Writes the three files and logs the tables.

    Args:
        result: The study.
        out: Folder that exists.
        run: Configuration, input and versions, for JSON and the page.
    """
    png = out / f"{result.name}.png"
    result.draw(png)
    write_json(out / f"{result.name}.json", {"study": result.name} | result.content | run)
    settings = [(name, _shown(value)) for name, value in run["config"].items()]
    sections = [
        page.section("Figure", page.figure(png, result.figure_text)),
        *(table.html() for table in result.tables),
        page.section(
            "Made with",
            page.table(("option", "value"), settings, text_columns=(0, 1)),
            page.paragraph(
                ", ".join(f"{name} {version}" for name, version in run["versions"].items()), note=True
            ),
        ),
    ]
    with atomic_file(out / f"{result.name}.html") as temporary:
        temporary.write_text(page.page(result.title, result.lead, sections), encoding="utf-8")
    for table in result.tables:
        for line in table.text().splitlines():
            log.info("%s", line)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
