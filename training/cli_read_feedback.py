"""The command `read-feedback`: summarize the proxy's log and compare its two predictors, or write pairs for `evaluate-stream`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Literal

from scheduler_core.command import command
from scheduler_core.files import atomic_file, writable_target, write_json


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig:
    """Summarize the log of finished requests that tailcast-proxy writes, and compare its two predictors, or write pairs of prediction and outcome."""

    INPUTS = ("log",)
    OUTPUTS = ("pairs", "json")

    log: str
    """Folder of the log, or one of its segments."""
    pairs: str | None = None
    """File to write pairs for `evaluate-stream` to, instead of a summary; - for standard output."""
    overwrite: bool = False
    """Replace files at the outputs."""
    side: Literal["main", "shadow"] = "main"
    """Predictor whose pairs are written: main or shadow."""
    json: str | None = None
    """JSON file to also write the summary to."""


def read(config: FeedbackConfig) -> None:
    """Runs the command."""
    from data_gen.importers.logs import feedback_records
    from training.feedback import pair, summarize

    records = feedback_records(config.log)
    if config.pairs is None:
        summary = summarize(records)
        if config.json is not None:
            write_json(writable_target(config.json, "json"), summary)
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
        return
    pairs = (pair(record, config.side) for _, record in records)
    lines = (json.dumps(values) + "\n" for values in pairs if values is not None)
    if config.pairs == "-":
        sys.stdout.writelines(lines)
    else:
        with atomic_file(writable_target(config.pairs, "pairs")) as temporary, open(temporary, "w") as target:
            target.writelines(lines)


main = command("read-feedback", FeedbackConfig, read, positionals=("log",), extra="train")


if __name__ == "__main__":
    raise SystemExit(main())
