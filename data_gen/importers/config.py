"""Options of `import-lengths`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.simulator.workloads.arrivals import Arrivals

TimeUnit = Literal["s", "ms", "us", "ns"]


@dataclass(frozen=True, kw_only=True)
class ImportLengthsConfig:
    """Import a production log, a serving trace or a public set of output lengths."""

    INPUTS = ("file", "inputs", "tokenizer")
    OUTPUTS = ("out", "{out}.run.json")

    kind: str
    """Kind of the source: auto (detected), log (any table, or a detected format of a table), vllm-bench, guidellm, otel, langfuse, litellm, mooncake, agent-sessions, azure, burstgpt, vidur, openai-log, feedback, sharegpt or castillo; docs/importing.md has a command for each."""
    file: str
    """The file to import, in the format in which it is published."""
    out: str
    """Parquet file to write."""
    overwrite: bool = False
    """Replace files at the outputs."""
    schema: Literal["samples", "trace"] | None = None
    """Schema to write, samples/2 or trace/1; unset: the default of the kind."""
    model: str = ""
    """Name of the model, if the file has none."""
    dataset: str = ""
    """Name of the data set of the prompts, if the file has none."""
    max_tokens: int | None = None
    """Maximum number of output tokens of all requests, if the file has none; an output of that length counts as truncated."""
    unknown: Literal["keep", "stop", "length", "drop"] = "keep"
    """Treatment of outputs with an unknown finish reason: keep them as "unknown", import them as stop (finished) or length (truncated), or drop them."""
    on_error: Literal["skip", "stop"] = "skip"
    """Treatment of invalid rows: skip them and report their number and reasons, or stop at the first."""
    columns: str = ""
    """For kind log: mapping to the columns of the log, NAME=COLUMN separated by commas, e.g. output_tokens=usage.completion_tokens,prompt=question,finish_reason=end; empty: those of the detected format, or the columns with canonical names."""
    time_unit: TimeUnit | None = None
    """Unit of times in a table that are numbers and whose column's name has no unit (_ms, _us, _ns): s, ms, us or ns; unset: that of the format, or s."""
    inputs: str | None = None
    """For kind openai-log: input file of a batch, whose requests are joined by custom_id."""
    tokens: str = ""
    """Unit of the lengths, if the kind does not determine it; stored as metadata only."""
    tokenizer: str = ""
    """For kind sharegpt: tokenizer.json to count tokens with, or a folder with one."""
    arrivals: Arrivals | None = None
    """Arrival process to draw the arrival times of a trace from, as in the simulator's workloads; unset: the times of the source, if any."""
    seed: int = 0
    """Seed of the drawn arrivals."""

    def __post_init__(self) -> None:
        check_ranges(self, max_tokens=(1, 2**31 - 1), seed=(0, INTEGERS))
        if self.columns and self.kind != "log":
            raise InputError("columns", self.columns, "unset: only kind log supports a column mapping")
        if self.arrivals is not None and self.arrivals.process == "trace":
            allowed = "another process; leave arrivals unset to keep those of the source"
            raise InputError("arrivals.process", "trace", allowed)
