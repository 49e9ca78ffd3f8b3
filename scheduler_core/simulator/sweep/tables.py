"""Results of cells as tidy tables: a row per cell, and a row per point with confidence intervals over its seeds."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file
from scheduler_core.simulator.statistics import interval

#: What tables show of a metric that is a summary.
Row = dict[str, Any]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, number) of every number in a tree."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def metric(tree: Mapping[str, Any], name: str) -> float:
    """The number of this dotted name, `ttft_s.p50` or `groups.tenant.paying.tbt_s.p99` for instance.

    Raises:
        InputError: There is none; says what there is at that place.
    """
    value: Any = tree
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(map(str, value)) if isinstance(value, Mapping) else "nothing below"
            raise InputError(f"metric {name}", part, known)
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, int | float):
        allowed = (
            ", ".join(f"{name}.{key}" for key in value)
            if isinstance(value, Mapping)
            else "a metric with a value"
        )
        raise InputError("metric", name, allowed)
    return float(value)


def cell_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per cell: its settings, its arrival rate, and every number of its metrics."""
    return [
        {
            **one["settings"],
            "arrival_rate_rps": one["trace"]["arrival_rate_rps"],
            **dict(flat(one["metrics"])),
        }
        for one in results
    ]


def by_point(
    results: Sequence[Mapping[str, Any]],
) -> dict[tuple[tuple[str, Any], ...], list[Mapping[str, Any]]]:
    """Results by their settings without the seed, in order of appearance."""
    points: dict[tuple[tuple[str, Any], ...], list[Mapping[str, Any]]] = {}
    for one in results:
        point = tuple((name, value) for name, value in one["settings"].items() if name != "seed")
        points.setdefault(point, []).append(one)
    return points


def point_rows(results: Sequence[Mapping[str, Any]], confidence: float = 0.95) -> list[Row]:
    """One row per point and metric: settings, metric, mean, low, high, num_seeds."""
    rows = []
    for point, members in by_point(results).items():
        values: dict[str, list[float]] = {}
        for one in members:
            for name, value in flat(one["metrics"]):
                values.setdefault(name, []).append(value)
        for name, found in values.items():
            spread = interval(found, confidence)
            rows.append({**dict(point), "metric": name, "mean": spread.mean, "low": spread.low, "high": spread.high,
                         "num_seeds": spread.num})  # fmt: skip
    return rows


def metric_rows(intervals: Mapping[str, Any], prefix: str = "") -> list[Row]:
    """One row per metric of a tree that `statistics.over_seeds` made: metric, mean, low, high, num_seeds."""
    rows: list[Row] = []
    for key, value in intervals.items():
        if not isinstance(value, Mapping):
            continue
        if set(value) == {"mean", "low", "high", "num"} and not isinstance(value["num"], Mapping):
            rows.append({"metric": f"{prefix}{key}", "mean": value["mean"], "low": value["low"], "high": value["high"],
                         "num_seeds": value["num"]})  # fmt: skip
        else:
            rows += metric_rows(value, f"{prefix}{key}.")
    return rows


def write_rows(rows: Sequence[Row], path: str | Path) -> None:
    """Writes rows as .parquet or .csv, atomically; a column that a row does not have is empty there.

    Raises:
        InputError: The name ends in something else.
    """
    target = Path(path)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if target.suffix not in (".parquet", ".csv"):
        raise InputError("table", target.name, "a name that ends in .parquet or .csv")
    with atomic_file(target) as temporary:
        if target.suffix == ".csv":
            with open(temporary, "w", encoding="utf-8", newline="") as stream:
                writer = csv.DictWriter(stream, fieldnames=names)
                writer.writeheader()
                writer.writerows(rows)
            return
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise MissingExtraError("pyarrow", "sim") from error
        columns = {name: _column([row.get(name) for row in rows]) for name in names}
        pq.write_table(pa.table(columns), temporary, compression="zstd")


def _column(values: list[Any]) -> list[Any]:
    """Values of one kind: numbers stay numbers, a mixture or anything else becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 and kinds <= {int, float, str, bool}:
        return values
    if kinds <= {int, float}:
        return [None if value is None else float(value) for value in values]
    return [None if value is None else str(value) for value in values]
