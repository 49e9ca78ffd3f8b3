"""The command `evaluate-stream`: alarms where the outputs of a live stream drift away from their predictions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from scheduler_core.command import run_command
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, writable_target
from training.drift.stream import MAX_LINE, DriftStream, event_line


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Watch predictions and their outputs: coverage over a sliding window, a test for drift, running recalibration, for each served model."""

    INPUTS = ("stream",)
    OUTPUTS = ("out",)

    stream: str
    """File of JSON lines, or - for standard input. Keys: mu, sigma, output_tokens; optional nu, finished, served_model, max_tokens, time."""
    out: str = "-"
    """File of JSON lines to write, or - for standard output."""
    window: int = 1000
    """Outputs that coverage is computed over, and memory of the recalibration."""
    arl: float = 100_000
    """Lower bound of the mean number of outputs of a served model to a false alarm."""
    every: int = 1000
    """Outputs of a served model between two states."""
    max_models: int = 1000
    """Maximum number of served models with a monitor of their own; the others share one."""

    def __post_init__(self) -> None:
        for name, least in (("window", 10), ("every", 1), ("max_models", 1)):
            if getattr(self, name) < least:
                raise InputError(name, getattr(self, name), f"an integer >= {least}")
        if not 10 <= self.arl < float("inf"):
            raise InputError("arl", self.arl, "a finite number of at least 10")


def watch(config: StreamConfig) -> None:
    """Reads to the end of the stream; events are written as they happen.

    Raises:
        InputError: A file cannot be read or written.
    """
    stream = DriftStream(config.window, config.arl, config.every, config.max_models)
    with contextlib.ExitStack() as stack:
        source: IO[bytes] = sys.stdin.buffer
        if config.stream != "-":
            source = stack.enter_context(open(existing_file(config.stream, "stream"), "rb"))
        target: IO[Any] = sys.stdout
        if config.out not in ("-", "/dev/stdout"):
            target = stack.enter_context(open(writable_target(config.out, "out"), "w", encoding="utf-8"))
        for events in (stream.feed(_lines(source)), stream.finish()):
            for event in events:
                target.write(event_line(event))
                target.flush()


def _lines(source: IO[bytes]) -> Iterator[bytes]:
    """Lines of bounded size: the rest of a longer one is skipped."""
    while line := source.readline(MAX_LINE + 2):
        yield line
        while line and not line.endswith(b"\n"):
            line = source.readline(MAX_LINE)


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `evaluate-stream`."""
    return run_command(
        "evaluate-stream", StreamConfig, watch, positionals=("stream",), extra="train", args=args
    )


if __name__ == "__main__":
    sys.exit(main())
