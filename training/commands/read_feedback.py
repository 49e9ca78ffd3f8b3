"""The command `read-feedback`: summarize the proxy's log and compare its two predictors, or write pairs for `evaluate-stream`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

from scheduler_core.shell.command import command, report_left_out
from scheduler_core.shell.files import atomic_file, writable_target, write_json

if TYPE_CHECKING:
    from data_gen.feedback_record import FeedbackRecord
    from training.correcting.feedback import Side


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


def read(config: FeedbackConfig) -> int:
    """Runs the command; returns its exit code, see `report_left_out`."""
    from data_gen.importers.logs import feedback_records
    from training.correcting.feedback import summarize

    left_out = Counter[str]()
    records = feedback_records(config.log, left_out)
    if config.pairs is None:
        summary = summarize(records)
        if config.json is not None:
            write_json(writable_target(config.json, "json"), summary)
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
        num_used = summary["num_records"]
    elif config.pairs == "-":
        num_used = _write_pairs(records, config.side, sys.stdout, left_out)
    else:
        with atomic_file(writable_target(config.pairs, "pairs")) as temporary, open(temporary, "w") as target:
            num_used = _write_pairs(records, config.side, target, left_out)
    return report_left_out(left_out, num_used + left_out.total(), "lines")


def _write_pairs(
    records: Iterable[tuple[int, FeedbackRecord]], side: Side, target: TextIO, left_out: Counter[str]
) -> int:
    """Writes the pairs of the records that have one, counts the others in `left_out`, and returns the number of pairs."""
    from training.correcting.feedback import pair

    num_pairs = 0
    for _, record in records:
        values = pair(record, side)
        if values is None:
            left_out[f"no prediction of {side}, or no output"] += 1
        else:
            target.write(json.dumps(values) + "\n")
            num_pairs += 1
    return num_pairs


main = command("read-feedback", FeedbackConfig, read, positionals=("log",), extra="train")


if __name__ == "__main__":
    raise SystemExit(main())
