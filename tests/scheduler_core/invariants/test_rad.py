"""RAD's theorems, and the rate above which no scheduler is stable, in full simulations.

The engine cannot serve n requests in less than n / `max_rate_rps` seconds, whatever the policy and the batch former.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.records import request_columns
from scheduler_core.simulator.run import SimulationResult
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime
from scheduler_core.simulator.step_time.quadratic import QuadraticStepTime
from scheduler_core.simulator.step_time.roofline import RooflineStepTime
from scheduler_core.simulator.step_time.stability import max_rate_rps, rad_bounds
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import SMALL_PARAMETERS, compatible_pairs, simulate, trace_row

pytestmark = pytest.mark.mend

#: Eq. 7 without a fixed time per step, as in the paper, with small tiles: t_lcm = t_col = 16.
PAPER = StaircaseStepTime(
    base_s=0.0, linear_tile_s=0.01, per_token_s=2e-5, decode_tile_s=1e-5, prefill_tile_s=1e-6, t_row=16, t_col=16, t_red=8, d=16
)  # fmt: skip
TILES = {"t_row": 16, "t_red": 8}
LIMITS = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=96, num_kv_blocks=4000)
RAD = replace(LIMITS, batching="rad", batching_parameters=TILES)
MODELS: dict[str, tuple[SchedulerConfig, StepTime]] = {
    "Eq. 7": (LIMITS, PAPER),
    "Eq. 7, fixed time": (LIMITS, replace(PAPER, base_s=0.02)),
    "linear": (LIMITS, LinearStepTime()),
    "roofline": (LIMITS, RooflineStepTime()),
    "little memory": (replace(LIMITS, num_kv_blocks=40, kv_watermark=0.0), LinearStepTime()),
}


def trace_of(num: int, rate_rps: float | None, *, prompt: int = 64, output: int = 32) -> Trace:
    """Prompts of whole tiles, uniform outputs from 1 on; Poisson arrivals, or all at once."""
    rng = np.random.default_rng(0)
    outputs = rng.integers(1, output, num, endpoint=True).tolist()
    times = np.zeros(num) if rate_rps is None else np.cumsum(rng.exponential(1.0 / rate_rps, num))
    rows = [trace_row(f"r{i}", float(times[i]), prompt, outputs[i], output) for i in range(num)]
    return Trace(tuple(rows))


def run(trace: Trace, limits: SchedulerConfig, step_time: StepTime, policy: str = "fcfs") -> SimulationResult:
    predictor = "none" if policy == "fcfs" else "oracle"
    return simulate(trace, policy, predictor=predictor, scheduler=limits, **_model(step_time))


def _model(step_time: StepTime) -> dict[str, Any]:
    if isinstance(step_time, LinearStepTime):
        return {"step_time": step_time}
    name = "staircase" if isinstance(step_time, StaircaseStepTime) else "roofline"
    values = {field: getattr(step_time, field) for field in type(step_time).__dataclass_fields__}
    return {"step_time_model": name, "step_time_parameters": values}


def quarters(result: SimulationResult) -> np.ndarray:
    """Mean time to first token of each quarter of the arrivals, in seconds."""
    columns = request_columns(result.records)
    waits = columns["ttft_s"][np.argsort(columns["arrival_s"], kind="stable")]
    return np.array([part.mean() for part in np.array_split(waits, 4)])


def backlog_s(result: SimulationResult, trace: Trace) -> float:
    """From the last arrival to the last token."""
    return max(record.finish_s for record in result.records) - trace.requests[-1].arrival_s


def pairs(*, every: bool) -> list[tuple[str, str]]:
    """All policies with all batch formers, or each one with chunked prefill, or with first come, first served."""
    compatible = compatible_pairs(POLICIES, BATCH_FORMERS)
    return [pair for pair in compatible if every or pair[0] == "fcfs" or pair[1] == "chunked_prefill"]


SCHEDULERS = [
    *((model, 30, False) for model in ("Eq. 7", "linear", "little memory")),
    *(pytest.param(model, 120, True, marks=pytest.mark.slow) for model in MODELS),
]


def end_s(trace: Trace, model: str, policy: str, former: str) -> float:
    """When the last request of a trace ends."""
    limits, step_time = MODELS[model]
    parameters = TILES if former.startswith("rad") else SMALL_PARAMETERS.get(former, {})
    config = replace(limits, batching=former, batching_parameters=parameters)
    records = run(trace, config, step_time, policy).records
    assert len(records) == len(trace)
    return max(record.finish_s for record in records)


@pytest.mark.parametrize(("model", "num", "every"), SCHEDULERS)
def test_no_scheduler_serves_more_than_the_bound(model: str, num: int, every: bool) -> None:
    """All requests at once, so that the engine is always busy; at any rate above the bound the backlog therefore grows under
    every policy and batch former, by at least what arrives too much."""
    trace = trace_of(num, None)
    least_s = num / max_rate_rps(trace, *MODELS[model])
    ends_s = {pair: end_s(trace, model, *pair) for pair in pairs(every=every)}
    assert len(ends_s) > (150 if every else 35)
    assert min(ends_s.values()) >= least_s * (1 - 1e-9), ends_s


@pytest.mark.parametrize("model", MODELS)
def test_chunked_prefill_nearly_reaches_the_bound(model: str) -> None:
    """The slots that drain at the end cost it a few percent."""
    trace = trace_of(500, None)
    assert end_s(trace, model, "fcfs", "chunked_prefill") * max_rate_rps(trace, *MODELS[model]) < 1.2 * len(
        trace
    )


@pytest.mark.parametrize("policy", ["fcfs", "srpt", "uniboost"])
def test_above_the_bound_the_backlog_grows(policy: str) -> None:
    """Regular arrivals at 1.1 of it: at the last one at least an eleventh of the work is left."""
    trace = trace_of(300, None)
    gap_s = 1.0 / (1.1 * max_rate_rps(trace, *MODELS["linear"]))
    trace = Trace(tuple(replace(row, arrival_s=gap_s * i) for i, row in enumerate(trace.requests)))
    last_s = trace.requests[-1].arrival_s
    assert end_s(trace, "linear", policy, "chunked_prefill") - last_s > 0.1 * last_s


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num", [1000, pytest.param(15_000, marks=pytest.mark.slow)])
def test_chunked_prefill_is_stable_below_the_bound(model: str, num: int) -> None:
    """At 0.9 of it; at 0.8 for the roofline, whose bound leaves out that each step reads the output embedding."""
    limits, step_time = MODELS[model]
    rate = (0.8 if model == "roofline" else 0.9) * max_rate_rps(trace_of(num, None), limits, step_time)
    result = run(trace_of(num, rate), limits, step_time)
    assert quarters(result)[3] < 3.0 * quarters(result)[0]
    assert result.metrics["steady_state"]["accumulated_fraction"] < 0.03


def test_the_bound_is_theorem_1s_without_a_fixed_time_per_step() -> None:
    """T_R by its formula in the paper, with o - 1 decodes; RAD's own time is the same, so it is optimal."""
    trace = trace_of(1000, None)
    prompt = np.array([row.prompt_tokens for row in trace.requests])
    decodes = np.array([row.output_tokens for row in trace.requests]) - 1
    tokens = float((prompt + decodes).mean())
    contexts = [p + np.arange(1, n + 1) for p, n in zip(prompt, decodes, strict=True)]
    decode_tiles = float(np.mean([2 * np.ceil(one / 16).sum() for one in contexts]))  # d = t_col = t_row
    mean_s = (PAPER.linear_tile_s / 16 + PAPER.per_token_s) * tokens + PAPER.decode_tile_s * decode_tiles
    mean_s += PAPER.prefill_tile_s * 16 * float((prompt * (prompt + 16)).mean()) / (16 * 16 * 8)
    assert 1.0 / max_rate_rps(trace, LIMITS, PAPER) == pytest.approx(mean_s)
    bounds = rad_bounds(trace, RAD, PAPER)
    assert bounds.expected_s == pytest.approx(mean_s)
    # T_max: 64 + 32 positions, one at a time, n > 15 T_max / (0.1 T_R).
    tiles = 2 * np.ceil(np.arange(1, 97) / 16).sum()
    longest_s = 96 * (PAPER.linear_tile_s + PAPER.per_token_s) + PAPER.decode_tile_s * tiles
    assert bounds.longest_s == pytest.approx(longest_s)
    assert bounds.num_per_cycle == int(15 * longest_s / (0.1 * mean_s)) + 1


