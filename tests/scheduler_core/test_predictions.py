"""What a predictor may say, and what a request may ask for."""

from __future__ import annotations

from scheduler_core.predictions import (
    BucketPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)
from tests.scheduler_core.helpers import prediction, request, scheduler


def test_the_level_is_the_one_of_least_expected_cost() -> None:
    """Under-triage costs three times as much: the smallest level with P(level <= d) >= 1/4."""
    assert UrgencyPrediction((0.2, 0.04, 0.76)).level == 2
    assert UrgencyPrediction((0.26, 0.0, 0.74)).level == 0


def test_the_bucket_is_the_most_probable_class() -> None:
    assert BucketPrediction((0.2, 0.5, 0.3), (10, 100)).bucket == 1
    assert BucketPrediction((0.5, 0.5), (10,)).bucket == 0


def test_a_bundle_replaces_only_what_it_contains() -> None:
    core = scheduler()
    core.add(request("a"), 0.0)
    core.update("a", Prediction(length=prediction(5), rank=RankPrediction(1.0)), 0.0)
    core.update("a", Prediction(rank=RankPrediction(2.0)), 0.0)
    state = core.state("a")
    assert state.prediction == prediction(5)
    assert state.rank == RankPrediction(2.0)
    assert (state.urgency, state.bucket) == (None, None)
    core.update("a", None, 0.0)
    assert state.prediction == prediction(5)
