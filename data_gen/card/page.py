"""The data card as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data_gen.card.statistics import MIN_SAMPLES

_ROWS = 25
#: TIE paper, section 3.1: 1,000 LMSYS prompts, 100 answers each, Llama-3-8B-Instruct.
PAPER = {"skewness": 3.10, "cv": 1.09, "top10_share": 0.357, "p90_p50": 4.62, "p99_p50": 10.77}
_MEASURES = {
    "cv": "coefficient of variation",
    "p90_p50": "P90 / P50",
    "p99_p50": "P99 / P50",
    "top10_share": "share of tokens in the longest tenth",
    "skewness": "skewness",
}


def markdown(card: Mapping[str, Any], figures: Sequence[str]) -> str:
    """The page for a card as `write_card` makes it."""
    parts = [f"# Data card: {card['name']}", *_head(card), *_ends(card), *_lengths(card, figures)]
    parts += [*_spread(card, figures), *_labels(card), *_prompts(card), *_failures(card)]
    return "\n\n".join(parts) + "\n"


def _head(card: Mapping[str, Any]) -> list[str]:
    counts = card["counts"]
    lines = []
    if "synthetic" in {setting["engine"] for setting in card["settings"]}:
        lines.append("**Synthetic: no language model wrote these answers.**")
    lines.append(
        f"{counts['num_answers']:,} answers ({counts['num_failed']:,} failed rows besides) to"
        f" {counts['num_prompts']:,} prompts. Lengths are in {card['tokens']}."
        f" File: `{card['name']}`, {card['schema']}, SHA-256 `{card['sha256']}`."
    )
    header = ("engine", "model", "temperature", "top_p", "cap", "rows", "cut")
    rows = [
        (
            " ".join(word for word in (setting["engine"], setting["engine_version"]) if word) or "not said",
            setting["model"] or "not said",
            *(setting[name] or "not said" for name in ("temperature", "top_p", "max_tokens")),
            f"{setting['num_rows']:,}",
            f"{setting['num_cut'] / setting['num_rows']:.1%}",
        )
        for setting in card["settings"]
    ]
    return [*lines, "## Engines, models, settings", _table(header, rows)]


def _ends(card: Mapping[str, Any]) -> list[str]:
    reasons = card["counts"]["finish_reasons"]
    total = sum(reasons.values())
    meaning = {
        "stop": "ended by itself",
        "length": "cut at its cap (right-censored)",
        "unknown": "nothing says whether it was cut; taken as finished below",
        "error": "failed: no answer",
    }
    rows = [
        (name, meaning.get(name, ""), f"{count:,}", f"{count / total:.2%}")
        for name, count in sorted(reasons.items())
    ]
    caps = [
        (
            cap or "unknown",
            f"{counts['num_rows']:,}",
            f"{counts['num_cut']:,}",
            f"{counts['num_cut'] / counts['num_rows']:.2%}",
        )
        for cap, counts in card["caps"].items()
    ]
    return [
        "## How answers ended",
        _table(("finish_reason", "meaning", "rows", "share"), rows),
        _table(("cap (tokens)", "rows", "cut", "share"), caps),
    ]


def _lengths(card: Mapping[str, Any], figures: Sequence[str]) -> list[str]:
    parts = [
        "## Lengths",
        _table(*_quantile_table([("all answers", card["length"])])),
        "Cut answers count as long as they were cut at.",
    ]
    return parts + [f"![{name}]({name})" for name in ("lengths.png", "survival.png") if name in figures]


def _spread(card: Mapping[str, Any], figures: Sequence[str]) -> list[str]:
    spread = card["spread"]
    parts = ["## Spread of one prompt's answers"]
    if not spread["num_groups"]:
        return [*parts, f"No prompt has {MIN_SAMPLES} answers or more under one model and setting."]
    rows = [
        (
            _MEASURES[name],
            *(_number(found.get(key)) for key in ("mean", "p10", "p50", "p90")),
            _number(PAPER[name]),
        )
        for name, found in spread["measures"].items()
    ]
    counts = " to ".join(str(count) for count in sorted({spread["min_samples"], spread["max_samples"]}))
    parts.append(
        f"{spread['num_groups']:,} groups of a prompt, model and setting with {counts} answers; {spread['num_left_out']:,} with fewer than {MIN_SAMPLES} left out."
        f" {spread['cv_above_1']:.1%} have a coefficient of variation above 1."
    )
    parts.append(_table(("measure", "mean", "P10", "median", "P90", "paper"), rows))
    parts.append(
        "Paper: means over 1,000 LMSYS prompts with 100 answers each (Llama-3-8B-Instruct). "
        + " ".join(spread["notes"])
    )
    return parts + (["![spread.png](spread.png)"] if "spread.png" in figures else [])


def _labels(card: Mapping[str, Any]) -> list[str]:
    parts = []
    for title, table in (("Categories", card["categories"]), ("Sets of prompts", card["datasets"])):
        if not table or (len(table) == 1 and not table[0]["name"]):
            continue
        shown = table[:_ROWS]
        rows = [
            (
                _cell(row["name"]) or "none",
                f"{row['num_answers']:,}",
                f"{row['cut_share']:.1%}",
                *(_number(row["length"][key]) for key in ("mean", "p10", "p50", "p90", "p99")),
            )
            for row in shown
        ]
        parts += [f"## {title}", _table(("name", "answers", "cut", "mean", "P10", "P50", "P90", "P99"), rows)]
        if len(table) > len(shown):
            parts.append(f"And {len(table) - len(shown)} more, in card.json.")
    return parts


def _prompts(card: Mapping[str, Any]) -> list[str]:
    found = card["prompt_length"]
    if not found:
        return ["## Prompt length", "Not known."]
    rank = "not defined" if found["spearman"] is None else f"{found['spearman']:.2f}"
    header, rows = _quantile_table(
        [
            (f"{row['from']:,} to {row['to']:,} ({row['num_answers']:,} answers)", row["length"])
            for row in found["bins"]
        ]
    )
    return [
        "## Prompt length",
        f"Rank correlation (Spearman) of prompt and answer length over answers: {rank}. Answer lengths by prompt length:",
        _table(("prompt tokens", *header[1:]), rows),
    ]


def _failures(card: Mapping[str, Any]) -> list[str]:
    failures = card["failures"]
    if not failures:
        return ["## Failures", "None recorded in this file."]
    rows = [
        (kind, f"{found['num_rows']:,}", _cell(found["example"])[:120])
        for kind, found in sorted(failures.items(), key=lambda item: -item[1]["num_rows"])
    ]
    return ["## Failures", _table(("kind", "rows", "example"), rows)]


def _quantile_table(
    rows: Sequence[tuple[str, Mapping[str, float]]],
) -> tuple[Sequence[str], list[Sequence[str]]]:
    keys = ("mean", "min", "p10", "p25", "p50", "p75", "p90", "p99", "max")
    header = ("", *(key.upper() if key.startswith("p") else key for key in keys))
    return header, [(name, *(_number(found[key]) for key in keys)) for name, found in rows]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])
