"""Gittins: the least mean response time in the M/G/1 queue; its boosts: the lightest tail; no starvation by boosts."""

import math
from collections.abc import Mapping

import numpy as np
import pytest

from scheduler_core.lengths import LogQuantiles
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions
from tests.scheduler_core.helpers import simulate, trace_row

pytestmark = pytest.mark.mend

#: A single server: one slot, 50 ms for each token, prompts in the step of the first token.
TOKEN_S = 0.05
STEP = LinearStepTime(base_s=TOKEN_S, per_prefill_token_s=0, per_decode_s=0, per_context_token_s=0)
SERVER = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=4096, num_kv_blocks=4000)
CAP = 100


def quantiles(*pieces: tuple[float, float]) -> LengthPrediction:
    """Length up to each level, as (level, tokens)."""
    logs = tuple(math.log(next(tokens for level, tokens in pieces if u <= level)) for u in LEVELS)
    return LengthPrediction(logs[len(logs) // 2], 0.8, 3.5, quantiles=logs)


#: Gambles, sure outputs, and outputs whose hazard falls slowly.
KINDS = (quantiles((0.8, 2), (1.0, 70)), quantiles((1.0, 15)), quantiles((0.4, 5), (0.7, 15), (1.0, 50)))


def queue(num: int, load: float, seed: int) -> tuple[Trace, Predictions]:
    """Poisson arrivals; each output is drawn from its prediction."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, len(KINDS), num)
    levels = rng.random(num)
    tokens = [
        int(np.clip(round(float(LogQuantiles(KINDS[kind].quantiles).ppf(level))), 1, CAP))
        for kind, level in zip(kinds, levels, strict=True)
    ]
    times = np.cumsum(rng.exponential(TOKEN_S * float(np.mean(tokens)) / load, num)).tolist()
    rows = tuple(trace_row(f"r{i}", times[i], 1, tokens[i], CAP) for i in range(num))
    answers = {row.request_id: Prediction(length=KINDS[kind]) for row, kind in zip(rows, kinds, strict=True)}
    return Trace(rows), Predictions("exact", answers)


def latencies(
    policy: str, queues: Mapping[int, tuple[Trace, Predictions]], **parameters: float
) -> np.ndarray:
    """Latencies [seeds, N] in seconds."""
    runs = [
        simulate(trace, policy, scheduler=SERVER, step_time=STEP, policy_parameters=parameters, predictions=predictions)
        for trace, predictions in queues.values()
    ]  # fmt: skip
    return np.array([[record.finish_s - record.arrival_s for record in run.records] for run in runs])


@pytest.mark.parametrize(("num", "seeds"), [(200, 2), pytest.param(800, 3, marks=pytest.mark.slow)])
def test_no_policy_without_the_lengths_has_a_smaller_mean_latency(num: int, seeds: int) -> None:
    queues = {seed: queue(num, 0.85, seed) for seed in range(seeds)}
    gittins = latencies("gittins", queues, update_tokens=1).mean()
    others = {name: latencies(name, queues).mean() for name in ("fcfs", "las", "sept", "srpt", "trail")}
    assert gittins < min(others.values()), others


@pytest.mark.parametrize(("num", "seeds"), [(500, 2), pytest.param(3000, 2, marks=pytest.mark.slow)])
def test_boosts_have_a_lighter_tail_than_arrival_and_than_the_mean_index(num: int, seeds: int) -> None:
    """gamma is the root of lambda (E[exp(gamma S)] - 1) = gamma, the decay rate under FCFS."""
    load = 0.8
    queues = {seed: queue(num, load, seed) for seed in range(seeds)}
    work = TOKEN_S * np.array([row.output_tokens for trace, _ in queues.values() for row in trace.requests])
    rate = load / work.mean()
    low, high = 1e-6, 10.0
    for _ in range(60):
        gamma = math.sqrt(low * high)
        low, high = (gamma, high) if rate * np.expm1(gamma * work).mean() < gamma else (low, gamma)
    boosted = latencies("boost_gittins", queues, update_tokens=1, gamma_per_s=gamma)
    fcfs, mean = (latencies(name, queues) for name in ("fcfs", "gittins"))
    assert np.quantile(boosted, 0.95) < np.quantile(fcfs, 0.95)
    assert np.quantile(boosted, 0.99) < np.quantile(mean, 0.99)
    assert mean.mean() < boosted.mean() < fcfs.mean()
