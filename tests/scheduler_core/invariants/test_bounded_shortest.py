"""The default order: its promise on random traces, with true, random and reversed predictions; pauses."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler_core.simulator.trace_predictions import Predictions, oracle_predictions
from tests.scheduler_core.invariants.helpers import steps_of
from tests.scheduler_core.policies.test_bounded_shortest import (
    CONFIG,
    random_predictions,
    reversed_predictions,
    trace_of,
    waits,
)

pytestmark = pytest.mark.mend

#: Seed, load, bursts: the two worst traces so far, and others.
TRACES = [
    (102, 1.1516080957206052, True),
    (659, 0.9375, True),
    *(
        pytest.param(seed, load, is_bursty, marks=pytest.mark.slow)
        for seed in range(5)
        for load in (0.9, 1.0, 1.1, 1.4)
        for is_bursty in (False, True)
    ),
]


@pytest.mark.parametrize(("seed", "load", "is_bursty"), TRACES)
def test_no_request_waits_much_longer_than_promised(seed: int, load: float, is_bursty: bool) -> None:
    """True, random and reversed predictions alike. The estimates may be wrong by 3.5 mean service times: the worst requests
    so far were 2.8 and 3.1 of them over the promise."""
    trace = trace_of(seed, load, 400, is_bursty=is_bursty)
    fcfs = waits("fcfs", trace, Predictions())
    service_s = 0.02 * float(np.mean([row.output_tokens for row in trace.requests]))
    promised = 1.25 * np.maximum(fcfs, np.quantile(fcfs, 0.99)) + 3.5 * service_s
    others = (random_predictions(trace, seed), reversed_predictions(trace))
    for predictions in (oracle_predictions(trace), *others):
        assert np.all(waits("bounded_shortest", trace, predictions) <= promised)
    in_seconds = waits("bounded_shortest", trace, oracle_predictions(trace), work_left=True)
    assert np.all(in_seconds <= promised)


def test_shortest_first_breaks_the_promise() -> None:
    seed, load, is_bursty = 102, 1.1516080957206052, True
    trace = trace_of(seed, load, 400, is_bursty=is_bursty)
    fcfs, shortest = waits("fcfs", trace, Predictions()), waits("ssjf", trace, oracle_predictions(trace))
    assert float(np.max(shortest / np.maximum(fcfs, np.quantile(fcfs, 0.99)))) > 1.5


@pytest.mark.parametrize(
    ("seed", "is_bursty"),
    [
        (0, False),
        (1, True),
        *(pytest.param(seed, kind, marks=pytest.mark.slow) for seed in range(2, 8) for kind in (False, True)),
    ],
)
def test_long_outputs_end_within_the_promise(seed: int, is_bursty: bool) -> None:
    """True predictions; a tenth of the P99 is left to the estimates."""
    trace = trace_of(seed, 0.95, 800, is_bursty=is_bursty)
    predictions = oracle_predictions(trace)
    fcfs, ours = (waits(name, trace, predictions, "ttlt_s") for name in ("fcfs", "bounded_shortest"))
    p99_s = np.quantile(fcfs, 0.99)
    assert np.all(ours <= 1.25 * np.maximum(fcfs, p99_s) + 0.1 * p99_s)


def test_no_running_request_is_paused_for_another() -> None:
    trace = trace_of(4, 1.3, 400)
    assert not waits("bounded_shortest", trace, oracle_predictions(trace), "num_preemptions").any()


@pytest.mark.parametrize("former", ["chunked_prefill", "vllm", "stage_aware"])
@pytest.mark.parametrize(
    ("num", "seed"), [(150, 0), *(pytest.param(1000, seed, marks=pytest.mark.slow) for seed in range(3))]
)
def test_only_earlier_arrivals_go_before_a_request_that_lost_its_memory(
    former: str, num: int, seed: int
) -> None:
    trace = trace_of(seed, 1.2, num)
    limits = replace(
        CONFIG.scheduler, max_num_batched_tokens=2100, num_kv_blocks=140, kv_watermark=0.0, batching=former
    )
    steps = steps_of(trace, "bounded_shortest", scheduler=limits, predictions=oracle_predictions(trace))
    arrival_s = {row.request_id: row.arrival_s for row in trace.requests}
    paused: frozenset[str] = frozenset()
    num_paused = 0
    for step in steps:
        first_s = min((arrival_s[name] for name in paused & step.waiting), default=np.inf)
        assert all(arrival_s[name] < first_s for name in step.admitted)
        num_paused += len(step.preempted)
        paused = (paused | {*step.preempted}) & step.waiting
    assert num_paused > 10
