"""Tables of benchmarks/results/urgency.md from reports of `evaluate-urgency`.

python -m benchmarks.urgency.table REPORT.json [--markdown benchmarks/results/urgency.md]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section
from scheduler_core.report.page import markdown_table
from training.urgency.evaluation import COLUMNS, SCORES

SECTION = "urgency results"
NOTES = """\
- All of the most likely level but "jumps, decided" and "neutral words", which are of the level of least expected cost, and "jumps, scheduled": after abstention and limited promotion.
- recall 0, 1: fraction of the emergencies and of the interactive texts that are predicted as such.
- under-triage, over-triage: decided less or more urgent than true; critical: of levels 0 and 1, and 0 or 1 for another.
- jumps: pairs whose level a mere claim of urgency raises; neutral words: the same for words that claim nothing.
- ECE: expected calibration error. answered: fraction of the texts at or above the abstain threshold; 0: it always abstains.
- Several seeds of a recipe: mean, and in brackets the standard deviation between seeds."""


def urgency_markdown(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Both tables: a row for each predictor, and the reliability of the first predictor.

    Args:
        reports: Name of a predictor -> its reports, one for each seed of a recipe.
    """
    rows = [(name, *(cell_of(column, runs) for column in COLUMNS)) for name, runs in reports.items()]
    first = next(iter(reports))
    return "\n\n".join(
        [
            markdown_table(("predictor", *COLUMNS), rows),
            NOTES,
            f"Reliability of {first}:",
            _reliability(reports[first]),
        ]
    )


def cell_of(column: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """A table cell: mean over the reports and their standard deviation; - if unknown."""
    numbers: list[Any] = [reduce(getitem, COLUMNS[column], report) for report in reports]
    scale, digits, unit = (1, 3, "") if column in SCORES else (100, 1, " %")
    values = [scale * number for number in numbers if number is not None]
    if not values:
        return "-"
    deviation = f" ({statistics.stdev(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}{unit}"


def _reliability(reports: Sequence[Mapping[str, Any]]) -> str:
    """Bins of the predicted probability of the most likely level, over all seeds together."""
    rows = []
    diagrams = [report["reliability"]["most likely level"]["bins"] for report in reports]
    for bins in zip(*diagrams, strict=True):
        if count := sum(cell["count"] for cell in bins):
            means = (
                sum(cell["count"] * (cell[name] or 0.0) for cell in bins) / count
                for name in ("mean_probability", "frequency")
            )
            label = f"{bins[0]['low']:.1f} to {bins[0]['high']:.1f}"
            rows.append((label, str(count), *(f"{100 * mean:.1f} %" for mean in means)))
    return markdown_table(("predicted probability", "texts", "mean", "right"), rows)


def predictors_of(content: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Reports by name from the JSON of `evaluate-urgency`; the seeds of a recipe share one name."""
    reports: dict[str, list[Mapping[str, Any]]] = {}
    entries = [(content["config"]["name"], content), *((one["name"], one) for one in content["compared"])]
    for name, report in [*entries, *content["baselines"].items()]:
        reports.setdefault(name.replace("_", " "), []).append(report)
    return reports


def main(args: Sequence[str] | None = None) -> None:
    """Prints the tables or writes them to a page."""
    parser = Parser(__doc__)
    parser.add_argument("report", type=Path, help="JSON of evaluate-urgency")
    parser.add_argument("--markdown", help="Markdown page whose table is replaced; created if missing")
    options = parser.parse_args(args)
    text = urgency_markdown(predictors_of(json.loads(options.report.read_text(encoding="utf-8"))))
    if options.markdown is None:
        sys.stdout.write(text + "\n")
    else:
        put_section(options.markdown, SECTION, text)


if __name__ == "__main__":
    main()
