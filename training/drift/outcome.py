"""One line of a stream: a prediction and what came of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from data_gen.feedback_record import FORMAT, FeedbackRecord, Mu, Nu, Sigma, Strict, parse_object, validated
from scheduler_core.errors import InputError
from training.feedback.pairs import pair

UNNAMED = "(unnamed)"
Length = Annotated[int, Field(ge=1, lt=2**53)]


class Outcome(Strict):
    """A prediction with its answer.

    Attributes:
        mu, sigma, nu: Predicted parameters of the log-t distribution, log tokens.
        output_tokens: Length of the answer; of a cut one the length it was cut at.
        max_tokens: Cap on the answer, at least output_tokens; None if there is none.
        finished: False: cut. By default whether output_tokens is below max_tokens.
        served_model: Who answered.
        time: When, in whatever unit the stream uses; None if it does not say.
    """

    mu: Mu
    sigma: Sigma
    nu: Nu = 3.5
    output_tokens: Length
    max_tokens: Length | None = None
    finished: bool = Field(default=None, validate_default=True)
    served_model: str = Field(default=UNNAMED, min_length=1)
    time: float | str | None = None

    @field_validator("max_tokens")
    @classmethod
    def _not_exceeded(cls, value: int | None, info: ValidationInfo) -> int | None:
        tokens = info.data.get("output_tokens", 0)
        if value is not None and value < tokens:
            raise ValueError(f"at least output_tokens = {tokens}")
        return value

    @field_validator("finished", mode="before")
    @classmethod
    def _below_cap(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            return value
        cap = info.data.get("max_tokens")
        return cap is None or info.data.get("output_tokens", 0) < cap

    @field_validator("served_model", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return UNNAMED if value is None else value

    @field_validator("time", mode="plain")
    @classmethod
    def _number_or_text(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
            raise ValueError("a number below 2**63 or text")
        return value


def parse_outcome(line: str | bytes) -> Outcome:
    """The outcome of a JSON line: an object with the attributes of `Outcome`, or a record of the feedback log.

    Raises:
        InputError: The line is neither, or a record without a prediction and a true length; names the key.
    """
    content = parse_object(line)
    if content.get("format") == FORMAT:
        outcome = pair(validated(FeedbackRecord, content), "main")
        if outcome is None:
            raise InputError("record", line[:80], "a record with a prediction and a true length")
        content = outcome
    return validated(Outcome, content)
