"""One run of a study: measured anew or shown from a file, kept as JSON and as a table in a page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.answers.files import check_file_options
from benchmarks.answers.table import Table
from benchmarks.pages import put_section
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
        options: What was asked for.
        table: Prints lines as they come.
        section: Name of the table in the page.
        measure: Measures, adding lines to the table; gives results by name.
        add: Adds the lines of one name, for results of an earlier run.
        close: Adds the last lines.

    Returns:
        0; 2 where files are missing or cannot be used.
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
