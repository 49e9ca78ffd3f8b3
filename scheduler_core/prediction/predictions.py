"""Predictions for a request, made before its first output token.

The constructors raise InputError for values outside their range, including NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogQuantiles, LogT, expected_and_cvar
from scheduler_core.lengths import quantiles as by_quantiles
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.lengths.student_t import student_t_cdf
from scheduler_core.lengths.table import LengthTable
from scheduler_core.prediction.urgency import abstains, effective_level

#: Unit vector [D] of a prompt; prompts with similar outputs have a large product.
Embedding = NDArray[np.float32]

#: max_tokens for expectations of requests without a limit: the mean of X itself is infinite.
DEFAULT_MAX_TOKENS = 32_768
#: Scale in ln tokens of a length that is known.
EXACT_SIGMA = 1e-3
_MEDIAN = LEVELS.index(0.5)


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """Predicted distribution of the output length X in tokens: log-t, X = exp(mu + sigma T_nu), or given by quantiles.

    Attributes:
        mu: Location of ln X (ln tokens), in [-50, 50].
        sigma: Scale of ln X, in [1e-9, 50].
        nu: Degrees of freedom, in [0.1, 1e9].
        artifact_id, artifact_version: The artifact that made the prediction; empty if there is none.
        quantiles: Quantiles of ln X (ln tokens) at `lengths.quantiles.LEVELS`, in [-50, 50], non-decreasing;
            mu, sigma and nu are then those of the closest log-t. Empty: X is log-t.
    """

    mu: float
    sigma: float
    nu: float
    artifact_id: str = ""
    artifact_version: str = ""
    quantiles: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (("mu", -50.0, 50.0), ("sigma", 1e-9, 50.0), ("nu", 0.1, 1e9)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(f"predicted {name}", value, f"numbers in [{low:g}, {high:g}]")
        if self.quantiles:
            bounds = (-50.0, *self.quantiles, 50.0)
            if len(self.quantiles) != len(LEVELS) or not all(low <= high for low, high in pairwise(bounds)):
                allowed = f"{len(LEVELS)} non-decreasing numbers in [-50, 50]"
                raise InputError("predicted quantiles", self.quantiles, allowed)

    def distribution(self) -> LogT | LogQuantiles:
        """The distribution as an object with quantiles, expectations and remaining length."""
        return LogQuantiles(self.quantiles) if self.quantiles else LogT(self.mu, self.sigma, self.nu)

    def cdf(self, tokens: float) -> float:
        """P(X <= tokens), tokens > 0."""
        if self.quantiles:
            return by_quantiles.cdf(self.quantiles, tokens)
        return student_t_cdf((math.log(tokens) - self.mu) / self.sigma, self.nu)

    def expected_and_cvar(self, max_tokens: float, alpha: float = 0.9) -> tuple[float, float]:
        """(E[min(X, M)], CVaR_alpha(min(X, M))) in tokens, M = max_tokens, alpha in [0.5, 1); see `lengths`."""
        if self.quantiles:
            return by_quantiles.expected_and_cvar(self.quantiles, max_tokens, alpha)
        return expected_and_cvar(self.mu, self.sigma, self.nu, max_tokens, alpha)

    def table(self, max_tokens: int) -> LengthTable:
        """The distribution as a table, for the expected remaining length during decoding."""
        return LengthTable(self.mu, self.sigma, self.nu, max_tokens, self.quantiles)

    def moved(self, mu: float, sigma: float) -> "LengthPrediction":
        """The prediction with another mu and sigma; quantiles keep their distances from mu in units of sigma."""
        if not self.quantiles:
            return replace(self, mu=mu, sigma=sigma)
        old_mu, new_mu, factor = np.array((self.mu, mu, sigma / self.sigma))
        quantiles = by_quantiles.moved(np.array(self.quantiles), old_mu, new_mu, factor).clip(-50.0, 50.0)
        return replace(self, mu=mu, sigma=sigma, quantiles=tuple(quantiles.tolist()))

    def at_least(self, min_tokens: int) -> "LengthPrediction":
        """The distribution of max(X, min_tokens), by quantiles; the prediction itself if nearly all of X is longer."""
        if min_tokens < 2 or self.cdf(min_tokens) < LEVELS[0]:
            return self
        floor = math.log(min_tokens)
        values = self.quantiles or self.distribution().logppf(LEVELS).tolist()
        quantiles = tuple(min(max(value, floor), 50.0) for value in values)
        scale = (quantiles[-1] - quantiles[_MEDIAN]) / max(values[-1] - values[_MEDIAN], 1e-9)
        sigma = min(max(self.sigma * scale, EXACT_SIGMA), 50.0)
        return replace(self, mu=quantiles[_MEDIAN], sigma=sigma, quantiles=quantiles)


@dataclass(frozen=True, slots=True)
class UrgencyPrediction:
    """Predicted urgency of a request: probabilities of at least two levels, most urgent (0) first; their sum is 1.

    `abstain_threshold` in [0, 1] or None belongs to the artifact; see `urgency.abstains`.
    """

    probabilities: tuple[float, ...]
    abstain_threshold: float | None = None

    def __post_init__(self) -> None:
        _check_distribution("urgency probabilities", self.probabilities)
        if self.abstain_threshold is not None and not 0 <= self.abstain_threshold <= 1:
            raise InputError("abstain_threshold", self.abstain_threshold, "numbers in [0, 1], or None")

    @property
    def level(self) -> int:
        """The most probable level, 0 = most urgent; the more urgent one for ties. The service's response calls it so too."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def abstains(self) -> bool:
        """Whether the declared tier is better than the prediction (see `urgency.abstains`)."""
        return bool(abstains(self.probabilities, self.abstain_threshold))

    def effective_level(self, declared_tier: int, max_promotion: float = 1) -> int:
        """The level to schedule a request at, 0 = most urgent; see `urgency.effective_level`.

        It is the declared tier if the predictor abstains. With `max_promotion` of at least the number of levels it is
        otherwise `level`; with less, the declared tier if that is not one of the levels, or more urgent.
        """
        return _effective_level(self, declared_tier, max_promotion)


