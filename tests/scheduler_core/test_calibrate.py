"""`simulate calibrate`: known step times are found again, from made-up measurements and from a little live engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.plan import Finished, PrefillChunk, StepResult
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.commands.calibrate import (
    EngineCalibrationConfig,
    draw_requests,
    joined,
    latency_error,
    part_of,
    run_calibration,
    step_samples,
)
from scheduler_core.simulator.engine_probe import Endpoint, ProbeRequest, ProbeResponse, probe, random_prompt
from scheduler_core.simulator.fitting import StepSample, fit_step_time
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.predictions import no_predictions
from scheduler_core.simulator.step_time import LinearStepTime, StepTime, StepWork, make_step_time
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from tests.scheduler_core.fake_engine import fake_engine
from tests.scheduler_core.helpers import random_trace

TRUE = LinearStepTime(
    base_s=0.01,
    per_prefill_token_s=5e-5,
    per_decode_s=4e-4,
    per_context_token_s=2e-6,
    per_swapped_token_s=0.0,
)
LIMITS = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048, num_kv_blocks=4096)


class Telling(Scheduler):
    """A scheduler that notes when every token came."""

    def __init__(self) -> None:
        super().__init__(LIMITS, make_policy("fcfs"))
        self.token_s: dict[str, list[float]] = {}

    def complete(self, result: StepResult, now: float) -> tuple[Finished, ...]:
        plan, _ = self._open_step()
        for name in (*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)):
            self.token_s.setdefault(name, []).append(now)
        return super().complete(result, now)


def measured(step_time: StepTime, rate_rps: float, num: int = 80, seed: int = 0) -> list[ProbeResponse]:
    """What a client would see of an engine with these step times."""
    trace = random_trace(num, seed=seed, rate_rps=rate_rps, cap=120, most_prompt=600)
    core = Telling()
    Simulation(trace, core, step_time, no_predictions(), exact_steps=True).run()
    return [
        ProbeResponse(
            row.request_id,
            row.arrival_s,
            row.prompt_tokens,
            row.max_tokens,
            core.token_s[row.request_id],
            row.output_tokens,
        )
        for row in trace.requests
    ]


def test_step_times_are_found_again_from_the_times_of_tokens() -> None:
    fit = fit_step_time(step_samples(measured(TRUE, 6.0)))
    for name in ("base_s", "per_prefill_token_s", "per_decode_s", "per_context_token_s"):
        assert fit.parameters[name] == pytest.approx(getattr(TRUE, name), rel=0.1), name
    assert fit.median_error < 0.02
    assert fit.num_outliers < 0.2 * fit.num_samples
    unseen = latency_error(measured(TRUE, 20.0, seed=1), fit.step_time, LIMITS)
    assert unseen.num_requests == 80
    assert all(abs(error) < 0.1 for error in unseen.error.values()), unseen


def test_noise_and_hiccups_hardly_matter() -> None:
    rng = np.random.default_rng(0)
    samples = [
        StepSample(
            one.seconds * float(np.exp(rng.normal(0, 0.1))) * (20.0 if rng.random() < 0.02 else 1.0), one.work
        )
        for one in step_samples(measured(TRUE, 6.0))
    ]
    fit = fit_step_time(samples)
    assert fit.parameters["base_s"] == pytest.approx(TRUE.base_s, rel=0.2)
    assert fit.parameters["per_prefill_token_s"] == pytest.approx(TRUE.per_prefill_token_s, rel=0.2)
    assert fit.num_outliers > 0.01 * len(samples)


def test_an_unsteady_machine_is_slow_on_average() -> None:
    """Half of the steps take three times as long: queues follow the mean, which a fit of relative errors misses."""
    rng = np.random.default_rng(0)
    true = step_samples(measured(TRUE, 6.0))
    noisy = [StepSample(one.seconds * float(rng.choice([1.0, 3.0])), one.work) for one in true]
    total = sum(one.seconds for one in noisy)
    biased, fit = fit_step_time(noisy), fit_step_time(noisy, keep_total=True)
    assert sum(biased.step_time.step_s(one.work) for one in noisy) < 0.75 * total
    assert sum(fit.step_time.step_s(one.work) for one in noisy) == pytest.approx(total)
    assert fit.parameters["base_s"] == pytest.approx(2 * TRUE.base_s, rel=0.2)
    steady = fit_step_time(true, keep_total=True)
    assert steady.parameters["base_s"] == pytest.approx(TRUE.base_s, rel=0.1)


def test_parts_measured_in_turn_are_one_measurement() -> None:
    config = EngineCalibrationConfig(json="", url="http://x/v1", served_model="m", num_requests=20, rounds=3)
    asked = draw_requests(config, 2.0, np.random.default_rng(0))
    parts = [part_of(asked, turn, 3) for turn in range(3)]
    assert [one.request_id for part in parts for one in part] == [one.request_id for one in asked]
    assert sum(part[-1].arrival_s for part in parts) == pytest.approx(asked[-1].arrival_s)
    rows = measured(TRUE, 6.0)
    later = joined([rows, rows])
    assert later[: len(rows)] == rows
    assert min(one.sent_s for one in later[len(rows) :]) > max(one.token_s[-1] for one in rows)
    once, twice = (fit_step_time(step_samples(one), keep_total=True) for one in (rows, later))
    assert twice.num_samples == 2 * once.num_samples
    assert twice.parameters == pytest.approx(once.parameters, rel=1e-6)
    alone, both = (latency_error(one, once.step_time, LIMITS) for one in (rows, later))
    assert both.measured == pytest.approx(alone.measured)
    assert both.simulated == pytest.approx(alone.simulated)


def test_a_staircase_is_found_again() -> None:
    model = StaircaseStepTime(
        base_s=0.01, linear_tile_s=5e-3, per_token_s=2e-5, decode_tile_s=2e-5, prefill_tile_s=1e-5
    )
    rng = np.random.default_rng(0)
    works = []
    for _ in range(300):
        sizes = [int(size) for size in rng.integers(1, 700, rng.integers(0, 3))]
        chunks = tuple(PrefillChunk("", int(rng.integers(0, 900)), size, True) for size in sizes)
        works.append(StepWork(chunks, [int(one) for one in rng.integers(1, 2000, rng.integers(1, 60))]))
    fit = fit_step_time([StepSample(model.step_s(work), work) for work in works], "staircase")
    for name, value in fit.parameters.items():
        assert value == pytest.approx(getattr(model, name), rel=1e-6), name
    straight = fit_step_time([StepSample(model.step_s(work), work) for work in works], "linear")
    assert straight.median_error > 0.01 > 1e-6 > fit.median_error


def test_no_time_is_ever_negative() -> None:
    works = [StepWork((), [100 * place] * (place + 1)) for place in range(20)]
    fit = fit_step_time([StepSample(1.0 - 0.01 * place, work) for place, work in enumerate(works)])
    assert all(value >= 0 for value in fit.parameters.values())
    with pytest.raises(InputError, match="measured steps"):
        fit_step_time([StepSample(1.0, works[0])] * 3)
    with pytest.raises(InputError, match="measured steps"):
        fit_step_time([StepSample(0.0, works[0])] * 30)


def test_a_live_engine_is_asked_in_time_and_all_tokens_are_noted() -> None:
    rng = np.random.default_rng(0)
    asked = [
        ProbeRequest(f"r{place}", 0.05 * place, random_prompt(10 + place, rng), 5 + place)
        for place in range(6)
    ]
    asked.append(ProbeRequest("bad", 0.1, "fail please", 5))
    with fake_engine(LinearStepTime(base_s=0.002), LIMITS) as url:
        counted: list[int] = []
        found = probe(Endpoint(url=url, model="m"), asked, progress=counted.append)
        with pytest.raises(TailcastError, match="503"):
            probe(Endpoint(url=url, model="m"), [ProbeRequest("bad", 0.0, "fail", 5)])
    assert sum(counted) == 7
    assert found[-1].error is not None
    assert found[-1].error.startswith("HTTP 503")
    for place, one in enumerate(found[:-1]):
        assert one.error is None
        assert (one.prompt_tokens, one.output_tokens) == (10 + place, 5 + place)
        assert len(one.token_s) == one.output_tokens
        assert one.sent_s >= asked[place].arrival_s
        assert one.token_s == sorted(one.token_s)
        assert one.token_s[0] > one.sent_s


def test_nobody_there_and_wrong_values_are_told() -> None:
    with pytest.raises(TailcastError, match="all requests failed"):
        probe(Endpoint(url="http://127.0.0.1:9/v1", model="m"), [ProbeRequest("a", 0.0, "x", 1)])
    wrong: list[tuple[str, Any]] = [
        ("url", "ftp://x"),
        ("rate", 0.0),
        ("num_requests", 2),
        ("rounds", 21),
        ("prompt_words", (9, 3)),
        ("model", "cubic"),
    ]
    for name, value in wrong:
        values: dict[str, Any] = {"json": "", "url": "http://x/v1", "served_model": "m", name: value}
        with pytest.raises(InputError, match=name):
            EngineCalibrationConfig(**values)


@pytest.mark.slow
def test_a_live_engine_is_calibrated_on_one_load_and_predicted_on_another() -> None:
    true = LinearStepTime(base_s=0.03, per_prefill_token_s=4e-4, per_decode_s=3e-3, per_context_token_s=0.0)
    config: dict[str, Any] = {
        "served_model": "m",
        "rate": 2.0,
        "held_out_rate": 5.0,
        "num_requests": 40,
        "prompt_words": (8, 300),
        "output_tokens": (5, 30),
        "scheduler": LIMITS,
    }
    with fake_engine(true, LIMITS) as url:
        result = run_calibration(EngineCalibrationConfig(json="", url=url, **config))
    written = json.loads(json.dumps(asdict(result)))
    again = make_step_time(written["step_time"]["name"], written["step_time"]["parameters"])
    assert isinstance(again, LinearStepTime)
    # The engine sleeps, so its steps are never shorter than they should be, and longer on a busy machine.
    assert again.base_s == pytest.approx(true.base_s, rel=0.5)
    assert again.per_prefill_token_s == pytest.approx(true.per_prefill_token_s, rel=0.5)
    assert abs(result.held_out.error["ttlt_s"]) < 0.3
    assert result.held_out.num_failed == 0
