"""Configuration of a predictor: encoder, pooling, heads, and the conditions of the heads."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from predictors.manifest import TRUNCATION_SIDES
from predictors.modules.encoder import check_poolings
from predictors.modules.heads import Heads
from scheduler_core.errors import InputError


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Input of the length, bucket, regression and rank heads in addition to the prompt.

    Attributes:
        served_models: Names of the LLMs; number i + 1 is served_models[i], number 0 any other one.
        width: Width of the embedding of a served model.
        temperature: Also the sampling temperature.
        unknown: Number 0 was trained, by hiding the served model at random; without it a predictor refuses LLMs that
            are not in the list.
    """

    served_models: tuple[str, ...]
    width: int = 32
    temperature: bool = True
    unknown: bool = True

    def __post_init__(self) -> None:
        names = tuple(self.served_models)
        object.__setattr__(self, "served_models", names)
        if not names or len(set(names)) < len(names) or not all(names):
            raise InputError("served_models", names, "one or more different names")
        if self.width < 1:
            raise InputError("width", self.width, "integers > 0")

    def number_of(self, served_model: str | None) -> int:
        """Number of a served model by name; 0 for one that is not in the list, and for None."""
        if served_model is None or served_model not in self.served_models:
            return 0
        return self.served_models.index(served_model) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """All that defines a predictor except its weights.

    Attributes:
        encoder: Where the encoder came from, as the user named it (for the record; a checkpoint does not need it).
        heads: Heads.
        conditioning: Conditions of the heads; None: the prompt alone.
        max_length: Maximum number of tokens of a prompt, special tokens included; the rest is truncated.
        truncation_side: Which part of a longer prompt is dropped: its left or right end, or its middle.
        pooling: Poolings whose features are concatenated, out of cls, mean, max, last.
        prompt_length: Append ln(number of tokens) / 5 to the features.
        conversations: Encodes whole conversations (`predictors.tokenizer.conversation_text`), not the last user message alone.
        served_models: LLMs whose lengths it was trained on, where the heads are not conditioned on them; for the record.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    encoder: str
    heads: Heads
    conditioning: Conditioning | None = None
    max_length: int = 512
    truncation_side: str = "right"
    pooling: tuple[str, ...] = ("cls", "mean", "max")
    prompt_length: bool = False
    conversations: bool = False
    served_models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("pooling", "served_models"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_poolings(self.pooling)
        if self.max_length < 3:
            raise InputError("max_length", self.max_length, "integers >= 3")
        if self.truncation_side not in TRUNCATION_SIDES:
            raise InputError("truncation_side", self.truncation_side, ", ".join(TRUNCATION_SIDES))
        if self.conditioning is not None and self.served_models:
            raise InputError("served_models", self.served_models, "unset, because conditioning names them")
        if self.conditioning is not None and not any(head.is_conditioned for _, head in self.heads.items()):
            raise InputError("conditioning", self.conditioning, "None, because no head is conditioned")

    @property
    def known_models(self) -> tuple[str, ...]:
        """LLMs whose lengths it was trained on, whether the heads are conditioned on them or not."""
        return self.served_models if self.conditioning is None else self.conditioning.served_models

    def to_json(self) -> dict[str, Any]:
        """As JSON; `from_json` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: object, field: str = "predictor") -> PredictorConfig:
        """From the content of `to_json`.

        Raises:
            InputError: A field is missing, unknown or wrong; `field` is the start of its name.
        """
        try:
            # Of JSON text, for which pydantic's strict mode takes an array for a tuple.
            return _adapter().validate_json(json.dumps(content))
        except ValidationError as invalid:
            error = invalid.errors(include_url=False)[0]
            cause = error.get("ctx", {}).get("error")
            if isinstance(cause, InputError):
                raise cause from invalid
            name = ".".join([field, *(str(step) for step in error["loc"])])
            raise InputError(name, error["input"], error["msg"]) from invalid


@functools.cache
def _adapter() -> TypeAdapter[PredictorConfig]:
    return TypeAdapter(PredictorConfig)
