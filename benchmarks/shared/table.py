"""Metrics of `evaluate` as a table: rows are printed as they are added, the whole table is Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler_core.report.page import markdown_table

#: Column -> path of the metric in the report of `evaluate`.
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
    """Value of one column; None if it is missing."""
    value: Any = metrics
    for key in METRICS[name]:
        value = value[key]
    return None if value is None else float(value)


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


@dataclass(slots=True)
class Table:
    """A table that prints each row as it is added.

    Attributes:
        labels: Header and width of the text columns; the first is left-aligned.
        columns: Names of the metrics.
        rows: Cells of all rows.
    """

    labels: Mapping[str, int]
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)

    def start(self) -> None:
        """Prints the header."""
        self._print([*self.labels, *self.columns])

    def add(self, labels: Sequence[str], values: Sequence[float | None]) -> None:
        """Prints a row and stores it."""
        row = [*labels, *("-" if value is None else f"{value:.3f}" for value in values)]
        self.rows.append(row)
        self._print(row)

    def markdown(self) -> str:
        """All rows as a Markdown table."""
        return markdown_table([*self.labels, *self.columns], self.rows)

    def _print(self, cells: Sequence[str]) -> None:
        widths = [*self.labels.values(), *(max(10, len(name) + 2) for name in self.columns)]
        first, *rest = (
            (f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}")
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        print(first + "".join(rest), flush=True)
