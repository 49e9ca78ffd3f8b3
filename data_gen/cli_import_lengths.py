"""The command `import-lengths`: logs, traces and public sets as samples or as a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.command import command
from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.simulator.workloads.arrivals import Arrivals


@dataclass(frozen=True, kw_only=True)
class ImportLengthsConfig:
    """Import a production log, a serving trace or a public set of output lengths."""

    INPUTS = ("file", "tokenizer")
    OUTPUTS = ("out", "{out}.run.json")

    kind: str
    """Kind of the source: log (any table), openai-log, feedback, azure, burstgpt, mooncake, sharegpt or castillo; docs/importing.md has recipes for other sets."""
    file: str
    """The file to import, as its publisher ships it."""
    out: str
    """Parquet file to write."""
    overwrite: bool = False
    """Replace files at the outputs."""
    schema: Literal["samples", "trace"] | None = None
    """Write samples/2 or trace/1; unset: what suits the kind."""
    model: str = ""
    """Name of the model, where the file does not have it."""
    dataset: str = ""
    """Name of the set of prompts, where the file does not have it."""
    max_tokens: int | None = None
    """Maximum number of output tokens of all requests, where the file does not have it; an output of that length counts as truncated."""
    unknown: Literal["keep", "stop", "length", "drop"] = "keep"
    """Outputs whose finish reason is unknown: keep them as "unknown", take them as stop (finished) or length (truncated), or drop them."""
    on_error: Literal["skip", "stop"] = "skip"
    """Rows that cannot be used: skip them and report their number and reasons, or stop at the first."""
    columns: str = ""
    """Of kind log: columns of the values, NAME=COLUMN separated by commas, e.g. output_tokens=usage.completion_tokens,prompt=question,finish_reason=end; empty: the columns that have our names."""
    tokens: str = ""
    """What the lengths count, where the kind leaves it open; only recorded."""
    tokenizer: str = ""
    """Of kind sharegpt: tokenizer.json that counts the texts, or a folder with one."""
    arrivals: Arrivals | None = None
    """Draw the arrivals of a trace, in the order of the source, instead of taking its own: as the simulator's workloads do. Unset: the source's own, or none."""
    seed: int = 0
    """Seed of the drawn arrivals."""

    def __post_init__(self) -> None:
        check_ranges(self, max_tokens=(1, 2**31 - 1), seed=(0, INTEGERS))
        if self.columns and self.kind != "log":
            raise InputError("columns", self.columns, "nothing: only kind log has a mapping of columns")
        if self.arrivals is not None and self.arrivals.process == "trace":
            allowed = "a process that is drawn; unset, the source's own stay"
            raise InputError("arrivals.process", "trace", allowed)


main = command(
    "import-lengths",
    ImportLengthsConfig,
    "data_gen.importers.import_lengths:import_lengths",
    positionals=("kind", "file"),
    extra="gen",
)


if __name__ == "__main__":
    raise SystemExit(main())
