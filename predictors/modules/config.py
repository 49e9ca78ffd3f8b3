"""Configuration of a predictor: encoder, pooling, heads, the conditions of the heads, and calibration."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from predictors.manifest import TRUNCATION_SIDES
from predictors.modules.encoder import POOLINGS
from predictors.modules.heads import Heads
from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_choice, check_ranges


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Input of the length, bucket, regression and rank heads in addition to the prompt.

    Attributes:
        served_models: Names of the LLMs; number i + 1 is served_models[i], number 0 any other one.
        width: Width of the embedding of a served model.
        unknown: Number 0 was trained, by hiding the served model at random; without it a predictor refuses LLMs that
            are not in the list.
        unknown_is_mean: Predict for number 0 the mean over all others, in place of what was trained for it.
    """

    served_models: tuple[str, ...]
    width: int = 32
    temperature: bool = True
    unknown: bool = True
    unknown_is_mean: bool = False

    def __post_init__(self) -> None:
        names = self.served_models
        if not names or len(set(names)) < len(names) or not all(names):
            raise InputError("served_models", names, "one or more different names")
        check_ranges(self, width=(1, INTEGERS))

    def number_of(self, served_model: str | None) -> int:
        """Number of a served model by name; 0 for one that is not in the list, and for None."""
        return 0 if served_model not in self.served_models else self.served_models.index(served_model) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """All that defines a predictor except its weights.

    Attributes:
        encoder: Where the encoder came from, as the user named it (for the record; a checkpoint does not need it).
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
        if not self.pooling or sorted(self.pooling) != sorted(POOLINGS.keys() & set(self.pooling)):
            allowed = f"one or more of {', '.join(POOLINGS)}, each once"
            raise InputError("pooling", list(self.pooling), allowed)
        check_ranges(self, max_length=(3, INTEGERS))
        check_choice("truncation_side", self.truncation_side, TRUNCATION_SIDES)
        if self.conditioning is not None and self.served_models:
            raise InputError("served_models", self.served_models, "unset, because conditioning names them")
        if self.conditioning is not None and not any(head.is_conditioned for _, head in self.heads.items()):
            raise InputError("conditioning", self.conditioning, "None, because no head is conditioned")

    @property
    def known_models(self) -> tuple[str, ...]:
        """LLMs whose lengths it was trained on, whether the heads are conditioned on them or not."""
        return self.served_models if self.conditioning is None else self.conditioning.served_models


@dataclass(frozen=True, slots=True)
class Calibration:
    """Post-hoc calibration: mu' = mu + mu_shift[m] sigma, sigma' = sigma sigma_scale[m], m the served model's number.

    Attributes:
        sigma_scale: Above 0 [num_models + 1]; entry 0 is for an unknown served model (unused where that is the mean over
            the known ones), and for predictors that are not conditioned on it.
        mu_shift: In units of the uncalibrated sigma [num_models + 1].
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    sigma_scale: tuple[float, ...]
    mu_shift: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("sigma_scale", "mu_shift"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        if not self.sigma_scale or not all(0 < value < math.inf for value in self.sigma_scale):
            raise InputError("sigma_scale", self.sigma_scale, "finite numbers > 0")
        if len(self.mu_shift) != len(self.sigma_scale) or not all(map(math.isfinite, self.mu_shift)):
            raise InputError("mu_shift", self.mu_shift, f"{len(self.sigma_scale)} finite numbers")

    @classmethod
    def identity(cls, num_models: int = 0) -> Calibration:
        """No shift, scale 1."""
        return cls((1.0,) * (num_models + 1), (0.0,) * (num_models + 1))

    @property
    def num_models(self) -> int:
        """Served models without the unknown one."""
        return len(self.sigma_scale) - 1

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing."""
        return self == Calibration.identity(self.num_models)


Config = TypeVar("Config")


def read_config(kind: type[Config], content: object, field: str) -> Config:
    """A configuration from the JSON of its `dataclasses.asdict`; InputError for a missing, unknown or wrong field, whose name
    begins with `field`."""
    try:
        # Of JSON text, for which pydantic's strict mode takes an array for a tuple.
        return TypeAdapter(kind).validate_json(json.dumps(content))
    except ValidationError as invalid:
        error = invalid.errors(include_url=False)[0]
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, InputError):
            raise cause from invalid
        name = ".".join([field, *(str(step) for step in error["loc"])])
        raise InputError(name, error["input"], error["msg"]) from invalid
