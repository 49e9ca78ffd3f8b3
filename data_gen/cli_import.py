"""The command `import-lengths`: lengths that others measured, as samples or as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler_core.command import run_command
from scheduler_core.errors import InputError, MissingExtraError


@dataclass(frozen=True, kw_only=True)
class ImportLengthsConfig:
    """Import a public set of answer lengths, a serving trace or a production log."""

    INPUTS = ("file",)
    OUTPUTS = ("out", "{out}.run.json")

    kind: str
    """What it is: castillo, tot-gpt4, oasst, alpaca-eval, zeroeval, alpaca-52k, alpaca-52k-vicuna, azure, burstgpt, mooncake, vidur, apex, lengths, feedback, openai-log or log."""
    file: str
    """The file to import, as its publisher ships it."""
    out: str
    """Parquet file to write."""
    schema: Literal["samples", "trace"] | None = None
    """Write samples/2 or trace/1; unset: what suits the kind."""
    model: str = ""
    """Name of the model, where the file does not say."""
    dataset: str = ""
    """Name of the set of prompts, where the file does not say."""
    max_tokens: int | None = None
    """Cap on all answers, where the file does not say; an answer that long counts as cut."""
    unknown: Literal["keep", "stop", "length", "drop"] = "keep"
    """Answers of which nothing says whether they were cut: keep them as "unknown", take them as stop (finished) or length (cut), or drop them."""
    columns: str = ""
    """Of kind log: where the values are, NAME=COLUMN separated by commas, e.g. output_tokens=usage.completion_tokens,prompt=question,finish_reason=end."""
    tokens: str = ""
    """What the lengths count, where the kind leaves it open; only recorded."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError("max_tokens", self.max_tokens, "a whole number of at least 1, or unset")


def import_file(config: ImportLengthsConfig) -> None:
    """Runs the command; see `data_gen.importers.import_lengths` for what it guarantees."""
    try:
        import pyarrow  # noqa: F401
        import pydantic  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "pyarrow", "gen") from error
    from data_gen.importers import ImportOptions, import_lengths

    options = ImportOptions(
        schema=config.schema,
        model=config.model,
        dataset=config.dataset,
        max_tokens=config.max_tokens,
        unknown=config.unknown,
        columns=config.columns,
        tokens=config.tokens,
    )
    import_lengths(config.kind, config.file, config.out, options)


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `import-lengths`."""
    return run_command(
        "import-lengths",
        ImportLengthsConfig,
        import_file,
        positionals=("kind", "file"),
        extra="gen",
        args=args,
    )


if __name__ == "__main__":
    raise SystemExit(main())
