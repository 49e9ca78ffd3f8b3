"""Predictions about a request before its first token, and their effect on its state.

The constructors raise InputError for values outside their range, NaN included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from scheduler_core.urgency import expected_cost_levels


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """Predicted log-t distribution of the output length X = exp(mu + sigma T_nu) in tokens.

    Attributes:
        mu: Location of ln X (ln tokens), in [-50, 50].
        sigma: Scale of ln X, in [1e-9, 50].
        nu: Degrees of freedom, in [0.1, 1e9].
        artifact_id: Id of the artifact that predicted it; empty if there is none.
        artifact_version: Version of that artifact.
    """

    mu: float
    sigma: float
    nu: float
    artifact_id: str = ""
    artifact_version: str = ""

    def __post_init__(self) -> None:
        for name, low, high in (("mu", -50.0, 50.0), ("sigma", 1e-9, 50.0), ("nu", 0.1, 1e9)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(f"predicted {name}", value, f"numbers in [{low:g}, {high:g}]")

    def distribution(self) -> LogT:
        """The distribution itself, with quantiles, expectations and the remaining length."""
        return LogT(self.mu, self.sigma, self.nu)


@dataclass(frozen=True, slots=True)
class UrgencyPrediction:
    """Predicted urgency of a request.

    Attributes:
        probabilities: Probability of each level, the most urgent (0) first; at least two, of sum 1.
    """

    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_distribution("urgency probabilities", self.probabilities)

    @property
    def level(self) -> int:
        """The level of least expected cost, 0 = most urgent (see `urgency.expected_cost_levels`)."""
        return int(expected_cost_levels(self.probabilities))


@dataclass(frozen=True, slots=True)
class BucketPrediction:
    """Predicted class of the output length.

    Attributes:
        probabilities: Probability of each class, the shortest first; at least two, of sum 1.
        edges: Bounds between the classes in tokens, ascending, one fewer than classes; class k holds
            edges[k-1] <= tokens < edges[k].
    """

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
        """The most probable class, 0 = shortest; the shortest of several."""
        return self.probabilities.index(max(self.probabilities))


@dataclass(frozen=True, slots=True)
class RankPrediction:
    """A score whose order is that of the expected output lengths; its size means nothing.

    Attributes:
        score: Smaller is expected to be shorter.
    """

    score: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.score):
            raise InputError("rank score", self.score, "finite numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """All predictions of one artifact for a request; None where it has no head."""

    length: LengthPrediction | None = None
    urgency: UrgencyPrediction | None = None
    bucket: BucketPrediction | None = None
    rank: RankPrediction | None = None


class PredictedState(Protocol):
    """The predictions of a live request; see `request.RequestState`."""

    prediction: LengthPrediction | None
    urgency: UrgencyPrediction | None
    bucket: BucketPrediction | None
    rank: RankPrediction | None
    prediction_failed: bool


def apply_prediction(state: PredictedState, prediction: Prediction | LengthPrediction | None) -> bool:
    """Writes a prediction into a request's state; None means that the predictor failed.

    A bundle replaces those predictions that it contains; a bare length is a bundle of one. A failure keeps what was
    predicted before.

    Returns:
        Whether there is a new prediction, so that the request's key may have changed.
    """
    state.prediction_failed = prediction is None
    if prediction is None:
        return False
    if isinstance(prediction, LengthPrediction):
        prediction = Prediction(length=prediction)
    state.prediction = prediction.length or state.prediction
    state.urgency = prediction.urgency or state.urgency
    state.bucket = prediction.bucket or state.bucket
    state.rank = prediction.rank or state.rank
    return True


def _check_distribution(name: str, probabilities: Sequence[float]) -> None:
    valid = len(probabilities) >= 2 and all(p >= 0 for p in probabilities)
    if not valid or not abs(math.fsum(probabilities) - 1.0) <= 1e-4:
        raise InputError(name, probabilities, "at least two numbers >= 0 of sum 1")
