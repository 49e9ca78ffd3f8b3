"""Command `tailcast predict`: predicts output lengths and urgency, of a prompt as text or of a file as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from scheduler_core.errors import InputError
from scheduler_core.prediction.service_access import ACCESS_FILES, ServiceAccess
from scheduler_core.ranges import FINITE, INTEGERS, check_ranges
from scheduler_core.shell.command import command

if TYPE_CHECKING:
    from tailcast.length_predictor import Prompt


@dataclass(frozen=True, kw_only=True)
class PredictConfig(ServiceAccess):
    """Predict the output length and the urgency of a prompt, or of each prompt of a file, without running an LLM."""

    INPUTS = ("data", "predictor", *ACCESS_FILES)
    OUTPUTS = ("out",)

    prompt: str | None = None
    """Prompt text, or the JSON body of an API request: messages, tools, response_format, ...; set either this or data."""
    predictor: str = "pretrained+urgency"
    """pretrained or tiny (shipped), an artifact folder, or grpc://HOST:PORT (grpcs:// with TLS) of serve-predictor; artifacts with other heads, such as urgency, are joined by +."""
    model: str | None = None
    """Name of the LLM; default: unknown. Rows of data can override it."""
    max_tokens: int | None = None
    """Maximum number of output tokens; default: 32768. Rows of data can override it."""
    temperature: float | None = None
    """Sampling temperature of the LLM; default: unknown. Rows of data can override it."""
    data: str | None = None
    """File of prompts: JSON lines, CSV or Parquet with the columns of an API request (prompt, messages, input, ...),
    also in body or request, and as JSON text; or one prompt per line. Optional columns: model, max_tokens, temperature,
    request_id."""
    out: str | None = None
    """Table to write for data (.parquet, .csv or .jsonl), one row per valid row, with its line number."""
    on_error: Literal["skip", "stop"] = "skip"
    """Invalid rows of data: skip and count them, or stop the command."""
    overwrite: bool = False
    """Replace an existing file at out."""
    progress: bool = True
    """Show a progress bar (only for data)."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.data is None):
            allowed = "exactly one of them, as in: tailcast predict 'Write a haiku'"
            raise InputError("PROMPT, data", (self.prompt, self.data), allowed)
        if (self.data is None) != (self.out is None):
            raise InputError("data, out", (self.data, self.out), "both or neither")
        check_ranges(self, max_tokens=(1, INTEGERS), temperature=(0.0, FINITE))


def _predict(config: PredictConfig) -> int:
    """Prints the prediction of the prompt, or writes the predictions of the file; returns the exit code."""
    import sys

    from tailcast.length_predictor import open_length_predictor

    with open_length_predictor(config.predictor, config) as predictor:
        if config.data is not None and config.out is not None:
            from scheduler_core.prediction.api_request import ApiRequest
            from tailcast.prompt_file import predict_file

            defaults = ApiRequest(
                model=config.model or "", max_tokens=config.max_tokens, temperature=config.temperature
            )
            return predict_file(
                predictor,
                config.data,
                config.out,
                defaults,
                stop=config.on_error == "stop",
                overwrite=config.overwrite,
                progress=config.progress,
            )
        assert config.prompt is not None
        length = predictor.predict(
            _prompt(config.prompt),
            max_tokens=config.max_tokens,
            model=config.model,
            temperature=config.temperature,
        )
        text = f"{length}\n"
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    return 0


def _prompt(text: str) -> Prompt:
    """The text, or the body that it is the JSON of."""
    from scheduler_core.prediction.api_request import read_request
    from scheduler_core.shell.json_text import from_json

    body = from_json(text)
    return body if isinstance(body, dict) and read_request(body).has_prompt else text


main = command("tailcast predict", PredictConfig, _predict, positionals=("prompt",), extra="predict")
