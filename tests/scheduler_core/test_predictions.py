"""What a predictor may say, and what a request may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_core.errors import InputError
from scheduler_core.predictions import (
    BucketPrediction,
    LengthPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)
from scheduler_core.request import MAX_TIERS, Request
from tests.scheduler_core.helpers import prediction, request, scheduler


def test_the_level_is_the_one_of_least_expected_cost() -> None:
    """Under-triage costs three times as much: the smallest level with P(level <= d) >= 1/4."""
    assert UrgencyPrediction((0.2, 0.04, 0.76)).level == 2
    assert UrgencyPrediction((0.26, 0.0, 0.74)).level == 0


def test_the_bucket_is_the_most_probable_class() -> None:
    assert BucketPrediction((0.2, 0.5, 0.3), (10, 100)).bucket == 1
    assert BucketPrediction((0.5, 0.5), (10,)).bucket == 0


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: LengthPrediction(float("nan"), 1.0, 3.5), "predicted mu"),
        (lambda: LengthPrediction(1.0, 0.0, 3.5), "predicted sigma"),
        (lambda: UrgencyPrediction((0.5, 0.6)), "urgency probabilities"),
        (lambda: BucketPrediction((1.5, -0.5), (3.0,)), "bucket probabilities"),
        (lambda: BucketPrediction((0.2, 0.2, 0.6), (9.0, 3.0)), "bucket edges"),
        (lambda: RankPrediction(float("inf")), "rank score"),
    ],
)
def test_a_prediction_outside_its_range_is_refused(make: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        make()


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_tokens", 0),
        ("max_tokens", -1),
        ("arrival_s", float("nan")),
        ("request_id", ""),
        ("tier", MAX_TIERS),
        ("tier", 1.0),
        ("cached_prefix_tokens", 10),
        ("ttft_slo_s", 0.0),
        ("ttlt_slo_s", float("inf")),
    ],
)
def test_what_a_request_may_ask_for_is_checked(field: str, value: object) -> None:
    values: dict[str, Any] = {"request_id": "a", "arrival_s": 0.0, "prompt_tokens": 10, "max_tokens": 1}
    with pytest.raises(InputError, match=field):
        Request(**{**values, field: value})
