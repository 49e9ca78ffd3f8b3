"""Configuration of a predictor: encoder, pooling, heads, conditioning and calibration."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from predictors.manifest import check_model_names
from predictors.modules.encoder import POOLINGS
from predictors.modules.heads import Heads
from predictors.tokenizer import TRUNCATION_SIDES
from scheduler_core.errors import InputError
from scheduler_core.prediction.prompt_text import PartTokens, PromptForm
from scheduler_core.ranges import INTEGERS, check_choice, check_ranges


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Inputs of the length, bucket, regression and rank heads in addition to the prompt.

    Attributes:
        served_models: Names of the LLMs. Number i + 1 is served_models[i]; number 0 is any other LLM.
        width: Width of the served model embedding.
        temperature: Whether the temperature is an input.
        unknown: Whether number 0 is trained (by random masking); otherwise other LLMs are rejected.
        unknown_is_mean: Whether number 0 predicts the mean over all served models.
    """

    served_models: tuple[str, ...]
    width: int = 32
    temperature: bool = True
    unknown: bool = True
    unknown_is_mean: bool = False

    def __post_init__(self) -> None:
        names = self.served_models
        if not names or len(set(names)) < len(names) or not all(names):
            raise InputError("served_models", names, "one or more distinct names")
        check_model_names(names)
        check_ranges(self, width=(1, INTEGERS))

    def number_of(self, served_model: str | None) -> int:
        """Number of a served model by name; 0 for None and for names that are not in the list."""
        return 0 if served_model not in self.served_models else self.served_models.index(served_model) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """Definition of a predictor without its weights.

    Attributes:
        encoder: Folder or hub name of the pretrained encoder; only for information in a checkpoint.
        max_length: Maximum number of tokens of a prompt, including special tokens.
        truncation_side: Part of a longer prompt that is dropped: left, right or middle.
        pooling: Poolings whose features are concatenated; any of cls, mean, max, last.
        prompt_length: Whether to append ln(number of tokens) / 5 to the features.
        conversations: Whether to encode the conversation, not only the last user message.
        part_tokens: Tokens of the parts of a conversation; None: the whole `conversation_text`.
        amounts: Whether to encode texts `with_amount`, the amount of output that they ask for.
        served_models: LLMs in the training data, if the heads are not conditioned on them.
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
    part_tokens: PartTokens | None = None
    amounts: bool = False
    served_models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.pooling or sorted(self.pooling) != sorted(POOLINGS.keys() & set(self.pooling)):
            allowed = f"one or more of {', '.join(POOLINGS)}, each once"
            raise InputError("pooling", list(self.pooling), allowed)
        check_ranges(self, max_length=(3, INTEGERS))
        check_model_names(self.served_models)
        check_choice("truncation_side", self.truncation_side, TRUNCATION_SIDES)
        PromptForm(
            conversations=self.conversations, part_tokens=self.part_tokens
        )  # raises if they contradict
        if self.conditioning is not None and self.served_models:
            raise InputError("served_models", self.served_models, "unset, because conditioning has them")
        if self.conditioning is not None and not any(head.is_conditioned for _, head in self.heads.items()):
            raise InputError("conditioning", self.conditioning, "None, because no head is conditioned")

    @property
    def form(self) -> PromptForm:
        """What is read of a request."""
        return PromptForm(conversations=self.conversations, part_tokens=self.part_tokens)

    @property
    def known_models(self) -> tuple[str, ...]:
        """LLMs in the training data, whether or not the heads are conditioned on them."""
        return self.served_models if self.conditioning is None else self.conditioning.served_models


@dataclass(frozen=True, slots=True)
class Calibration:
    """Post-hoc calibration of each served model, by the coefficients of `scheduler_core.prediction.linear_correction`.

    Attributes:
        sigma_scale, mu_shift: Factors of sigma > 0, and shifts of mu in units of the uncalibrated sigma
            [num_models + 1]; 1 and 0 except in earlier checkpoints. Entry 0 is for an unknown served model (unused
            with `unknown_is_mean`) and for predictors without conditioning.
        location, log_scale: Coefficients of the features f, without ln prompt_tokens [num_models + 1, 3]; empty: zeros.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    sigma_scale: tuple[float, ...]
    mu_shift: tuple[float, ...]
    location: tuple[tuple[float, float, float], ...] = ()
    log_scale: tuple[tuple[float, float, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("sigma_scale", "mu_shift"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        if not self.sigma_scale or not all(0 < value < math.inf for value in self.sigma_scale):
            raise InputError("sigma_scale", self.sigma_scale, "finite numbers > 0")
        if len(self.mu_shift) != len(self.sigma_scale) or not all(map(math.isfinite, self.mu_shift)):
            raise InputError("mu_shift", self.mu_shift, f"{len(self.sigma_scale)} finite numbers")
        for name in ("location", "log_scale"):
            rows = getattr(self, name)
            lengths = {0, len(self.sigma_scale)} if not self.location else {len(self.sigma_scale)}
            if len(rows) not in lengths or not all(math.isfinite(value) for row in rows for value in row):
                raise InputError(name, rows, f"{len(self.sigma_scale)} rows of three finite numbers")

    @classmethod
    def identity(cls, num_models: int = 0) -> Calibration:
        """The calibration that changes nothing: shift 0 and scale 1."""
        return cls((1.0,) * (num_models + 1), (0.0,) * (num_models + 1))

    def with_models(self, count: int) -> Calibration:
        """The calibration with further served models, like the unknown one."""
        tables = (getattr(self, field.name) for field in fields(self))
        return Calibration(*((*table, *(table[:1] * count)) for table in tables))

    @property
    def num_models(self) -> int:
        """Number of served models, without the unknown one."""
        return len(self.sigma_scale) - 1

    @property
    def is_identity(self) -> bool:
        """Whether the shifts are 0 and the scales 1."""
        return self == Calibration.identity(self.num_models)


Config = TypeVar("Config")


def read_config(kind: type[Config], content: object, field: str) -> Config:
    """A configuration from the JSON of its `dataclasses.asdict`; InputError for a missing, unknown or wrong
    field. `field` is the prefix of field names in errors."""
    try:
        # From JSON text, because in strict mode pydantic accepts a list as a tuple only there.
        return TypeAdapter(kind).validate_json(json.dumps(content))
    except ValidationError as invalid:
        error = invalid.errors(include_url=False)[0]
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, InputError):
            raise cause from invalid
        name = ".".join([field, *(str(step) for step in error["loc"])])
        raise InputError(name, error["input"], error["msg"]) from invalid
