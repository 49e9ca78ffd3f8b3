"""The command `read-feedback`: summarize the proxy's log of outcomes and compare its two predictors."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass

from scheduler_core.shell.command import command, report_left_out
from scheduler_core.shell.files import writable_target, write_json


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig:
    """Summarize the log of finished requests that tailcast-proxy writes, and compare its two predictors."""

    INPUTS = ("log",)
    OUTPUTS = ("json",)

    log: str
    """Folder of the log, or one of its segments."""
    overwrite: bool = False
    """Replace files at the outputs."""
    json: str | None = None
    """JSON file to also write the summary to."""


def read(config: FeedbackConfig) -> int:
    """Runs the command; returns its exit code, see `report_left_out`."""
    from scheduler_core.prediction.outcome import read_log
    from training.evaluating.feedback import summarize

    left_out = Counter[str]()
    summary = summarize(outcome for _, outcome in read_log(config.log, left_out))
    if config.json is not None:
        write_json(writable_target(config.json, "json"), summary)
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    return report_left_out(left_out, summary["num_records"] + left_out.total(), "lines")


main = command("read-feedback", FeedbackConfig, read, positionals=("log",), extra="train")


if __name__ == "__main__":
    raise SystemExit(main())
