"""The HTML page of a training run: losses over the epochs, and a table of all numbers of each epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler_core.report.page import Page
from scheduler_core.report.plotting import GRAY, color, new_figure, svg

VALIDATION, TRAINING = "validation_", "train_"
#: Columns of the history that are neither losses nor metrics.
COUNTS = ("num_prompts", "num_rows", "num_tokens", "num_padded_tokens", "train_seconds", "seconds")


def write_run_report(path: Path, info: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
    """Writes the page.

    Args:
        path: The page.
        info: Content of `training.json`.
        history: A row for each epoch of both stages.
    """
    metrics, data = info["metrics"], info["data"]
    lead = (
        f"Heads {', '.join(info['heads'])}; {data['num_prompts']['train']} prompts and {data['num_labels']['train']} "
        f"labels of {data['name']}. The checkpoint is of stage {metrics['best_stage']}, epoch {metrics['best_epoch']}."
    )
    page = Page(f"Training of {Path(info['config']['out']).name}", lead)
    page.figure(
        svg(_figure(info["heads"], history)), "Each epoch; dashed: training; dotted: the second stage"
    )
    names = [name for name in dict.fromkeys(name for row in history for name in row) if name not in COUNTS]
    best = history.index(min(history, key=lambda row: row[VALIDATION + "score"]))
    page.table(names, [[row.get(name) for name in names] for row in history], best_row=best)
    page.note(", ".join(f"{name} {version}" for name, version in info["versions"].items()))
    page.write(path)


def _figure(heads: Sequence[str], history: Sequence[Mapping[str, Any]]) -> Any:
    """Losses of the heads over the epochs of both stages."""
    figure, (axis,) = new_figure(8, 4, columns=1)
    epochs = range(1, len(history) + 1)
    for number, head in enumerate(heads):
        for name, style in ((VALIDATION, {"label": head}), (TRAINING, {"linestyle": "--"})):
            losses = [row.get(name + head) for row in history]
            axis.plot(epochs, losses, marker=".", color=color(number), **style)
    axis.set(xlabel="epoch", ylabel="loss")
    axis.legend(fontsize=8)
    if start := sum(row["stage"] == 1 for row in history):
        axis.axvline(start + 0.5, color=GRAY, linewidth=1, linestyle=":")
    return figure
