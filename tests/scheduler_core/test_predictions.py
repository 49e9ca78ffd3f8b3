"""What a predictor may say, and what a request may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_core.errors import InputError
from scheduler_core.plan import StepResult
from scheduler_core.predictions import (
    BucketPrediction,
    LengthPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)
from scheduler_core.request import MAX_TIERS, Request, RequestState
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
        (lambda: LengthPrediction(1e9, 1.0, 3.5), "predicted mu"),
        (lambda: LengthPrediction(1.0, 0.0, 3.5), "predicted sigma"),
        (lambda: LengthPrediction(1.0, 1.0, 0.0), "predicted nu"),
        (lambda: UrgencyPrediction((0.5, 0.6)), "urgency probabilities"),
        (lambda: UrgencyPrediction((1.0,)), "urgency probabilities"),
        (lambda: UrgencyPrediction((float("nan"), 1.0)), "urgency probabilities"),
        (lambda: BucketPrediction((1.5, -0.5), (3.0,)), "bucket probabilities"),
        (lambda: BucketPrediction((0.5, 0.5), ()), "bucket edges"),
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
    assert state.prediction_failed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tier", MAX_TIERS),
        ("tier", 1.5),
        ("tier", -1),
        ("tier", 1.0),
        ("priority", 0.5),
        ("cached_prefix_tokens", 10),
        ("cached_prefix_tokens", -1),
        ("ttft_slo_s", 0.0),
        ("tbt_slo_s", -1.0),
        ("ttlt_slo_s", float("inf")),
    ],
)
def test_what_a_request_may_ask_for_is_checked(field: str, value: object) -> None:
    values: dict[str, Any] = {"request_id": "a", "arrival_s": 0.0, "prompt_tokens": 10, "max_tokens": 1}
    with pytest.raises(InputError, match=f"{field} of request a"):
        Request(**{**values, field: value})


def test_a_state_keeps_the_times_of_its_tokens() -> None:
    """Prompt 10 in chunks of 6 and 4, three tokens: first at 2, decode entered at 2, last at 4; 10 + 2 tokens of work."""
    core = scheduler(max_num_seqs=1, max_num_batched_tokens=6)
    core.add(request("a", prompt=10, cap=9), 0.0)
    seen: list[tuple[object, ...]] = []
    for now in (0.0, 1.0, 2.0, 3.0):
        plan = core.schedule(now)
        assert plan is not None
        core.complete(StepResult(plan.step), now + 1)
        state: RequestState = core.state("a")
        seen.append(
            (state.attained_tokens, state.decode_entered_s, state.last_token_s, state.last_scheduled_s)
        )
    assert seen == [(6, None, None, 1.0), (10, 2.0, 2.0, 2.0), (11, 2.0, 3.0, 3.0), (12, 2.0, 4.0, 4.0)]
    assert state.first_token_s == 2.0
