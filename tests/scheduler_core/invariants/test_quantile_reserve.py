"""Quantile reservation: a request outgrows its memory with probability 1 - q, and then takes blocks one by one."""

from typing import Any

import numpy as np
import pytest

from scheduler_core.lengths import LogT
from scheduler_core.policies import make_policy
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from tests.scheduler_core.helpers import Drive, request

pytestmark = pytest.mark.mend

CAP, BLOCK = 600, 4
#: Memory for about eight requests of mean length.
LIMITS: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "num_kv_blocks": 320,
    "kv_block_tokens": BLOCK,
}


def serve(num: int, seed: int, former: str, **parameters: float) -> tuple[Drive, int, int]:
    """The run, and how many admitted requests there were and outgrew what they got at their admission."""
    rng = np.random.default_rng(seed)
    mu, sigma = rng.normal(4.0, 0.5, num), 0.5
    lengths = np.clip(np.rint(LogT(mu, sigma).ppf(rng.random(num))), 1, CAP).astype(int)
    rows = [(request(f"r{k}", 0.4 * k, prompt=8, cap=CAP), int(lengths[k])) for k in range(num)]
    predictions = {f"r{k}": Prediction(length=LengthPrediction(float(mu[k]), sigma, 3.5)) for k in range(num)}
    config = SchedulerConfig(batching=former, batching_parameters=dict(parameters), **LIMITS)
    run = Drive(Scheduler(config, make_policy("fcfs")), rows, 0.1, predictions)
    got: dict[str, int] = {}
    outgrown: set[tuple[str, int]] = set()
    num_admitted = 0
    kv = run.core.pool.kv
    while run.coming or run.core.num_waiting + run.core.num_running:
        plan = run.step()
        if plan is None:
            run.now = run.coming[0].arrival_s
            continue
        num_admitted += len(plan.admitted)
        got |= {name: kv.held_by(name) for name in plan.admitted if kv.held_by(name)}
        outgrown |= {
            (name, state.num_preemptions)
            for name, state in run.core.pool.running.items()
            if kv.held_by(name) > got.get(name, 10**9)
        }
    return run, num_admitted, len(outgrown)


@pytest.mark.parametrize("quantile", [0.5, 0.9])
@pytest.mark.parametrize("num", [150, pytest.param(600, marks=pytest.mark.slow)])
def test_a_request_outgrows_its_memory_with_probability_one_minus_q(num: int, quantile: float) -> None:
    """At least as rarely: memory comes in blocks, and a preempted request is admitted with the quantile of what remains."""
    _, num_admitted, num_outgrown = serve(num, 0, "quantile_reserve", quantile=quantile)
    error = 3.0 * np.sqrt(quantile * (1.0 - quantile) / num_admitted)
    assert 0.3 * (1.0 - quantile) < num_outgrown / num_admitted < 1.0 - quantile + error


@pytest.mark.parametrize("num", [120, pytest.param(400, marks=pytest.mark.slow)])
def test_a_larger_quantile_preempts_less(num: int) -> None:
    preempted = [serve(num, 1, "chunked_prefill")[0].core.counters.num_preemptions]
    preempted += [
        serve(num, 1, "quantile_reserve", quantile=q)[0].core.counters.num_preemptions
        for q in (0.5, 0.9, 0.99)
    ]
    assert preempted == sorted(preempted, reverse=True)
    assert preempted[-1] < preempted[0] / 10
