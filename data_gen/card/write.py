"""`write_card`: what a set of sampled answers holds, as JSON, Markdown and figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from data_gen.card.figures import FIGURES, draw
from data_gen.card.lengths import SETTING_COLUMNS, Lengths, read_lengths
from data_gen.card.page import markdown
from data_gen.card.statistics import Spread, by_label, by_prompt_length, spread_of, summary_of
from scheduler_core.files import atomic_file, sha256_file, shared_folder, write_json

CARD_NAME = "data-card/1"
FILES = ("card.json", "card.md", *FIGURES)


def write_card(samples_path: str | Path, folder: str | Path, *, figures: bool = True) -> dict[str, Any]:
    """Writes card.json, card.md and figures for a samples file into a folder, and returns the card.

    Reads `samples/1`, `samples/2` and lists of output_tokens with one row for each prompt; prompts and texts are not
    read, and 29 bytes are held for each answer.

    Args:
        samples_path: The file.
        folder: Made if it is missing; other files in it stay.
        figures: Draw them too; needs matplotlib.

    Raises:
        InputError: The file cannot be read, lacks a column or holds no answer; or the folder cannot be made.
        TailcastError: The folder holds a file of one of these names that no card wrote.
    """
    lengths = read_lengths(samples_path)
    target = shared_folder(folder, "card", FILES, field="card")
    spread = spread_of(lengths)
    unit = lengths.metadata.get("tokens", "tokens")
    card = {
        "card": CARD_NAME,
        "name": Path(samples_path).name,
        "sha256": sha256_file(samples_path),
        "schema": lengths.metadata.get("schema", "no schema named"),
        "tokens": "tokens of the served model"
        if unit in ("tokens", "the model's own")
        else f"tokens of {unit}",
        **_content(lengths, spread),
    }
    axis = "tokens" if unit in ("tokens", "the model's own") else f"{unit} tokens"
    drawn = draw(lengths, spread, axis, target) if figures else []
    write_json(target / "card.json", card)
    with atomic_file(target / "card.md") as temporary:
        temporary.write_text(markdown(card, drawn), encoding="utf-8")
    return card


def _content(lengths: Lengths, spread: Spread) -> dict[str, Any]:
    settings = [
        dict(zip(SETTING_COLUMNS, setting, strict=True))
        | {"num_rows": count, "num_cut": lengths.cut_by_setting[setting]}
        for setting, count in lengths.settings.most_common()
    ]
    caps = sorted(lengths.caps.items(), key=lambda item: int(item[0] or 0))
    return {
        "counts": {
            "num_answers": len(lengths.length),
            "num_tokens": int(lengths.length.sum(dtype=np.int64)),
            "num_failed": lengths.finish_reasons["error"],
            "num_prompts": lengths.num_prompts,
            "num_groups": lengths.num_groups,
            "finish_reasons": dict(lengths.finish_reasons),
            "cut_share": float(lengths.cut.mean()),
        },
        "settings": settings,
        "caps": {cap: {"num_rows": rows, "num_cut": cut} for cap, (rows, cut) in caps},
        "length": summary_of(lengths.length),
        "spread": _spread(spread),
        "categories": by_label(lengths, lengths.category, lengths.categories),
        "datasets": by_label(lengths, lengths.dataset, lengths.datasets),
        "prompt_length": by_prompt_length(lengths),
        "failures": {
            kind: {"num_rows": count, "example": example}
            for kind, (count, example) in lengths.failures.items()
        },
        "timings": {
            name: {"mean": total / count, "num_rows": count}
            for name, (total, count) in lengths.timings.items()
        },
    }


def _spread(spread: Spread) -> dict[str, Any]:
    if not len(spread.counts):
        return {"num_groups": 0, "num_left_out": spread.num_left_out, "measures": {}, "notes": []}
    return {
        "num_groups": len(spread.counts),
        "num_left_out": spread.num_left_out,
        "min_samples": int(spread.counts.min()),
        "max_samples": int(spread.counts.max()),
        "median_samples": float(np.median(spread.counts)),
        "cv_above_1": float((spread.measures["cv"] > 1).mean()),
        "measures": {name: summary_of(values) for name, values in spread.measures.items()},
        "num_constant": int((spread.measures["cv"] == 0).sum()),
        "notes": bias_notes(spread),
    }


def bias_notes(spread: Spread) -> list[str]:
    """What the number of answers for each prompt does to the measures.

    The skewness of n numbers is at most (n - 2) / sqrt(n - 1), reached when all but one are equal.
    """
    usual = int(np.median(spread.counts))
    bound = (usual - 2) / math.sqrt(usual - 1)
    notes = []
    if usual < 100:
        notes.append(
            f"With {usual} answers a skewness cannot exceed {bound:.2f}; it, the coefficient of variation, P99 / P50 and"
            " the share of the longest tenth are too small on average for heavy tails, whose largest values are mostly"
            " not among so few."
        )
    longest = math.ceil(usual / 10)
    if usual % 10:
        notes.append(f"The longest tenth of {usual} answers is {longest}, {longest / usual:.0%} of them.")
    if usual < 50:
        notes.append(f"P99 of {usual} answers lies next to the longest one: read it as such.")
    cut = float((spread.cut_share > 0).mean())
    if cut:
        notes.append(f"{cut:.1%} of the groups hold cut answers, whose true spread is larger.")
    constant = int((spread.measures["cv"] == 0).sum())
    if constant:
        notes.append(f"{constant} groups are constant: no skewness, the other measures count.")
    return notes
