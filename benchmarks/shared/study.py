"""One study: measured or loaded from an earlier run, then saved as JSON and as a Markdown table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.pages import put_section
from benchmarks.shared.samples import check_file_options
from benchmarks.shared.table import Table
from scheduler_core.errors import InputError

Results = dict[str, Any]


def run_study(
    options: argparse.Namespace,
    table: Table,
    section: str,
    measure: Callable[[Table, argparse.Namespace], Results],
    add: Callable[[Table, str, Mapping[str, Any]], None],
    close: Callable[[Table, Results], None] | None = None,
) -> int:
    """Runs a study with the options of `add_file_options`.

    Args:
        options: Parsed options.
        table: Prints rows as they are added.
        section: Name of the table in the page.
        measure: Runs the study, adds rows to the table and returns the results by name.
        add: Adds the rows of one name, for results of an earlier run.
        close: Adds the last rows.

    Returns:
        0, or 2 if a file is missing or invalid.
    """
    try:
        table.start()
        if options.results:
            results: Results = json.loads(Path(options.results).read_text(encoding="utf-8"))
            for name, metrics in results.items():
                add(table, name, metrics)
        else:
            check_file_options(options)
            results = measure(table, options)
        if close is not None:
            close(table, results)
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
        if options.markdown:
            put_section(options.markdown, section, table.markdown())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