@pytest.mark.parametrize(
    ("former", "num"),
    [
        ("rad", 1200),
        ("rad_prefill_first", 500),
        pytest.param("rad", 20_000, marks=pytest.mark.slow),
        pytest.param("rad_prefill_first", 10_000, marks=pytest.mark.slow),
    ],
)
def test_rad_is_stable_below_its_bound_and_unstable_above(former: str, num: int) -> None:
    """With the n of theorem 2 for load 0.9; at 1.1 the backlog grows by an eleventh of the time."""
    rate = 1.0 / rad_bounds(trace_of(num, None), RAD, PAPER).expected_s
    config = replace(RAD, batching=former)
    result = run(trace_of(num, 0.9 * rate), config, PAPER)
    expected = rad_bounds(trace_of(num, 0.9 * rate), RAD, PAPER).num_per_cycle
    assert result.config["scheduler"]["batching_parameters"]["n"] == expected > 1000
    assert quarters(result)[3] < 3.0 * quarters(result)[0]
    trace = trace_of(num, 1.1 * rate)
    result = run(trace, config, PAPER)
    assert quarters(result)[3] > 3.0 * quarters(result)[0]
    assert backlog_s(result, trace) > 0.05 * trace.requests[-1].arrival_s


def test_short_cycles_are_not_stable_at_nine_tenths() -> None:
    """Each cycle ends with batches that are not full, t_col - 1 of n requests at most."""
    rate = 1.0 / rad_bounds(trace_of(800, None), RAD, PAPER).expected_s
    result = run(trace_of(800, 0.9 * rate), replace(RAD, batching_parameters={**TILES, "n": 16}), PAPER)
    assert quarters(result)[3] > 3.0 * quarters(result)[0]


