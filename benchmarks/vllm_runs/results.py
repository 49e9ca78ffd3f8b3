"""What runs were like: latencies of one run, intervals over repetitions, the simulator's word on the same requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import t as student

from scheduler_core.plan import PrefillChunk
from scheduler_core.predictions import LengthPrediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator import SimulationConfig, Trace, TraceRequest, run_simulation
from scheduler_core.simulator.calibrate import fit_calibration
from scheduler_core.simulator.fetch import Predictions, oracle_predictions
from scheduler_core.simulator.fitting import Fit, StepSample
from scheduler_core.simulator.step_time import StepTime, StepWork

#: Metric -> unit.
METRICS = {
    "per_token_mean": "s/token", "per_token_p90": "s/token", "ttft_mean": "s", "ttlt_mean": "s", "ttlt_p90": "s",
    "tokens_per_s": "tokens/s",
}  # fmt: skip
#: Order of the simulator for sides that are not named after their policy. The proxy's default policy is tie.
POLICIES = {"priority": "tie", "oracle": "ssjf", "fcfs_again": "fcfs"}

#: An engine's log of its steps (`step_log`): end, seconds, prefill tokens, decodes, context tokens, new tokens.
Steps = Sequence[Sequence[float]]


def run_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of one run's requests; times are seconds from the run's begin, arrivals those that were due.

    Throughput is over the whole run, from the first arrival to the last answer.
    """
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


def window_throughput(run: Mapping[str, Any]) -> float:
    """New tokens per second of the engine until the last arrival.

    The window is the same for all sides of a repetition, and none of them has run out of requests yet: at the end of a
    run, sides differ in how many long answers are left alone.
    """
    last = max(row["arrival_s"] for row in run["requests"])
    return float(sum(step[5] for step in run["steps"] if step[0] <= last) / last)


def measured_capacity(rows: Sequence[Mapping[str, Any]], max_num_seqs: int) -> float:
    """Requests per second that the engine finishes with all places taken, from a run in which all come at once.

    Counted from the first `max_num_seqs` answers, by when places are out of step, to the moment when no request waits.
    """
    finish = np.sort([row["finish_s"] for row in rows])
    first, last = max_num_seqs, len(rows) - max_num_seqs
    return float((last - first) / (finish[last - 1] - finish[first - 1]))


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """(mean, half width of its confidence interval by Student's t); NaN for the width of a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    scale = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, float(student.ppf(0.5 + level / 2, len(values) - 1)) * scale


def mean_step_s(steps: Steps) -> float:
    """Seconds of a decode step with no prompt in it and all places taken, or most of those that ever were: the median."""
    return float(np.median([step[1] for step in _full(steps)]))


def slowness(probe: Steps, fit: Fit) -> float:
    """How many times as long the decode steps of a probe took as the fit says: the median over those with most places."""
    return float(np.median([step[1] / fit.step_time.step_s(_work(step)) for step in _full(probe)]))


def _full(steps: Steps) -> list[Sequence[float]]:
    decoding = [step for step in steps if step[2] == 0]
    most = np.percentile([step[3] for step in decoding], 90)
    return [step for step in decoding if step[3] >= most]


def _work(step: Sequence[float]) -> StepWork:
    prefill, decodes, context = (int(value) for value in step[2:5])
    chunks = (PrefillChunk("", 0, prefill, True),) if prefill else ()
    each, rest = divmod(context, decodes) if decodes else (0, 0)
    return StepWork(chunks, [each + (place < rest) for place in range(decodes)])


def calibrated(run: Mapping[str, Any], slower: float = 1.0) -> Fit:
    """The model of step times that `simulate calibrate` fits, from the engine's own log of a run's steps.

    Args:
        run: The run.
        slower: How many times as long all steps take on the machine that the model is for.

    Raises:
        InputError: There are too few steps.
    """
    return fit_calibration([StepSample(slower * float(step[1]), _work(step)) for step in run["steps"]])


def simulated(
    side: str,
    run: Mapping[str, Any],
    predictions: Mapping[str, LengthPrediction],
    step_time: StepTime,
    max_num_seqs: int,
    max_tokens: int,
) -> dict[str, float]:
    """`run_metrics` of the simulator for the arrivals and answers of a real run."""
    requests = sorted(
        (
            TraceRequest(
                request_id=row["request_id"],
                arrival_s=row["arrival_s"],
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
        if side == "oracle"
        else Predictions("recorded", {row.request_id: predictions.get(row.request_id) for row in requests})
    )
    config = SimulationConfig(
        trace="engine",
        policy=POLICIES.get(side, side),
        predictor_delay_s=0.0,
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        step_time=step_time,  # type: ignore[arg-type]
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
