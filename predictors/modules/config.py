"""What defines a predictor beside its weights: encoder, pooling, heads, and what the heads are conditioned on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from predictors.manifest import TRUNCATION_SIDES, LexicalInput
from predictors.modules.pooling import check_poolings
from scheduler_core.errors import InputError

URGENCY_LEVELS = ("emergency", "interactive", "standard", "batch", "background")
HEAD_NAMES = ("length", "urgency", "bucket", "regression", "rank")
# A learnt number of degrees of freedom stays between these: below 1 not even the median is well determined, above 100
# the distribution is a log-normal.
NU_RANGE = (1.0, 100.0)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tower:
    """A small network on the pooled features, one for each number a head gives. Defaults: TIE's.

    Attributes:
        hidden_sizes: Widths of the hidden layers; empty: one linear layer.
        dropouts: Dropout after each hidden layer.
        activation: gelu or relu.
        layer_norm: A LayerNorm after all hidden layers but the last.
    """

    hidden_sizes: tuple[int, ...] = (256, 256, 128)
    dropouts: tuple[float, ...] = (0.2, 0.2, 0.1)
    activation: str = "gelu"
    layer_norm: bool = True

    def __post_init__(self) -> None:
        _make_tuples(self, "hidden_sizes", "dropouts")
        if any(size < 1 for size in self.hidden_sizes):
            raise InputError("hidden_sizes", self.hidden_sizes, "whole numbers of at least 1")
        if len(self.dropouts) != len(self.hidden_sizes) or not all(0 <= rate < 1 for rate in self.dropouts):
            raise InputError("dropouts", self.dropouts, f"{len(self.hidden_sizes)} numbers from 0 to below 1")
        if self.activation not in ("gelu", "relu"):
            raise InputError("activation", self.activation, "gelu or relu")


@dataclass(frozen=True, slots=True)
class LengthHead:
    """Parameters of the log-t distribution of the length; a tower each for mu, sigma (nu, sigma_within). Source: TIE.

    sigma says how far an answer may lie from mu for all that is known before it begins, the predictor's own error in mu
    included; sigma_within how far answers to the same prompt lie from each other. A predictor that were never wrong in
    mu would give the same number for both.

    Attributes:
        tower: Layers.
        nu: Degrees of freedom; with `learn_nu` what an untrained head gives, inside (1, 100).
        learn_nu: Predict nu, between 1 and 100, instead of keeping it fixed.
        within: Also predict sigma_within.
    """

    tower: Tower = field(default_factory=Tower)
    nu: float = 3.5
    learn_nu: bool = False
    within: bool = False

    def __post_init__(self) -> None:
        low, high = NU_RANGE
        if self.learn_nu and not low < self.nu < high:
            raise InputError("nu", self.nu, f"a number between {low:g} and {high:g} where nu is learnt")
        if not 0 < self.nu < math.inf:
            raise InputError("nu", self.nu, "a finite number above 0")


URGENCY_ODDS = ("proportional", "free")


@dataclass(frozen=True, slots=True)
class UrgencyHead:
    """Probabilities of ordered urgency levels, level 0 the most urgent; sees the prompt alone.

    Odds "proportional" (McCullagh 1980): logit P(level > k) = f(prompt) - theta_k with ascending thresholds theta. Odds
    "free": a score for each level, P(level) their softmax; levels that are different kinds of text do not lie on a line.

    Attributes:
        tower: Layers of f, or of the scores.
        levels: Names, the most urgent first.
        odds: proportional or free.
    """

    tower: Tower = field(default_factory=Tower)
    levels: tuple[str, ...] = URGENCY_LEVELS
    odds: str = "proportional"

    def __post_init__(self) -> None:
        _make_tuples(self, "levels")
        if self.odds not in URGENCY_ODDS:
            raise InputError("urgency.odds", self.odds, ", ".join(URGENCY_ODDS))
        if len(self.levels) < 2 or len(set(self.levels)) < len(self.levels) or not all(self.levels):
            raise InputError("levels", self.levels, "two or more different names, the most urgent first")


@dataclass(frozen=True, slots=True)
class BucketHead:
    """Probabilities of length buckets. Source: S3 (equal buckets over the maximum length).

    Attributes:
        tower: Layers.
        edges: Bounds in tokens, ascending; bucket k holds edges[k-1] <= tokens < edges[k], so K = len(edges) + 1.
    """

    tower: Tower = field(default_factory=Tower)
    edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _make_tuples(self, "edges")
        pairs = zip(self.edges, self.edges[1:], strict=False)
        if not self.edges or not all(0 < edge < math.inf for edge in self.edges):
            raise InputError("edges", self.edges, "one or more finite numbers of tokens above 0")
        if not all(low < high for low, high in pairs):
            raise InputError("edges", self.edges, "ascending numbers of tokens")

    @property
    def num_buckets(self) -> int:
        """K."""
        return len(self.edges) + 1


@dataclass(frozen=True, slots=True)
class RegressionHead:
    """One number of tokens: z-score of ln(1 + tokens). Source: SSJF."""

    tower: Tower = field(default_factory=Tower)


@dataclass(frozen=True, slots=True)
class RankHead:
    """A score that orders requests, larger = longer; its scale has no meaning. Source: LTR (learning to rank)."""

    tower: Tower = field(default_factory=Tower)


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads on one encoder; at least one."""

    length: LengthHead | None = None
    urgency: UrgencyHead | None = None
    bucket: BucketHead | None = None
    regression: RegressionHead | None = None
    rank: RankHead | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise InputError("heads", None, f"one or more of {', '.join(HEAD_NAMES)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the heads that are there, in a fixed order."""
        return tuple(name for name in HEAD_NAMES if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What the length, bucket, regression and rank heads see beside the prompt.

    Attributes:
        served_models: Names of the LLMs; number i + 1 is served_models[i], number 0 any other one.
        width: Width of the embedding of a served model.
        temperature: Also see the sampling temperature.
        unknown: Number 0 was trained, by hiding the served model at random; without it a predictor refuses LLMs that
            are not in the list.
    """

    served_models: tuple[str, ...]
    width: int = 32
    temperature: bool = True
    unknown: bool = True

    def __post_init__(self) -> None:
        _make_tuples(self, "served_models")
        names = self.served_models
        if not names or len(set(names)) < len(names) or not all(names):
            raise InputError("served_models", names, "one or more different names")
        if self.width < 1:
            raise InputError("width", self.width, "a whole number of at least 1")

    def number_of(self, served_model: str | None) -> int:
        """Number of a served model by name; 0 for one that is not in the list, and for None."""
        if served_model is None or served_model not in self.served_models:
            return 0
        return self.served_models.index(served_model) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """What defines a predictor beside its weights.

    Attributes:
        encoder: Where the encoder came from, as the user named it (for the record; a checkpoint does not need it).
        heads: What is predicted.
        conditioning: What the heads see beside the prompt; None: nothing.
        max_length: Most tokens of a prompt that are read, special tokens included.
        truncation_side: What of a longer prompt is dropped: its left or right end, or its middle.
        pooling: Poolings whose features are concatenated, out of cls, mean, max, last.
        prompt_length: Append ln(number of tokens read) / 5 to the features.
        conversations: It reads whole conversations (`predictors.conversation`), not the last user message alone.
        lexical: Features of the prompt's text that all heads but urgency see too; None: none.
        served_models: LLMs whose lengths it was trained on, where the heads do not see which one; for the record.
    """

    encoder: str
    heads: Heads
    conditioning: Conditioning | None = None
    max_length: int = 512
    truncation_side: str = "right"
    pooling: tuple[str, ...] = ("cls", "mean", "max")
    prompt_length: bool = False
    lexical: LexicalInput | None = None
    conversations: bool = False
    served_models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _make_tuples(self, "pooling", "served_models")
        check_poolings(self.pooling)
        if self.max_length < 3:
            raise InputError("max_length", self.max_length, "a whole number of at least 3")
        if self.truncation_side not in TRUNCATION_SIDES:
            raise InputError("truncation_side", self.truncation_side, ", ".join(TRUNCATION_SIDES))
        if self.lexical is not None and self.heads.names == ("urgency",):
            raise InputError(
                "lexical", self.lexical.feature_version, "None, because urgency does not see them"
            )
        if self.conditioning is not None and self.served_models:
            raise InputError("served_models", self.served_models, "unset, because conditioning names them")
        if self.conditioning is not None and self.heads.names == ("urgency",):
            raise InputError("conditioning", self.conditioning, "None, because urgency sees the prompt alone")

    @property
    def known_models(self) -> tuple[str, ...]:
        """LLMs whose lengths it was trained on, whether the heads see which one or not."""
        return self.served_models if self.conditioning is None else self.conditioning.served_models

    def to_json(self) -> dict[str, Any]:
        """As JSON; `from_json` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: object, where: str = "predictor") -> PredictorConfig:
        """From the content of `to_json`.

        Raises:
            InputError: A field is missing, unknown or wrong; `where` is the start of its name.
        """
        fields = dict(_object(content, where))
        fields["heads"] = _heads(fields.get("heads"), f"{where}.heads")
        if fields.get("conditioning") is not None:
            fields["conditioning"] = _build(Conditioning, fields["conditioning"], f"{where}.conditioning")
        if fields.get("lexical") is not None:
            fields["lexical"] = _build(LexicalInput, fields["lexical"], f"{where}.lexical")
            _make_tuples(fields["lexical"], "feature_names")
        return _build(cls, fields, where)


HEAD_TYPES: dict[str, type[Any]] = {
    "length": LengthHead,
    "urgency": UrgencyHead,
    "bucket": BucketHead,
    "regression": RegressionHead,
    "rank": RankHead,
}


def _heads(content: object, where: str) -> Heads:
    found = _object(content, where)
    heads: dict[str, Any] = {}
    for name, value in found.items():
        if name in HEAD_TYPES and value is not None:
            parts = dict(_object(value, f"{where}.{name}"))
            parts["tower"] = _build(Tower, parts.get("tower"), f"{where}.{name}.tower")
            heads[name] = _build(HEAD_TYPES[name], parts, f"{where}.{name}")
        else:
            heads[name] = value
    return _build(Heads, heads, where)


def _build(kind: type[T], content: object, where: str) -> T:
    fields = _object(content, where)
    known = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not set(fields) <= known:
        raise InputError(where, sorted(fields), f"nothing but {', '.join(sorted(known))}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise InputError(where, content, f"fields of the right kind ({error})") from error


def _object(content: object, where: str) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise InputError(where, content, "a JSON object")
    return content


def _make_tuples(instance: object, *names: str) -> None:
    for name in names:
        object.__setattr__(instance, name, tuple(getattr(instance, name)))
