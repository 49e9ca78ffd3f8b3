"""Latencies of one run, intervals over repetitions, and simulated latencies of the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.vllm.clock import step_work
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.measurements.fit import StepTimeFit, fit_step_time
from scheduler_core.simulator.measurements.steps import step_of_log
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time.base import StepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions, oracle_predictions

#: Percentiles of TTFT and TTLT that are reported with their means.
LEVELS = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
#: Field names of arrival, first token and end in a run's rows.
Times = tuple[str, str, str]
REAL: Times = ("arrival_s", "first_token_s", "finish_s")
#: The same on the engine's clock, see `clock.py`.
CLOCK: Times = ("arrival_clock_s", "first_token_clock_s", "finish_clock_s")
#: Step log of an engine, see `step_log.py`.
Steps = Sequence[Sequence[float]]


def run_metrics(rows: Sequence[Mapping[str, Any]], times: Times = REAL) -> dict[str, float]:
    """Metrics of one run's requests; times are seconds from the start of the run, arrivals are due times.

    TTFT and TTLT in seconds (mean and `LEVELS`), seconds per output token (mean, P90, P99 over requests).
    """
    arrival, first, finish, tokens = (
        np.array([row[name] for row in rows], float) for name in (*times, "output_tokens")
    )
    per_token = (finish - arrival) / tokens
    metrics = {
        "per_token_mean": float(np.mean(per_token)),
        "per_token_p90": float(np.percentile(per_token, 90)),
        "per_token_p99": float(np.percentile(per_token, 99)),
    }
    for name, values in (("ttft", first - arrival), ("ttlt", finish - arrival)):
        metrics[f"{name}_mean"] = float(np.mean(values))
        metrics |= {f"{name}_{level}": float(np.percentile(values, at)) for level, at in LEVELS.items()}
    return metrics


def window_throughput(run: Mapping[str, Any], times: Times = REAL) -> float:
    """Output tokens per second of the engine until the last arrival.

    This window is the same for all sides of a repetition, and the queue is not yet empty. At the end of a
    run, sides differ in the number of long outputs that remain.
    """
    last = max(row["arrival_s"] for row in run["requests"])
    seconds = max(row[times[0]] for row in run["requests"])
    return float(sum(step[5] for step in run["steps"] if step[0] <= last) / seconds)


def measured_capacity(rows: Sequence[Mapping[str, Any]], max_num_seqs: int) -> float:
    """Requests per second that finish while all slots are in use, from a run in which all arrive at once.

    Counts from the first `max_num_seqs` outputs, when slots are out of step, until no request is waiting.
    """
    finish = np.sort([row["finish_s"] for row in rows])
    first, last = max_num_seqs, len(rows) - max_num_seqs
    return float((last - first) / (finish[last - 1] - finish[first - 1]))


def slowness(steps: Steps, fit: StepTimeFit) -> float:
    """Ratio of the total duration of the steps to that of the fit."""
    return sum(step[1] for step in steps) / sum(fit.step_time.step_s(step_work(step)) for step in steps)


def calibrated(steps: Steps) -> StepTimeFit:
    """Step-time model fitted by `simulate calibrate` to the engine's log.

    Raises:
        InputError: There are too few steps.
    """
    return fit_step_time([step_of_log(step) for step in steps])


def simulated(
    side: str,
    run: Mapping[str, Any],
    predictions: Mapping[str, LengthPrediction],
    step_time: StepTime,
    max_num_seqs: int,
    max_tokens: int,
) -> dict[str, float]:
    """`run_metrics` of a simulation with the arrivals (engine clock) and output lengths of a real run."""
    rows = sorted(run["requests"], key=lambda row: row["arrival_clock_s"])
    requests = [
        TraceRequest(
            request_id=row["request_id"],
            arrival_s=row["arrival_clock_s"],
            prompt_tokens=row["prompt_tokens"],
            output_tokens=row["output_tokens"],
            max_tokens=max_tokens,
        )
        for row in rows
    ]
    trace = Trace(tuple(requests), "engine")
    by_id = {name: Prediction(length=length) for name, length in predictions.items()}
    recorded = Predictions("recorded", {row.request_id: by_id.get(row.request_id) for row in requests})
    config = SimulationConfig(
        trace="engine",
        policy="ssjf" if side == "oracle" else side,
        predictor_delay_s=0.0,
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        step_time=step_time,  # type: ignore[arg-type]
    )
    result = run_simulation(
        config, trace=trace, predictions=oracle_predictions(trace) if side == "oracle" else recorded
    )
    return run_metrics(
        [{name: getattr(record, name) for name in (*REAL, "output_tokens")} for record in result.records]
    )
