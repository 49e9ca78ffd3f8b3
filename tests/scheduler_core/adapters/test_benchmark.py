"""The benchmark's arithmetic: what it says about runs whose numbers are known."""

from __future__ import annotations

import math

import pytest

from benchmarks.vllm_runs.results import CLOCK, interval, measured_capacity, run_metrics, window_throughput


def test_metrics_by_hand() -> None:
    rows = [
        {"arrival_s": 0.0, "first_token_s": 1.0, "finish_s": 4.0, "output_tokens": 4},
        {"arrival_s": 1.0, "first_token_s": 4.0, "finish_s": 5.0, "output_tokens": 2},
    ]
    metrics = run_metrics(rows)
    assert (metrics["per_token_mean"], metrics["ttft_mean"], metrics["ttlt_mean"]) == (1.5, 2.0, 4.0)
    assert metrics["tokens_per_s"] == pytest.approx(6 / 5)
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.3027 / math.sqrt(3), rel=1e-4))
    assert math.isnan(interval([1.0])[1])
    # Two slots, an output every half second after the first two; the last ones alone.
    finish = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 9.0, 20.0]
    assert measured_capacity([{"finish_s": one} for one in finish], 2) == pytest.approx(2.0)
    # Throughput ends with the last arrival.
    rows = [{"arrival_s": 0.0, "arrival_clock_s": 0.0}, {"arrival_s": 2.0, "arrival_clock_s": 4.0}]
    steps = [[0.5, 0.5, 5, 0, 0, 1], [2.0, 1.5, 0, 3, 9, 3], [2.5, 0.5, 0, 2, 9, 2]]
    assert window_throughput({"requests": rows, "steps": steps}) == pytest.approx(2.0)
    assert window_throughput({"requests": rows, "steps": steps}, CLOCK) == pytest.approx(1.0)
