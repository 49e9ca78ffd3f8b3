"""Files of samples (samples/2), several of which make up one study."""

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
    """--train, --calibration, --report, and where results go."""
    parser.add_argument("--train", nargs="+", default=[], help="samples to train on, one file or several")
    parser.add_argument("--calibration", help="samples that decide when to stop, and calibrate")
    parser.add_argument("--report", help="samples to judge on")
    parser.add_argument("--json", help="file for all metrics")
    parser.add_argument("--markdown", help="page whose table is replaced, or that is made")
    parser.add_argument("--results", help="--json FILE of an earlier run: show it, train nothing")
    parser.add_argument("--work", help="folder for temporary files")


def check_file_options(options: argparse.Namespace) -> None:
    """Raises InputError where a file to train or to judge on is missing."""
    for name in ("train", "calibration", "report"):
        if not getattr(options, name):
            raise InputError(f"--{name}", getattr(options, name), "a file of samples, or --results FILE")


def write_selected(files: Sequence[str], folder: Path, chosen: Callable[[pa.Table], pa.Array]) -> list[str]:
    """Copies of some rows of each file, in `folder`; files of which nothing is left are left out.

    Args:
        files: Parquet files.
        folder: A folder that is there.
        chosen: Table -> which of its rows are kept.

    Raises:
        InputError: Nothing is left of any.
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
        raise InputError("--train", list(files), "files with the rows that are asked for")
    return paths


def values_of(files: Sequence[str], column: str) -> set[str]:
    """All values of a column of text."""
    return {
        str(value) for file in files for value in pq.read_table(file, columns=[column])[column].to_pylist()
    }


def implied_max_tokens(path: str | Path) -> int | None:
    """Limit of CASTILLO's outputs, whose files do not state it, by their columns; None for any other file."""
    names = set(pq.read_schema(path).names)
    is_castillo = names >= _CASTILLO_COLUMNS and not names & {"finished", "finish_reason", "max_tokens"}
    return CASTILLO_MAX_TOKENS if is_castillo else None
