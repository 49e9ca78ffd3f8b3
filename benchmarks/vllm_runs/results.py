"""What runs were like: latencies of one run, intervals over repetitions, the simulator's word on the same requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import t as student

from scheduler_core.predictions import LengthPrediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator import LinearStepTime, SimulationConfig, Trace, TraceRequest, run_simulation
from scheduler_core.simulator.fetch import Predictions, oracle_predictions

#: Metric -> unit.
METRICS = {
    "per_token_mean": "s/token", "per_token_p90": "s/token", "ttft_mean": "s", "ttlt_mean": "s", "ttlt_p90": "s",
    "tokens_per_s": "tokens/s",
}  # fmt: skip


def run_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of one run's requests; times are seconds from the run's begin."""
    arrival, first, finish, tokens = (
        np.array([row[name] for row in rows], float)
        for name in ("arrival_s", "first_token_s", "finish_s", "output_tokens")
    )
    ttlt = finish - arrival
    return {
        "per_token_mean": float(np.mean(ttlt / tokens)),
        "per_token_p90": float(np.percentile(ttlt / tokens, 90)),
        "ttft_mean": float(np.mean(first - arrival)),
        "ttlt_mean": float(np.mean(ttlt)),
        "ttlt_p90": float(np.percentile(ttlt, 90)),
        "tokens_per_s": float(tokens.sum() / (finish.max() - arrival.min())),
    }


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """(mean, half width of its confidence interval by Student's t); NaN for the width of a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    scale = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, float(student.ppf(0.5 + level / 2, len(values) - 1)) * scale


def run_steps(run: Mapping[str, Any]) -> np.ndarray:
    """The steps of a run: float64 [steps, 4], seconds, prefill tokens, decodes, context tokens."""
    return np.array(run["steps"], float).reshape(-1, 4)


def fit_step_time(steps: np.ndarray) -> tuple[LinearStepTime, float]:
    """Least squares with coefficients >= 0, and the R2 of the fit."""
    seconds, design = steps[:, 0], np.column_stack([np.ones(len(steps)), steps[:, 1:]])
    found, _ = nnls(design, seconds)
    left = seconds - design @ found
    r2 = 1.0 - float(left @ left) / float(np.sum((seconds - seconds.mean()) ** 2))
    base, prefill, decode, context = (float(value) for value in found)
    model = LinearStepTime(
        base_s=base, per_prefill_token_s=prefill, per_decode_s=decode, per_context_token_s=context
    )
    return model, r2


def simulated(
    policy: str,
    run: Mapping[str, Any],
    predictions: Mapping[str, LengthPrediction],
    step_time: LinearStepTime,
    max_num_seqs: int,
    max_tokens: int,
) -> dict[str, float]:
    """`run_metrics` of the simulator for the arrivals and answers of a real run."""
    requests = sorted(
        (
            TraceRequest(
                request_id=row["request_id"],
                arrival_s=max(row["arrival_s"], 0.0),
                prompt_tokens=row["prompt_tokens"],
                output_tokens=row["output_tokens"],
                max_tokens=max_tokens,
            )
            for row in run["requests"]
        ),
        key=lambda row: row.arrival_s,
    )
    trace = Trace(tuple(requests), "engine")
    known = (
        oracle_predictions(trace)
        if policy == "oracle"
        else Predictions("recorded", {row.request_id: predictions.get(row.request_id) for row in requests})
    )
    order = {"priority": "ssjf", "oracle": "ssjf", "fcfs_again": "fcfs"}.get(policy, policy)
    config = SimulationConfig(
        trace="engine",
        policy=order,
        predictor_delay_s=0.0,
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        step_time=step_time,
    )
    result = run_simulation(config, trace=trace, predictions=known)
    return run_metrics(
        [
            {
                "arrival_s": record.arrival_s,
                "first_token_s": record.first_token_s,
                "finish_s": record.finish_s,
                "output_tokens": record.output_tokens,
            }
            for record in result.records
        ]
    )
