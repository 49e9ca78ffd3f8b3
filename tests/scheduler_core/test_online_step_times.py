"""The online fit of step times: each kind of engine by its own class, better than by the linear one."""

import random
from typing import Any

import numpy as np
import pytest

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.batching.batch import Batch
from scheduler_core.batching.slai import Slai
from scheduler_core.engine import step_times
from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.engine.pool import Pool
from scheduler_core.engine.step_times import StepTimes
from scheduler_core.simulator.step_time import make_step_time
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime, StepWork
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import trace_row
from tests.scheduler_core.invariants.helpers import steps_of
from tests.scheduler_core.invariants.test_slai import limits

BUDGET, MAX_DECODES = 512, 100


def observe(times: StepTimes, step_s: float, work: StepWork) -> None:
    chunks = [(chunk.start_token, chunk.num_tokens) for chunk in work.prefills]
    times.observe(step_s, chunks, len(work.contexts), sum(work.contexts))


def predicted(times: StepTimes, work: StepWork) -> float:
    chunks = [(chunk.start_token, chunk.num_tokens) for chunk in work.prefills]
    return times.batch_s(chunks, len(work.contexts), sum(work.contexts))


def size_of(work: StepWork) -> tuple[float, ...]:
    """What `LinearStepTime` reads."""
    return 1.0, work.num_prefill_tokens, len(work.contexts), work.num_context_tokens


def works(rng: random.Random, num: int) -> list[StepWork]:
    """Steps with up to `BUDGET` tokens: decodes, some with a chunk of a prompt."""
    result = []
    for _ in range(num):
        contexts = [rng.randint(50, 3000) for _ in range(rng.randint(1, MAX_DECODES))]
        size = rng.choice((0, 0, BUDGET - len(contexts), rng.randint(1, BUDGET - MAX_DECODES)))
        chunk = PrefillChunk("p", rng.choice((0, 0, 512, 1024)), size, False)
        result.append(StepWork((chunk,) if size else (), contexts))
    return result


def full(rng: random.Random) -> StepWork:
    """A full step, with the beginning of a prompt."""
    contexts = [rng.randint(50, 3000) for _ in range(rng.randint(1, MAX_DECODES))]
    return StepWork((PrefillChunk("p", 0, BUDGET - len(contexts), False),), contexts)


#: Computes as long as it reads the weights with about 240 tokens.
ROOFLINE: dict[str, Any] = {
    "model": "llama-3-8b",
    "gpu": "h100-80gb",
    "compute_efficiency": 0.6,
    "memory_efficiency": 0.75,
    "overhead_s": 1e-3,
    "layer_s": 0.0,
    "frontend_s": 0.0,
}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "staircase": ("staircase", {}),
    "narrow stairs": ("staircase", {"t_col": 64, "linear_tile_s": 2e-3, "per_token_s": 0.0}),
    "roofline": ("roofline", ROOFLINE),
    "quadratic": ("quadratic", {"preset": "a5000-7b"}),
    "attention": ("quadratic", {"alpha_1": 4e-7, "alpha_2": 5e-5, "gamma_1": 1e-6, "gamma_2": 5e-3}),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_is_not_linear_is_fitted_better_than_by_the_linear_class(engine: str) -> None:
    rng, model = random.Random(0), make_step_time(*ENGINES[engine])
    times, seconds, sizes = StepTimes(), [], []
    for work in works(rng, 1000):
        step_s = model.step_s(work) * rng.uniform(0.99, 1.01)
        observe(times, step_s, work)
        seconds.append(step_s)
        sizes.append(size_of(work))
    linear = np.linalg.lstsq(np.array(sizes), np.array(seconds), rcond=None)[0]
    errors: dict[str, list[float]] = {"online": [], "linear": []}
    for work in works(rng, 300):
        true_s, online_s = model.step_s(work), predicted(times, work)
        for name, predicted_s in (("online", online_s), ("linear", float(linear @ size_of(work)))):
            errors[name].append(abs(predicted_s / true_s - 1))
    online, of_linear = (float(np.mean(errors[name])) for name in errors)
    assert times.name != "linear"
    assert online < 0.7 * of_linear, (times.name, online, of_linear)


def test_a_linear_engine_has_the_linear_class() -> None:
    rng, model, times = random.Random(0), LinearStepTime(), StepTimes()
    for work in works(rng, 1000):
        observe(times, model.step_s(work) * rng.uniform(0.95, 1.05), work)
        work = full(rng)
    assert times.name == "linear"
    assert predicted(times, work) == pytest.approx(model.step_s(work), rel=0.02)


def test_a_pause_of_the_process_changes_little_and_a_slower_engine_is_followed() -> None:
    rng, model, times = random.Random(0), LinearStepTime(), StepTimes()
    work = full(rng)
    for each in works(rng, 500):
        observe(times, model.step_s(each) * rng.uniform(0.98, 1.02), each)
    before_s = predicted(times, work)
    observe(times, 10.0, work)
    for each in works(rng, 20):
        observe(times, model.step_s(each), each)
    assert predicted(times, work) == pytest.approx(before_s, rel=0.03)
    for each in works(rng, 4000):
        observe(times, 3 * model.step_s(each), each)
    assert predicted(times, work) == pytest.approx(3 * model.step_s(work), rel=0.05)


def test_coefficients_are_not_negative_and_there_is_a_typical_one_before_the_first_step() -> None:
    times = StepTimes()
    assert 0.01 < times.batch_s([(0, 512)], 32, 32_000) < 0.1
    for number in range(200):
        times.observe(0.02 - 1e-5 * number, [(0, 10 * number)] if number else [], 1, 100)
    assert 0.0 < times.batch_s([], 1, 100) <= times.batch_s([(0, 2000)], 1, 100)


def test_the_last_chance_of_slai_has_the_time_of_a_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most steps read the weights longer than they compute, and full batches are rare, better than by the linear class."""
    model: StepTime = make_step_time("roofline", ROOFLINE)
    errors: list[float] = []

    class RecordingSlai(Slai):
        def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
            batch = super().form(pool, max_num_batched_tokens, now)
            if not batch.budget and self._num_steps > 200:
                contexts = [state.num_computed_tokens for state in batch.decodes]
                chunks = tuple(chunk for _, chunk in batch.prefills)
                errors.append(abs(self._batch_s / model.step_s(StepWork(chunks, contexts)) - 1))
            return batch

    monkeypatch.setitem(BATCH_FORMERS, "slai", RecordingSlai)
    rng = np.random.default_rng(0)
    prompts = np.where(rng.random(200) < 0.05, 1500, rng.integers(20, 150, 200))
    rows = zip(np.cumsum(rng.exponential(0.08, 200)), prompts, rng.integers(20, 200, 200), strict=True)
    trace = Trace(tuple(
        trace_row(f"r{index}", float(at_s), int(prompt), int(output), 200, tbt_slo_s=0.1)
        for index, (at_s, prompt, output) in enumerate(rows)
    ))  # fmt: skip
    config = limits(num_tokens=512, delta_low=2.0, delta_high=2.0, fitted=True)
    steps_of(trace, "spf", scheduler=config, step_time=model)
    best = np.mean(errors)
    assert len(errors) > 10
    errors.clear()
    monkeypatch.setattr(step_times, "_BETTER", 0.0)  # always the linear class
    steps_of(trace, "spf", scheduler=config, step_time=model)
    assert best < 0.7 * np.mean(errors), (best, np.mean(errors))
