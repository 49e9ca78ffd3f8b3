"""The benchmark's arithmetic: what it says about runs whose numbers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.vllm_runs.results import fit_step_time, interval, run_metrics, simulated
from scheduler_core.predictions import LengthPrediction


def test_metrics_of_two_requests() -> None:
    rows = [
        {"arrival_s": 0.0, "first_token_s": 1.0, "finish_s": 4.0, "output_tokens": 4},
        {"arrival_s": 1.0, "first_token_s": 4.0, "finish_s": 5.0, "output_tokens": 2},
    ]
    found = run_metrics(rows)
    assert (found["per_token_mean"], found["ttft_mean"], found["ttlt_mean"]) == (1.5, 2.0, 4.0)
    assert found["tokens_per_s"] == pytest.approx(6 / 5)


def test_an_interval_is_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.3027 / math.sqrt(3), rel=1e-4))
    assert math.isnan(interval([1.0])[1])


def test_step_times_are_found_again() -> None:
    draws = np.random.default_rng(0)
    work = np.column_stack(
        [draws.integers(0, 200, 400), draws.integers(0, 9, 400), draws.integers(0, 900, 400)]
    )
    seconds = 0.02 + work @ [0.001, 0.004, 0.00001]
    model, r2 = fit_step_time(np.column_stack([seconds, work]))
    found = (model.base_s, model.per_prefill_token_s, model.per_decode_s, model.per_context_token_s)
    assert found == pytest.approx((0.02, 0.001, 0.004, 0.00001))
    assert r2 == pytest.approx(1.0)


def test_the_simulator_prefers_short_answers_where_told_of_them() -> None:
    lengths = [60, 60, *([4] * 20)]
    rows = [
        {"request_id": f"q{i}", "arrival_s": 0.001 * i, "prompt_tokens": 10, "output_tokens": length}
        for i, length in enumerate(lengths)
    ]
    known = {f"q{i}": LengthPrediction(math.log(length), 0.1, 5.0) for i, length in enumerate(lengths)}
    model, _ = fit_step_time(np.array([[0.1, 0, 1, 10], [0.1, 10, 0, 0], [0.2, 0, 4, 80], [0.15, 20, 1, 40]]))
    told = {
        side: simulated(side, {"requests": rows}, known, model, 1, 64)
        for side in ("fcfs", "fcfs_again", "tie", "priority", "oracle")
    }
    assert told["fcfs_again"] == told["fcfs"]
    for side in ("tie", "priority", "oracle"):
        assert told[side]["per_token_mean"] < 0.8 * told["fcfs"]["per_token_mean"]