@dataclass(frozen=True, slots=True)
class BucketPrediction:
    """Predicted class of the output length. `probabilities` are those of at least two classes, shortest
    first, with sum 1. `edges` are the ascending bounds between the classes in tokens, one fewer than classes:
    class k is for edges[k-1] <= tokens < edges[k]."""

    probabilities: tuple[float, ...]
    edges: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_distribution("bucket probabilities", self.probabilities)
        ascends = all(low < high for low, high in zip((0.0, *self.edges), self.edges, strict=False))
        if len(self.edges) != len(self.probabilities) - 1 or not ascends:
            allowed = f"{len(self.probabilities) - 1} ascending numbers of tokens > 0"
            raise InputError("bucket edges", self.edges, allowed)

    @property
    def bucket(self) -> int:
        """The most probable class, 0 = shortest; ties go to the shortest."""
        return self.probabilities.index(max(self.probabilities))


@dataclass(frozen=True, slots=True)
class PointPrediction:
    """Predicted output length as one number of tokens > 0, without a distribution."""

    tokens: float

    def __post_init__(self) -> None:
        if not 0 < self.tokens < math.inf:
            raise InputError("predicted tokens", self.tokens, "finite numbers > 0")


@dataclass(frozen=True, slots=True)
class RankPrediction:
    """Score that orders requests by expected output length (smaller = shorter), without absolute meaning."""

    score: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.score):
            raise InputError("rank score", self.score, "finite numbers")


class MissingPart(NamedTuple):
    """A part of a joined predictor whose heads a prediction lacks, and why."""

    part: str
    reason: str

    def __str__(self) -> str:
        return f"{self.part}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """All predictions of one artifact for a request; None for heads that it does not have.

    `prompt_tokens` is the number of tokens of the text that the predictor has read, None if it truncated it or did not
    count, and `prompt_chars` that of its characters, None if unknown.
    `embedding` is for the memory of past requests (see `memory`), None if the predictor has none. `missing` are the parts of
    a joined predictor that failed or were late (see `joint`).
    """

    length: LengthPrediction | None = None
    urgency: UrgencyPrediction | None = None
    bucket: BucketPrediction | None = None
    rank: RankPrediction | None = None
    point: PointPrediction | None = None
    prompt_tokens: int | None = None
    prompt_chars: int | None = None
    embedding: Embedding | None = field(default=None, compare=False, repr=False)
    missing: tuple[MissingPart, ...] = ()

    def __post_init__(self) -> None:
        vector = self.embedding
        if vector is not None and not (vector.ndim == 1 and abs(float(vector @ vector) - 1.0) < 0.02):
            got = f"an array of shape {vector.shape}, and norm {np.linalg.norm(vector):.3g}"
            raise InputError("embedding", got, "a unit vector [D]")


def requested_prediction(
    prediction: Prediction | None,
    *,
    max_tokens: int,
    min_tokens: int = 0,
    ignores_eos: bool = False,
    num_outputs: int = 1,
) -> Prediction | None:
    """The prediction for all outputs of a request, from the one for its prompt; None if it remains unknown.

    An output that ignores EOS has exactly `max_tokens` tokens, with or without a prediction. `min_tokens` is a lower bound.
    The length of several outputs is their total, in one distribution of the same scale. Bucket and rank stay those of one
    output.
    """
    heads = Prediction() if prediction is None else prediction
    length, point = heads.length, heads.point
    if ignores_eos:
        exact = LengthPrediction(math.log(max_tokens), EXACT_SIGMA, 1e9)
        if length is not None:
            exact = replace(exact, artifact_id=length.artifact_id, artifact_version=length.artifact_version)
        length, point = exact, None
    if length is not None:
        length = length.at_least(min(min_tokens, max_tokens))
        if num_outputs > 1:
            length = length.moved(min(length.mu + math.log(num_outputs), 50.0), length.sigma)
    if point is not None and (num_outputs > 1 or min_tokens > point.tokens):
        point = PointPrediction(num_outputs * max(point.tokens, min(min_tokens, max_tokens)))
    if length is heads.length and point is heads.point:
        return prediction
    return replace(heads, length=length, point=point)


#: The heads of a `Prediction`, by name.
HEADS: dict[str, Any] = {
    "length": LengthPrediction,
    "urgency": UrgencyPrediction,
    "bucket": BucketPrediction,
    "rank": RankPrediction,
    "point": PointPrediction,
}


@lru_cache(maxsize=65536)
def _effective_level(urgency: UrgencyPrediction, declared_tier: int, max_promotion: float) -> int:
    if urgency.abstains:
        return declared_tier
    if max_promotion >= len(urgency.probabilities):
        return urgency.level
    if declared_tier >= len(urgency.probabilities):
        return declared_tier
    return int(effective_level(urgency.probabilities, declared_tier, 0.0, int(max_promotion)))


def _check_distribution(name: str, probabilities: Sequence[float]) -> None:
    valid = len(probabilities) >= 2 and all(p >= 0 for p in probabilities)
    if not valid or not abs(math.fsum(probabilities) - 1.0) <= 1e-4:
        raise InputError(name, probabilities, "at least two numbers >= 0 of sum 1")
