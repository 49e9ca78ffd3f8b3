"""Laws that hold whatever the policy: Little's, and where no policy can keep up (RAD, Theorems 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.predictions import Predictions, trace_predictions
from scheduler_core.simulator.step_time import rad_bounds
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import random_trace, trace_row

STEP_TIME = LinearStepTime(
    base_s=0.01, per_prefill_token_s=1e-4, per_decode_s=1e-4, per_context_token_s=0.0, per_swapped_token_s=0.0
)
T_COL, PROMPT, OUTPUT = 8, 64, 9
RAD = SchedulerConfig(
    max_num_seqs=T_COL,
    max_num_batched_tokens=64,
    batching="rad",
    batching_parameters={"n": 100_000, "t_row": 16, "t_red": 16},
)


def run(trace: Trace, config: SchedulerConfig, policy: str = "fcfs") -> SimulationOutcome:
    predictions = trace_predictions(trace) if trace.requests[0].prediction else Predictions()
    return Simulation(trace, Scheduler(config, make_policy(policy)), STEP_TIME, predictions).run()


@pytest.mark.parametrize("policy", ["fcfs", "tie", "srpt", "uniboost"])
@pytest.mark.parametrize("batching", ["chunked_prefill", "vllm"])
def test_littles_law(policy: str, batching: str) -> None:
    """L = lambda W over a whole run: the integral of the number in the system is the sum of the times in it."""
    outcome = run(
        random_trace(300, rate_rps=20.0), SchedulerConfig(max_num_seqs=16, batching=batching), policy
    )
    assert len(outcome.records) == 300
    in_system = sum(record.finish_s - record.arrival_s for record in outcome.records)
    assert outcome.request_seconds == pytest.approx(in_system, rel=1e-9)


def trace_at(arrivals: Sequence[float]) -> Trace:
    """Equal requests."""
    return Trace(
        tuple(
            trace_row(f"r{number}", float(at), PROMPT, OUTPUT, OUTPUT) for number, at in enumerate(arrivals)
        )
    )


BOUNDS = rad_bounds(trace_at([0.0]), RAD, STEP_TIME)


def at_load(load: float, count: int = 1500) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Arrivals, and latencies under RAD with the n that its theorem 2 asks for up to load 0.9."""
    arrivals = np.cumsum(np.random.default_rng(7).exponential(BOUNDS.expected_s / load, count))
    limits = replace(RAD, batching_parameters={**RAD.batching_parameters, "n": BOUNDS.num_per_cycle})
    records = sorted(run(trace_at(arrivals.tolist()), limits).records, key=lambda record: record.arrival_s)
    return arrivals, np.array([record.finish_s - record.arrival_s for record in records])


def test_rads_bounds_worked_out_by_hand() -> None:
    """Prompt of 64 in chunks of lcm(16, 8, 16) = 16 tokens: 4 steps of 0.01 + 16e-4 = 0.0464 s. The last one samples the
    first token; the other 8 take steps of 0.01 + 8e-4 s that 8 requests share: 8 x 0.0108 / 8 = 0.0108 s of the engine's
    time, or 8 x 0.0108 s of the request's. n > 7 T_max / (0.1 T_R) = 7 x 0.1328 / 0.00572 = 162.5.
    """
    assert BOUNDS.expected_s == pytest.approx(0.0464 + 0.0108)
    assert BOUNDS.longest_s == pytest.approx(0.0464 + 0.0864)
    assert BOUNDS.num_per_cycle == 163
    with pytest.raises(InputError, match="epsilon"):
        rad_bounds(trace_at([0.0]), RAD, STEP_TIME, epsilon=1.0)


def test_rad_keeps_up_below_its_bound_and_nobody_does_above() -> None:
    """Below the bound times do not grow with the number of requests; at 1.1 of it the backlog grows by a tenth of the time.

    With load 1.1 the last of N requests arrives at N T_R/1.1 and cannot be done before N T_R, so it takes at least a tenth
    of its arrival time.
    """
    arrivals, times = at_load(0.9)
    thirds = [part.mean() for part in np.array_split(times, 3)]
    assert thirds[2] < 2.5 * thirds[0]
    assert times.max() < 0.1 * arrivals[-1]
    arrivals, times = at_load(1.1)
    assert times[-T_COL:].max() > 0.08 * arrivals[-1]
    assert np.polyfit(arrivals, times, 1)[0] == pytest.approx(0.1, abs=0.04)
