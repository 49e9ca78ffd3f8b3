"""The command `tailcast predict`: the output length of a prompt as text, or of a file of prompts as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.command import command
from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, INTEGERS, check_ranges


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Predicts the output length of a prompt before an LLM runs: prints its distribution, or writes those of a file."""

    INPUTS = ("data", "predictor")
    OUTPUTS = ("out",)

    prompt: str | None = None
    """The text sent to the LLM. Instead of data."""
    predictor: str = "pretrained"
    """pretrained or tiny (they come with tailcast), an artifact folder, or grpc://HOST:PORT of a running serve-predictor."""
    model: str | None = None
    """Name of the LLM; unset: unknown. A row of data may have its own."""
    max_tokens: int | None = None
    """Limit on output tokens; unset: 32768. A row of data may have its own."""
    temperature: float | None = None
    """Sampling temperature of the LLM; unset: unknown. A row of data may have its own."""
    data: str | None = None
    """File of prompts: JSON lines, CSV, Parquet, or text with a prompt on each line; with a column prompt, or messages as OpenAI has them; a row may also be an
    object with such a request in `body` or `request`. Optional columns: model, max_tokens, temperature, request_id."""
    out: str | None = None
    """Table to write for data, .parquet, .csv or .jsonl: a row for each row that could be used, with its number as an editor counts lines."""
    on_error: Literal["skip", "stop"] = "skip"
    """A row of data that cannot be used: skipped and counted, or the end of the command."""
    overwrite: bool = False
    """Replace an existing file at out."""
    progress: bool = True
    """Show a progress bar for data."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.data is None):
            allowed = "one of them: tailcast predict 'Write a haiku'"
            raise InputError("PROMPT, data", (self.prompt, self.data), allowed)
        if (self.data is None) != (self.out is None):
            raise InputError("data, out", (self.data, self.out), "both or none of them")
        check_ranges(self, max_tokens=(1, INTEGERS), temperature=(0.0, FINITE))


def predict(config: PredictConfig) -> None:
    """Prints the prediction of the prompt, or writes those of the file."""
    import sys

    from tailcast.prediction import open_length_predictor

    with open_length_predictor(config.predictor) as predictor:
        if config.data is not None:
            from tailcast.prompt_file import predict_file

            predict_file(predictor, config)
            return
        assert config.prompt is not None
        length = predictor.predict(
            config.prompt, max_tokens=config.max_tokens, model=config.model, temperature=config.temperature
        )
        text = f"{length}\n"
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


main = command("tailcast predict", PredictConfig, predict, positionals=("prompt",), extra="predict")
