"""Input files of samples (samples/2); a study can use several."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_gen.importers.public_sets import CASTILLO_MAX_TOKENS
from scheduler_core.errors import InputError

_CASTILLO_COLUMNS = {"dataset", "model", "prompt_id", "prompt", "prompt_tokens", "output_tokens", "category"}


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Adds --train, --calibration, --report and the options for the results."""
    parser.add_argument("--train", nargs="+", default=[], help="samples to train on, one file or several")
    parser.add_argument("--calibration", help="samples for early stopping and calibration")
    parser.add_argument("--report", help="samples to evaluate on")
    parser.add_argument("--json", help="JSON file to write all metrics to")
    parser.add_argument("--markdown", help="Markdown page whose table is replaced; created if missing")
    parser.add_argument("--results", help="--json FILE of an earlier run: print it without training")
    parser.add_argument("--work", help="folder for temporary files")


def check_file_options(options: argparse.Namespace) -> None:
    """Raises InputError if a file for training or evaluation is missing."""
    for name in ("train", "calibration", "report"):
        if not getattr(options, name):
            raise InputError(f"--{name}", getattr(options, name), "a file of samples, or --results FILE")


def write_selected(files: Sequence[str], folder: Path, chosen: Callable[[pa.Table], pa.Array]) -> list[str]:
    """Writes the selected rows of each file to `folder`; files without selected rows are skipped.

    Args:
        files: Parquet files.
        folder: An existing folder.
        chosen: Maps a table to a mask of the rows to keep.

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


def implied_max_tokens(path: str | Path) -> int | None:
    """The limit of CASTILLO's outputs, recognized by its columns (no file states it); otherwise None."""
    names = set(pq.read_schema(path).names)
    is_castillo = names >= _CASTILLO_COLUMNS and not names & {"finished", "finish_reason", "max_tokens"}
    return CASTILLO_MAX_TOKENS if is_castillo else None
