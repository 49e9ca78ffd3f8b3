"""An evaluation as a page with its figures inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from training import page
from training.evaluating import figures
from training.evaluating.markdown import MEANINGS, levels_of
from training.evaluating.report import COLUMNS, Report, shown, table_rows

Draw = Callable[[Report, Path], None]


def html_of(report: Report, content: Mapping[str, Any], scratch: Path) -> str:
    """The page.

    Args:
        report: What is drawn.
        content: What is written in tables.
        scratch: Folder for the figures' files.
    """
    model, data, predictor = content["model"], content["data"], content["predictor"]
    name = predictor.get("artifact_id") or predictor.get("folder")
    lead = (
        f"{predictor['kind']} {name} on {data['name']}, split {data['split']}: {model['num_prompts']} pairs of prompt and "
        f"served model, {model['num_samples']} answers, {model['num_censored']} of them cut."
    )

    def figure(file: str, draw: Draw, text: str) -> str:
        path = scratch / file
        draw(report, path)
        return page.figure(path, text)

    sections = [
        page.section(
            "All predictors",
            page.table(
                ("predictor", *COLUMNS),
                [
                    (label, *(shown(found, column) for column in COLUMNS))
                    for label, found in table_rows(content)
                ],
            ),
            page.table(("name", "meaning"), MEANINGS, text_columns=(0, 1)),
        )
    ]
    if model["mu"]["r2"] is not None and report.judged.prediction.mu is not None:
        text = "Predicted against fitted mu, and predicted against fitted sigma"
        sections.append(
            page.section("Predicted against fitted", figure("parameters.png", figures.draw_parameters, text))
        )
    if report.judged.scores is not None:
        text = "Observed coverage over its level, and its shift from nominal at P50, P90 and P99 for each served model"
        sections.append(
            page.section(
                "Reliability",
                figure("reliability.png", figures.draw_reliability, text),
                _shifts(content),
                _cells(content),
            )
        )
        text = "Histogram of the probability integral transform; flat where the distributions are right"
        sections.append(page.section("PIT", figure("pit.png", figures.draw_pit, text)))
    if content.get("by_dataset"):
        text = "Bars by data set: R2 of mu, Kendall tau, CRPS of log tokens"
        sections.append(
            page.section(
                "By data set", figure("datasets.png", figures.draw_datasets, text), _parts(content, "dataset")
            )
        )
    if content.get("by_model"):
        sections.append(page.section("By served model", _parts(content, "model")))
    sections.append(_made_with(content))
    return page.page("Evaluation of a length predictor", lead, sections)


def _parts(content: Mapping[str, Any], column: str) -> str:
    rows = [
        (name, found["num_prompts"], *(shown(found, heading) for heading in COLUMNS))
        for name, found in content[f"by_{column}"].items()
    ]
    return page.table((column, "prompts", *COLUMNS), rows)


def _shifts(content: Mapping[str, Any]) -> str:
    rows = [
        (column, level.upper(), found["of"], f"{100 * found['shift']:+.1f}", found["num_samples"])
        for column, levels in (content.get("largest_shift") or {}).items()
        for level, found in levels.items()
        if found is not None
    ]
    if not rows:
        return ""
    header = ("largest shift by", "level", "of", "points", "answers")
    return page.table(header, rows, text_columns=(0, 1, 2))


def _cells(content: Mapping[str, Any]) -> str:
    """P50 / P90 / P99 of each served model and data set."""
    table = content.get("coverage_by_model_and_dataset") or {}
    if not table:
        return ""
    datasets = sorted({name for row in table.values() for name in row})
    rows = [(model, *(levels_of(row.get(name)) for name in datasets)) for model, row in sorted(table.items())]
    return page.paragraph("P50 / P90 / P99 in percent:") + page.table(("served model", *datasets), rows)


def _made_with(content: Mapping[str, Any]) -> str:
    settings = [(name, "-" if value is None else value) for name, value in content["config"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return page.section(
        "Made with",
        page.table(("option", "value"), settings, text_columns=(0, 1)),
        page.paragraph(versions, note=True),
    )
