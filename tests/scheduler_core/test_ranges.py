"""What is outside its range is refused, with the name of the field."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_core.adapters.litellm import QuotaSettings
from scheduler_core.errors import InputError
from scheduler_core.kv_cost import KVCost
from scheduler_core.lengths import LogT, expected_and_cvar
from scheduler_core.policies import make_policy
from scheduler_core.prediction.correction import CorrectionConfig
from scheduler_core.prediction.predictions import (
    BucketPrediction,
    LengthPrediction,
    RankPrediction,
    UrgencyPrediction,
)
from scheduler_core.prediction.predictor import AsyncPredictor
from scheduler_core.prediction.urgency import effective_level
from scheduler_core.request import MAX_TIERS, Request
from scheduler_core.routing import make_router
from scheduler_core.routing.llumnix import AutoScaler, Headroom, MigrationPlanner, exponential_headroom
from scheduler_core.scheduler import SchedulerConfig


def former(name: str, **parameters: Any) -> SchedulerConfig:
    return SchedulerConfig(batching=name, batching_parameters=parameters)


def router(name: str, **parameters: Any) -> object:
    return make_router(name, parameters, np.random.default_rng(0))


def request(**changes: Any) -> Request:
    return Request(**{"request_id": "a", "arrival_s": 0.0, "prompt_tokens": 10, "max_tokens": 1, **changes})


def settings(**values: object) -> QuotaSettings:
    return QuotaSettings.of(values, "test")


@pytest.mark.parametrize(
    ("named", "make", "values"),
    [
        ("policy", make_policy, ["lifo"]),
        ("gama", make_policy, ["tie", {"gama": 0.9}]),
        ("gamma", make_policy, ["tie", {"gamma": 0.0}]),
        ("beta_min", make_policy, ["tie", {"beta_min": 0.6}]),
        ("factor", make_policy, ["mlfq", {"factor": 1.0}]),
        ("gamma_1", make_policy, ["semantic", {"gamma_1": -1.0}]),
        ("gamma_per_s", make_policy, ["uniboost", {"gamma_per_s": 1e6}]),
        ("decode_token_s", make_policy, ["uniboost", {"decode_token_s": 0.0}]),
        ("ratio", make_policy, ["bounded_shortest", {"ratio": 0.9}]),
        ("router", make_router, ["nosuch"]),
        ("parameter of router jsq", make_router, ["jsq", {"gain": 1}]),
        ("rng", make_router, ["random"]),
        ("fraction", Headroom, [(1.5,)]),
        ("headroom fractions", exponential_headroom, [0]),
        ("mu", LogT, [np.nan, 1.0]),
        ("sigma", LogT, [1.0, 0.0]),
        ("nu", LogT, [1.0, 1.0, -1.0]),
        ("broadcast", LogT, [[1.0, 2.0], [1.0, 2.0, 3.0]]),
        ("max_tokens", LogT(1.0, 1.0).expected, [0]),
        ("max_tokens", LogT(1.0, 1.0).expected, [10, 11.0]),
        ("alpha", LogT(1.0, 1.0).cvar, [1.0, 10]),
        ("q", LogT(1.0, 1.0).ppf, [1.5]),
        ("alpha", expected_and_cvar, [1.0, 1.0, 3.5, 10, 0.2]),
        ("predicted mu", LengthPrediction, [math.nan, 1.0, 3.5]),
        ("predicted sigma", LengthPrediction, [1.0, 0.0, 3.5]),
        ("urgency probabilities", UrgencyPrediction, [(0.5, 0.6)]),
        ("bucket probabilities", BucketPrediction, [(1.5, -0.5), (3.0,)]),
        ("bucket edges", BucketPrediction, [(0.2, 0.2, 0.6), (9.0, 3.0)]),
        ("rank score", RankPrediction, [math.inf]),
        ("probabilities, row 0", effective_level, [[0.5, 0.2], 0, 0.5]),
        ("probabilities, row 0", effective_level, [[math.nan, 1.0], 0, 0.5]),
        ("probabilities, row 1", effective_level, [[[0.5, 0.5], [0.7, 0.5]], 0, 0.5]),
        ("probabilities, shape", effective_level, [[1.0], 0, 0.5]),
        ("declared_tier", effective_level, [[0.5, 0.5], 2, 0.5]),
        ("threshold", effective_level, [[0.5, 0.5], 0, 1.5]),
        ("max_promotion", effective_level, [[0.5, 0.5], 0, 0.5, -1]),
    ],
)  # fmt: skip
def test_a_value_by_position(named: str, make: Callable[..., object], values: list[Any]) -> None:
    with pytest.raises(InputError, match=named):
        make(*values)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda **values: former("rad", **values), {"t_col": 99, "t_row": 4096}),
        (lambda **values: former("slai", **values), {"delta_low": -1.0}),
        (lambda **values: former("stage_aware", **values), {"cache_rule": "guess"}),
        (lambda **values: former("orca", **values), {"slots": 3}),
        (lambda **values: router("prefix_affine", **values), {"imbalance": -1}),
        (lambda **values: router("predicted_work", **values), {"decode_token_s": -1.0}),
        (lambda **values: router("infaas", **values), {"ewma": 0.0}),
        (MigrationPlanner, {"threshold": -1.0}), (AutoScaler, {"out_below": 2.0}),
        (KVCost, {"beta": -1.0, "gamma_1": 0.0, "alpha_2": math.nan}),
        (CorrectionConfig, {"memory": 1, "window": 10, "arl": 1.0, "max_models": 0}),
        (CorrectionConfig, {"arl": math.nan}),
        (lambda **values: AsyncPredictor(None, **values), {"max_in_flight": 0, "timeout_s": 0.0, "max_batch": 0}),
        (SchedulerConfig, {"max_num_seqs": 0, "max_num_batched_tokens": 3, "num_kv_blocks": 0}),
        (SchedulerConfig, {"kv_block_tokens": -1, "kv_watermark": 1.0, "batching": "magic"}),
        (request, {"prompt_tokens": 0, "max_tokens": -1, "arrival_s": math.nan, "request_id": "", "tier": MAX_TIERS}),
        (request, {"tier": 1.0, "ttft_slo_s": 0.0, "ttlt_slo_s": math.inf}),
        (settings, {"default_max_tokens": 0, "timeout_s": 0, "max_batch": "x", "wrong": 1}),
        (settings, {"predictor": ""}),
    ],
)  # fmt: skip
def test_a_field(make: Callable[..., object], values: dict[str, Any]) -> None:
    for name, value in values.items():
        with pytest.raises(InputError, match=name):
            make(**{name: value})
