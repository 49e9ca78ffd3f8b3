"""The command `read-feedback`: a summary of the proxy's log, with its two predictors compared, or pairs for `evaluate-stream`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from scheduler_core.command import command
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file, writable_target, write_json


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig:
    """Summarize the log of finished requests that tailcast-proxy writes, and compare its two predictors, or write pairs of prediction and outcome."""

    INPUTS = ("log",)
    OUTPUTS = ("pairs", "records", "json")

    log: str
    """Folder of the log, or one of its segments."""
    pairs: str | None = None
    """Write pairs for `evaluate-stream` to this file instead of a summary; - for standard output."""
    records: str | None = None
    """Write all valid records to this file, one a line, instead of a summary: what `import-lengths feedback` reads."""
    overwrite: bool = False
    """Replace files at the outputs."""
    side: Literal["main", "shadow"] = "main"
    """Predictor of the pairs: main, or the shadow predictor."""
    json: str | None = None
    """Write the summary to this file too."""

    def __post_init__(self) -> None:
        if self.pairs is not None and self.records is not None:
            raise InputError("pairs, records", self.pairs, "one of them")


def read(config: FeedbackConfig) -> None:
    """Runs the command.

    Raises:
        InputError: The log cannot be read, or holds no record.
    """
    from data_gen.importers.logs import feedback_records
    from training.feedback import pair, summarize

    records = feedback_records(config.log)
    if config.records is not None:
        rows = (record.model_dump(exclude_unset=True) for _, record in records)
        _write(config.records, "records", rows)
    elif config.pairs is not None:
        pairs = (pair(record, config.side) for _, record in records)
        _write(config.pairs, "pairs", (values for values in pairs if values is not None))
    else:
        summary = summarize(records)
        if config.json is not None:
            write_json(writable_target(config.json, "json"), summary)
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")


def _write(out: str, field: str, rows: Iterable[dict[str, Any]]) -> None:
    lines = (json.dumps(row) + "\n" for row in rows)
    if out == "-":
        sys.stdout.writelines(lines)
    else:
        with atomic_file(writable_target(out, field)) as temporary, open(temporary, "w") as target:
            target.writelines(lines)


main = command("read-feedback", FeedbackConfig, read, positionals=("log",), extra="train")


if __name__ == "__main__":
    raise SystemExit(main())
