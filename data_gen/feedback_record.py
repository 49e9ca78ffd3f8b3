"""Schema and validation of the records of the feedback log, `tailcast-feedback/1`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from scheduler_core.errors import InputError
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.shell.json_text import parse_json

FORMAT = "tailcast-feedback/1"
MAX_TOKENS = 2**31 - 1

Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Seconds = Annotated[FiniteFloat, Field(ge=0, le=1e11)]
NonNegative = Annotated[FiniteFloat, Field(ge=0)]
# The ranges of `scheduler_core.prediction.predictions.LengthPrediction`.
Mu = Annotated[float, Field(ge=-50, le=50)]
Sigma = Annotated[float, Field(ge=1e-9, le=50)]
Nu = Annotated[float, Field(ge=0.1, le=1e9)]


def _one_per_level(values: tuple[float, ...]) -> tuple[float, ...]:
    if values and (len(values) != len(LEVELS) or list(values) != sorted(values)):
        raise ValueError(f"{len(LEVELS)} non-decreasing numbers")
    return values


# Empty for a log-t.
Quantiles = Annotated[tuple[Mu, ...], Field(strict=False), AfterValidator(_one_per_level)]

M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """Base class of validated JSON objects; values are not converted to other types."""

    model_config = ConfigDict(strict=True, frozen=True)


class PredictedLength(Strict):
    """A predicted distribution of the output length and the artifact that predicted it; see `LengthPrediction`."""

    mu: Mu
    sigma: Sigma
    nu: Nu
    quantiles: Quantiles = ()
    artifact_id: str = ""
    artifact_version: str = ""


class LoggedMessage(Strict):
    """A message of the prompt; the content of any message may be empty."""

    role: str
    content: str


class FeedbackRecord(Strict):
    """A finished output. docs/proxy.md describes the log; unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    format: Literal["tailcast-feedback/1"]
    time: Seconds
    output_tokens: Tokens
    counted_by: Literal["usage", "tokenizer", "deltas"]
    finish_reason: str
    finished: bool | None = None
    forced_length: bool = False
    num_events: Tokens | None = None
    request_id: str | None = None
    endpoint: str | None = None
    tenant: str | None = None
    tier: Tokens | None = None
    served_model: str | None = None
    max_tokens: MaxTokens | None = None
    temperature: NonNegative | None = None
    top_p: NonNegative | None = None
    prompt_tokens: Tokens | None = None
    waited_s: Seconds | None = None
    ttft_s: Seconds | None = None
    total_s: Seconds | None = None
    prompt: str | None = None
    prompt_sha256: str | None = None
    messages: list[LoggedMessage] | None = None
    mu: Mu | None = None
    sigma: Sigma | None = None
    nu: Nu | None = None
    quantiles: Quantiles = ()
    artifact_id: str = ""
    artifact_version: str = ""
    shadow: PredictedLength | None = None

    @model_validator(mode="after")
    def _whole_prediction(self) -> FeedbackRecord:
        if len({value is None for value in (self.mu, self.sigma, self.nu)}) > 1:
            raise ValueError("mu, sigma and nu must all be set, or none of them")
        return self

    @property
    def main(self) -> PredictedLength | None:
        """The prediction of the main predictor; None if the record has none."""
        values = self.model_dump(include=set(PredictedLength.model_fields))
        return None if self.mu is None else PredictedLength(**values)

    @property
    def max_output_tokens(self) -> int | None:
        """max_tokens, but at least output_tokens: servers may count one token more than their limit."""
        return None if self.max_tokens is None else max(self.max_tokens, self.output_tokens)


def bounded_lines(stream: IO[bytes], limit: int) -> Iterator[bytes]:
    """Lines of a stream; a line of more than `limit` bytes is truncated to `limit` + 1."""
    while line := stream.readline(limit + 1):
        yield line
        while len(line) > limit and not line.endswith(b"\n"):
            line = stream.readline(limit + 1)


def parse_object(line: str | bytes) -> dict[str, Any]:
    """Parses a line as a JSON object; InputError for the field "line" if it is not one."""
    try:
        content = parse_json(line)
    except ValueError as error:
        raise InputError("line", line[:80], "a JSON object in UTF-8") from error
    if not isinstance(content, dict):
        raise InputError("line", line[:80], "a JSON object in UTF-8")
    return content


def validated(model: type[M], content: dict[str, Any]) -> M:
    """Validates an object as an instance of `model`; InputError names the first key with an invalid value."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_context=False)
        keys = ".".join(str(key) for key in first["loc"] if isinstance(key, str))
        value = first["input"] if first["loc"] and first["type"] != "missing" else None
        allowed = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise InputError(keys or "record", value, allowed[:1].lower() + allowed[1:]) from error
