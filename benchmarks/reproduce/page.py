"""Findings as Markdown, and as JSON so that a page can be put together from runs of single studies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.reproduce.coverage import COVERAGE
from benchmarks.reproduce.study import Claim, Findings, Row, Study
from scheduler_core.files import write_json

#: Differences smaller than this are rounding errors of sums.
ROUNDING = 1e-9


def save(path: Path, findings: Findings, about: Mapping[str, Any]) -> None:
    """Writes the findings of one study, and about the run, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"about": dict(about), "findings": asdict(findings)})


def load(path: Path) -> tuple[Findings, dict[str, Any]]:
    """What `save` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    found = content["findings"]
    rows = [Row(**row) for row in found["rows"]]
    claims = [Claim(**one) for one in found["claims"]]
    return Findings(rows, claims, found["notes"], found["size"]), content["about"]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) < ROUNDING:
        return "0"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _table(rows: Sequence[Row]) -> list[str]:
    more = list(dict.fromkeys(name for row in rows for name in row.more))
    head = ["where", "what", "paper", "ours", *more, "ours / paper", "direction"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row.where, row.what, _number(row.paper), _number(row.ours)]
        cells += [_number(row.more.get(name)) for name in more]
        cells += [_number(row.ratio), row.verdict + (f"; {row.note}" if row.note else "")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def section(study: Study, findings: Findings, about: Mapping[str, Any]) -> list[str]:
    """The section of one study."""
    lines = [f"### {study.title}", "", study.why, ""]
    lines += [_extent(findings, about), ""]
    for note in findings.notes:
        lines += [note, ""]
    if findings.rows:
        lines += [*_table(findings.rows), ""]
    if findings.claims:
        lines += ["| claim | where | here | numbers |", "|---|---|---|---|"]
        for one in findings.claims:
            verdict = "holds" if one.holds else "does not hold"
            lines.append(f"| {one.text} | {one.where} | {verdict} | {one.evidence} |")
        lines.append("")
    lines += [
        f"`{about['command']}`, version {about['version']}, {about['date']}, {about['cpu_s']:.0f} CPU s.",
        "",
    ]
    return lines


def _extent(findings: Findings, about: Mapping[str, Any]) -> str:
    """How much of the paper's study was simulated."""
    seeds = f"{about['num_seeds']} seed" + ("s" if about["num_seeds"] > 1 else "")
    what = f"{findings.size}, {seeds}." if findings.size else f"{seeds}."
    if about["quick"]:
        return f"Quick version, which shows that the study runs, and at best a direction: {what}"
    return f"Scale {about['scale']:g}: {what}"


def _scales(parts: Sequence[tuple[Study, Findings, Mapping[str, Any]]]) -> str:
    """How many studies there are of each scale."""
    kinds = Counter(
        "quick versions, which decide nothing" if about["quick"] else f"at scale {about['scale']:g}"
        for _, _, about in parts
    )
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    return f"Of {len(parts)} studies: {counts}; each says its own. Scale 1 is the paper's size."


def _coverage(names: Sequence[str]) -> list[str]:
    """Every table and figure of the papers, and where it is on this page."""
    lines = ["## Coverage", "", "| paper | where | study, or why there is none |", "|---|---|---|"]
    for one in COVERAGE:
        there = ", ".join(f"`{name}`" + ("" if name in names else " (not run)") for name in one.studies)
        lines.append(
            f"| {one.paper} | {one.where} | {'; '.join(part for part in (there, one.note) if part)} |"
        )
    return [*lines, ""]


def page(parts: Sequence[tuple[Study, Findings, Mapping[str, Any]]]) -> str:
    """The whole page."""
    rows = [row for _, findings, _ in parts for row in findings.rows]
    claims = [claim for _, findings, _ in parts for claim in findings.claims]
    with_direction = [row for row in rows if row.verdict != "-"]
    same = sum(row.verdict.startswith("same") for row in with_direction)
    lines = [
        "# Reproduction",
        "",
        "Made by `python -m benchmarks.reproduce`; not edited by hand. Paper values are as printed; ours are simulated by",
        "`scheduler_core.simulator` with equal memory and batch limits for every system, every resident token charged, no",
        "request left out. The direction is that of the effect: within 3 % (or 3 points) there is none. The findings as JSON are",
        "in `benchmarks/results/reproduction`.",
        "",
        f"{same} of {len(with_direction)} values with a direction point where the paper's do; "
        f"{sum(one.holds for one in claims)} of {len(claims)} claims hold. {_scales(parts)}",
        "",
        *_coverage([study.name for study, _, _ in parts]),
    ]
    paper = None
    for study, findings, about in parts:
        if study.paper != paper:
            paper = study.paper
            lines += [f"## {paper}", ""]
        lines += section(study, findings, about)
    return "\n".join(lines).rstrip() + "\n"
