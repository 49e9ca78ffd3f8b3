"""Laws that hold whatever the policy: Little's, and where no policy can keep up (RAD, Theorems 1 and 2)."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.predictions import Predictions
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from tests.scheduler_core.helpers import random_trace

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
    known = Predictions(
        {row.request_id: row.prediction for row in trace.requests if row.prediction is not None}
    )
    return Simulation(trace, Scheduler(config, make_policy(policy)), STEP_TIME, known).run()


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


def least_time_s() -> float:
    """T_R: engine time that a request needs at least, when every batch of decodes is full.

    Prompt of 64 in chunks of lcm(16, 8, 16) = 16 tokens: 4 steps of 0.01 + 16e-4 = 0.0464 s. The last one samples the
    first token; the other 8 take steps of 0.01 + 8e-4 s that 8 requests share: 8 x 0.0108 / 8 = 0.0108 s.
    """
    prefill = (PROMPT // 16) * (STEP_TIME.base_s + 16 * STEP_TIME.per_prefill_token_s)
    decode = (OUTPUT - 1) * (STEP_TIME.base_s + T_COL * STEP_TIME.per_decode_s) / T_COL
    return prefill + decode


def at_load(load: float, count: int = 1500) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(least_time_s() / load, count))
    rows = [
        TraceRequest(
            request_id=f"r{number}",
            arrival_s=float(arrival),
            prompt_tokens=PROMPT,
            output_tokens=OUTPUT,
            max_tokens=OUTPUT,
        )
        for number, arrival in enumerate(arrivals)
    ]
    records = sorted(run(Trace(tuple(rows)), RAD).records, key=lambda record: record.arrival_s)
    return arrivals, np.array([record.finish_s - record.arrival_s for record in records])


def test_times_of_the_bound_worked_out_by_hand() -> None:
    assert least_time_s() == pytest.approx(0.0464 + 0.0108)


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