@pytest.mark.parametrize(
    ("step_time", "stable_rps", "growing_rps"),
    [(LinearStepTime(), 9.0, 7.5), (StaircaseStepTime(), 9.5, 7.5)],
    ids=["linear", "staircase"],
)
def test_with_a_fixed_time_per_step_rads_bound_is_not_everybodys(
    step_time: StepTime, stable_rps: float, growing_rps: float
) -> None:
    """1 / T_R, 6.6 or 6.4 requests/s here, was given as the rate above which every policy is unstable: chunked prefill is
    stable at 9 and more, while RAD is not at 7.5."""
    limits = SchedulerConfig()
    trace = trace_of(1000, None, prompt=512, output=256)
    rate = 1.0 / rad_bounds(trace, replace(limits, batching="rad"), step_time).expected_s
    assert rate < growing_rps < stable_rps < max_rate_rps(trace, limits, step_time)
    stable = quarters(run(trace_of(1000, stable_rps, prompt=512, output=256), limits, step_time))
    assert stable[3] < 2.0 * stable[0]
    growing = run(
        trace_of(1000, growing_rps, prompt=512, output=256), replace(limits, batching="rad"), step_time
    )
    assert quarters(growing)[3] > 3.0 * quarters(growing)[0]


def test_without_the_fixed_time_it_is_and_all_models_are_checked() -> None:
    trace = trace_of(500, None, prompt=512, output=256)
    limits = SchedulerConfig(max_num_seqs=256, num_kv_blocks=16_000)
    free = StaircaseStepTime(base_s=0.0)
    rate = 1.0 / rad_bounds(trace, replace(limits, batching="rad"), free).expected_s
    assert max_rate_rps(trace, limits, free) == pytest.approx(rate)
    with pytest.raises(InputError, match="QuadraticStepTime"):
        max_rate_rps(trace, limits, QuadraticStepTime())
    with pytest.raises(InputError, match="epsilon"):
        rad_bounds(trace, replace(limits, batching="rad"), free, epsilon=1.0)
