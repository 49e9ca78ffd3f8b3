"""`write_card`: a data card as JSON, Markdown and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_gen.card.rows import CardRows, read_card_rows
from data_gen.card.statistics import MIN_SAMPLES, Dispersion, card_content, dispersion_of, survival
from scheduler_core.files import atomic_file, sha256_file, shared_folder, write_json
from scheduler_core.report import plotting
from scheduler_core.report.markdown import markdown_table

CARD_NAME = "data-card/2"
FIGURES = ("lengths.png", "survival.png", "dispersion.png")
FILES = ("card.json", "card.md", *FIGURES)
#: TIE paper, section 3.1: 1,000 LMSYS prompts, 100 outputs each, Llama-3-8B-Instruct.
PAPER = {"skewness": 3.10, "cv": 1.09, "top_decile_fraction": 0.357, "p90_p50": 4.62, "p99_p50": 10.77}
_TITLES = {
    "cv": "coefficient of variation",
    "p90_p50": "P90 / P50",
    "p99_p50": "P99 / P50",
    "top_decile_fraction": "fraction of tokens in the longest tenth",
    "skewness": "skewness",
}
_REASONS = {
    "stop": "ended by itself",
    "length": "truncated at max_tokens (right-censored)",
    "unknown": "finish reason unknown; taken as finished below",
    "error": "failed: no output",
}
_MAX_ROWS = 25
_QUANTILES = ("mean", "min", "p10", "p25", "p50", "p75", "p90", "p99", "max")


def write_card(samples_path: str | Path, folder: str | Path, *, figures: bool = True) -> dict[str, Any]:
    """Writes card.json, card.md and figures for a samples file into a folder, and returns the card.

    Args:
        samples_path: `samples/1`, `samples/2`, or lists of output_tokens with one row for each prompt.
        folder: Created if it is missing; other files in it stay.
        figures: Draw them too; needs matplotlib.

    Raises:
        InputError: The file cannot be read, lacks a column or holds no output; or the folder cannot be created.
        TailcastError: The folder holds a file of one of these names that no card wrote.
    """
    rows = read_card_rows(samples_path)
    target = shared_folder(folder, "card", FILES, field="card")
    outputs = rows.outputs()
    dispersion = dispersion_of(outputs)
    unit = rows.metadata.get("tokens", "tokens")
    is_own = unit in ("tokens", "the model's own")
    card = {
        "card": CARD_NAME,
        "name": Path(samples_path).name,
        "sha256": sha256_file(samples_path),
        "schema": rows.metadata.get("schema", "no schema named"),
        "tokens": "tokens of the served model" if is_own else f"tokens of {unit}",
        **card_content(rows, outputs, dispersion),
    }
    drawn = (
        draw_figures(outputs, dispersion, "tokens" if is_own else f"{unit} tokens", target) if figures else []
    )
    write_json(target / "card.json", card)
    with atomic_file(target / "card.md") as temporary:
        temporary.write_text(card_markdown(card, drawn), encoding="utf-8")
    return card


def card_markdown(card: Mapping[str, Any], figures: Sequence[str]) -> str:
    """The page for a card."""
    counts, total = card["counts"], sum(card["counts"]["finish_reasons"].values())
    synthetic = any(setting["engine"] == "synthetic" for setting in card["settings"])
    parts = [
        f"# Data card: {card['name']}",
        *(["**Synthetic: no language model wrote these outputs.**"] if synthetic else []),
        f"{counts['num_outputs']:,} outputs ({counts['num_failed']:,} failed rows besides) of"
        f" {counts['num_prompts']:,} prompts. Lengths are in {card['tokens']}."
        f" File: `{card['name']}`, {card['schema']}, SHA-256 `{card['sha256']}`.",
        "## Engines, models, settings",
        markdown_table(
            ("engine", "model", "temperature", "top_p", "max_tokens", "rows", "truncated"),
            [
                (
                    f"{entry['engine']} {entry['engine_version']}".strip() or "unknown",
                    *(entry[name] or "unknown" for name in ("model", "temperature", "top_p", "max_tokens")),
                    f"{entry['num_rows']:,}",
                    f"{entry['num_truncated'] / entry['num_rows']:.1%}",
                )
                for entry in card["settings"]
            ],
        ),
        "## Finish reasons",
        markdown_table(
            ("finish_reason", "meaning", "rows", "fraction"),
            [
                (name, _REASONS.get(name, ""), f"{count:,}", f"{count / total:.2%}")
                for name, count in sorted(counts["finish_reasons"].items())
            ],
        ),
        "## Lengths",
        markdown_table(("", *map(_heading, _QUANTILES)), [("all outputs", *_quantiles(card["length"]))]),
        "Truncated outputs count with the length that is known.",
        *(f"![{name}]({name})" for name in FIGURES[:2] if name in figures),
        *_dispersion_section(card["dispersion"], figures),
        *_label_section("Categories", card["categories"]),
        *_label_section("Sets of prompts", card["datasets"]),
        *_prompt_section(card["prompt_length"]),
        "## Failures",
    ]
    failures = sorted(card["failures"].items(), key=lambda item: -item[1]["num_rows"])
    rows = [
        (kind, f"{entry['num_rows']:,}", " ".join(entry["example"].split())[:120]) for kind, entry in failures
    ]
    parts.append(markdown_table(("kind", "rows", "example"), rows) if rows else "None recorded in this file.")
    return "\n\n".join(parts) + "\n"


def _dispersion_section(dispersion: Mapping[str, Any], figures: Sequence[str]) -> list[str]:
    title = "## Dispersion of one prompt's outputs"
    if not dispersion["num_groups"]:
        return [title, f"No prompt has {MIN_SAMPLES} outputs or more under one model and setting."]
    rows = [
        (
            _TITLES[name],
            *(_number(entry.get(key)) for key in ("mean", "p10", "p50", "p90")),
            _number(PAPER[name]),
        )
        for name, entry in dispersion["measures"].items()
    ]
    counts = " to ".join(map(str, sorted({dispersion["min_samples"], dispersion["max_samples"]})))
    parts = [
        title,
        f"{dispersion['num_groups']:,} groups of a prompt, model and setting with {counts} outputs;"
        f" {dispersion['num_skipped']:,} with fewer than {MIN_SAMPLES} are skipped."
        f" {dispersion['cv_above_1']:.1%} have a coefficient of variation above 1.",
        markdown_table(("measure", "mean", "P10", "median", "P90", "paper"), rows),
        "Paper: means over 1,000 LMSYS prompts with 100 outputs each (Llama-3-8B-Instruct). "
        + " ".join(dispersion["notes"]),
    ]
    return parts + [f"![{name}]({name})" for name in FIGURES[2:] if name in figures]


def _label_section(title: str, table: Sequence[Mapping[str, Any]]) -> list[str]:
    if not table or (len(table) == 1 and not table[0]["name"]):
        return []
    rows = [
        (
            " ".join(row["name"].split()) or "none",
            f"{row['num_outputs']:,}",
            f"{row['truncated_fraction']:.1%}",
            *(_number(row["length"][key]) for key in ("mean", "p10", "p50", "p90", "p99")),
        )
        for row in table[:_MAX_ROWS]
    ]
    header = ("name", "outputs", "truncated", "mean", "P10", "P50", "P90", "P99")
    rest = [f"And {len(table) - _MAX_ROWS} more, in card.json."] if len(table) > _MAX_ROWS else []
    return [f"## {title}", markdown_table(header, rows), *rest]


def _prompt_section(content: Mapping[str, Any]) -> list[str]:
    if not content:
        return ["## Prompt length", "Unknown."]
    rank = "not defined" if content["spearman"] is None else f"{content['spearman']:.2f}"
    rows = [
        (f"{row['from']:,} to {row['to']:,} ({row['num_outputs']:,} outputs)", *_quantiles(row["length"]))
        for row in content["bins"]
    ]
    return [
        "## Prompt length",
        f"Rank correlation (Spearman) of prompt and output length: {rank}. Output lengths by prompt length:",
        markdown_table(("prompt tokens", *map(_heading, _QUANTILES)), rows),
    ]


def _heading(key: str) -> str:
    return key.upper() if key.startswith("p") else key


def _quantiles(summary: Mapping[str, float]) -> list[str]:
    return [_number(summary[key]) for key in _QUANTILES]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"


def draw_figures(outputs: CardRows, dispersion: Dispersion, unit: str, folder: Path) -> list[str]:
    """Draws the figures into a folder and returns their names; the dispersion only if some prompt has enough outputs."""
    figures = {"lengths.png": _histogram(outputs, unit), "survival.png": _survival(outputs, unit)}
    if len(dispersion.counts):
        figures["dispersion.png"] = _dispersion_figure(dispersion, unit)
    for name, figure in figures.items():
        plotting.write_png(figure, folder / name)
    return list(figures)


def _histogram(outputs: CardRows, unit: str) -> Any:
    figure, (axis,) = plotting.new_figure(8, 4.6)
    lengths, truncated = outputs.length, outputs.has_reason("length")
    # Edges between integers, so that no bin of small ones is empty.
    edges = np.unique(np.round(np.geomspace(max(lengths.min(), 1), max(lengths.max(), 2) + 1, 40))) - 0.5
    bottom = np.zeros(len(edges) - 1)
    for label, mask, color in (("finished", ~truncated, 0), ("truncated at max_tokens", truncated, 1)):
        heights = np.histogram(lengths[mask], edges)[0] / len(lengths)
        if heights.any():
            axis.bar(
                edges[:-1],
                heights,
                np.diff(edges),
                bottom,
                align="edge",
                color=plotting.color(color),
                label=label,
            )
        bottom = bottom + heights
    median = float(np.median(lengths))
    bound = "at least " if truncated.mean() >= 0.5 else ""
    axis.axvline(
        median, color=plotting.INK, linewidth=1, linestyle="--", label=f"median {bound}{median:,.0f}"
    )
    axis.set_xscale("log")
    plotting.mark_decades(axis.xaxis, (max(edges[0], 0.5), edges[-1]))
    axis.yaxis.set_major_formatter(lambda value, position: f"{value:.1%}")
    axis.set_xlabel(f"output length ({unit})")
    axis.set_ylabel("fraction of outputs in the bin")
    axis.legend(frameon=False, fontsize=9)
    axis.set_title(f"{len(lengths):,} outputs, {truncated.mean():.1%} truncated", fontsize=10)
    return figure


def _survival(outputs: CardRows, unit: str) -> Any:
    figure, (axis,) = plotting.new_figure(8, 4.6)
    category, truncated = outputs.columns["category"], outputs.has_reason("length")
    counts = np.bincount(category.codes, minlength=len(category.names))
    codes = [code for code in np.argsort(-counts, kind="stable")[:5] if category.names[code] and counts[code]]
    curves = [("all outputs", np.ones(len(truncated), bool))]
    curves += [(category.names[code][:24], category.codes == code) for code in codes if len(codes) > 1]
    bottom = 1.0
    for index, (label, mask) in enumerate(curves):
        points, alive = survival(outputs.length[mask], truncated[mask])
        points, alive = points[alive > 0], alive[alive > 0]
        bottom = min([bottom, *alive])
        axis.step(
            points,
            alive,
            where="post",
            color=plotting.color(index),
            linewidth=1.0 if index else 1.8,
            label=label,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    low = max(float(outputs.length.min()), 1.0)
    plotting.mark_decades(axis.xaxis, (low, max(float(outputs.length.max()), 2 * low)))
    plotting.mark_decades(axis.yaxis, (bottom / 2, 1.0))
    axis.set_xlabel(f"output length x ({unit})")
    axis.set_ylabel("fraction of outputs longer than x")
    axis.legend(frameon=False, fontsize=8)
    axis.set_title("a power law would be a straight line; truncated outputs by Kaplan and Meier", fontsize=10)
    return figure


def _dispersion_figure(dispersion: Dispersion, unit: str) -> Any:
    figure, axes = plotting.new_figure(11, 6.4, rows=2, columns=3)
    for axis, (name, values) in zip(axes, dispersion.measures.items(), strict=False):
        finite = values[np.isfinite(values)]
        axis.set_title(_TITLES[name], fontsize=10)
        if len(finite):
            low, high = (float(edge) for edge in np.percentile(finite, (0.5, 99.5)))
            high = high if high > low else low + 1
            axis.hist(np.clip(finite, low, high), bins=np.linspace(low, high, 41), color=plotting.color(0))
            label = f"mean {finite.mean():.2f}"
            axis.axvline(finite.mean(), color=plotting.INK, linewidth=1, linestyle="--", label=label)
            axis.legend(frameon=False, fontsize=8)
            axis.set_ylabel("prompts", fontsize=8)
    last, medians = axes[-1], dispersion.medians
    last.scatter(
        medians, dispersion.measures["cv"], s=4, color=plotting.color(0), alpha=0.25, rasterized=True
    )
    last.set_xscale("log")
    low = max(float(medians.min()), 0.5)
    plotting.mark_decades(last.xaxis, (low, max(float(medians.max()), 2 * low)))
    last.set_title("coefficient of variation by median length", fontsize=10)
    last.set_xlabel(f"median length ({unit})", fontsize=8)
    counts = " to ".join(map(str, sorted({dispersion.counts.min(), dispersion.counts.max()})))
    figure.suptitle(
        f"dispersion within {len(medians):,} prompts of {counts} outputs; the outer bins hold all beyond",
        fontsize=10,
    )
    return figure
