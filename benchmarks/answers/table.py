"""Metrics of `evaluate` as a table: a line as soon as it is known, and all of it in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler_core.report.page import markdown_table

#: Column -> where `evaluate` has it.
METRICS: dict[str, tuple[str, ...]] = {
    "R2 mu": ("mu", "r2"),
    "tau": ("kendall_tau", "median_vs_fitted_mu"),
    "R2 log1p sigma": ("sigma_log1p", "r2"),
    "CRPS": ("crps_tokens",),
    "P50": ("coverage", "p50", "estimate"),
    "P90": ("coverage", "p90", "estimate"),
    "P99": ("coverage", "p99", "estimate"),
}


def metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """The number of one column; None where it is not known."""
    value: Any = metrics
    for key in METRICS[name]:
        value = value[key]
    return None if value is None else float(value)


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of what is known; None where nothing is."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


@dataclass(slots=True)
class Table:
    """A table whose lines are printed as they come.

    Attributes:
        labels: Header and width of the columns of text, the first of which is aligned left.
        columns: Names of the metrics.
        rows: Cells, as they were added.
    """

    labels: Mapping[str, int]
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)

    def start(self) -> None:
        """Prints the header."""
        self._print([*self.labels, *self.columns])

    def add(self, labels: Sequence[str], values: Sequence[float | None]) -> None:
        """Prints a line and keeps it."""
        row = [*labels, *("-" if value is None else f"{value:.3f}" for value in values)]
        self.rows.append(row)
        self._print(row)

    def markdown(self) -> str:
        """All lines."""
        return markdown_table([*self.labels, *self.columns], self.rows)

    def _print(self, cells: Sequence[str]) -> None:
        widths = [*self.labels.values(), *(max(10, len(name) + 2) for name in self.columns)]
        first, *rest = (
            (f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}")
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        print(first + "".join(rest), flush=True)
