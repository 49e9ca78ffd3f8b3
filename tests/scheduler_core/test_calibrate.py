"""`simulate calibrate`: known step times are found again, from made-up measurements and from a little live engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.plan import PrefillChunk
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.commands.calibrate import (
    EngineCalibrationConfig,
    draw_probes,
    joined,
    latency_error,
    run_calibration,
    step_samples,
)
from scheduler_core.simulator.engine_probe import Endpoint, Probe, random_prompt, send
from scheduler_core.simulator.fitting import StepSample, fit_step_time
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.predictions import Predictions
from scheduler_core.simulator.step_time import make_step_time
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime, StepWork
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from tests.scheduler_core.fake_engine import fake_engine
from tests.scheduler_core.helpers import random_trace, token_times

TRUE = LinearStepTime(base_s=0.01, per_prefill_token_s=5e-5, per_decode_s=4e-4, per_context_token_s=2e-6)
LIMITS = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048, num_kv_blocks=4096)


def measured(step_time: StepTime, rate_rps: float, num: int = 80, seed: int = 0) -> list[Probe]:
    """What a client would see of an engine with these step times."""
    trace = random_trace(num, seed=seed, rate_rps=rate_rps, cap=120, most_prompt=600)
    log = DecisionLog()
    core = Scheduler(LIMITS, make_policy("fcfs"), log)
    Simulation(trace, core, step_time, Predictions(), exact_steps=True).run()
    times = token_times(log)
    return [
        Probe(
            request_id=row.request_id,
            sent_s=row.arrival_s,
            prompt_tokens=row.prompt_tokens,
            max_tokens=row.max_tokens,
            token_s=times[row.request_id],
            output_tokens=row.output_tokens,
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
    assert unseen["num_requests"] == 80
    assert all(abs(error) < 0.1 for error in unseen["error"].values()), unseen


def test_noise_and_hiccups_change_the_mean_and_not_the_proportions() -> None:
    """2 % of the steps take 20 times as long: they are left out, but queues follow the mean of all steps."""
    rng = np.random.default_rng(0)
    samples = []
    for one in step_samples(measured(TRUE, 6.0)):
        factor = float(np.exp(rng.normal(0, 0.1))) * (20.0 if rng.random() < 0.02 else 1.0)
        samples.append(StepSample(one.seconds * factor, one.work))
    fit = fit_step_time(samples)
    assert fit.num_outliers > 0.01 * len(samples)
    total = sum(one.seconds for one in samples)
    assert sum(fit.step_time.step_s(one.work) for one in samples) == pytest.approx(total)
    assert total > 1.2 * sum(TRUE.step_s(one.work) for one in samples)
    ratios = [fit.parameters[name] / getattr(TRUE, name) for name in ("base_s", "per_prefill_token_s")]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.2)


def test_parts_measured_in_turn_are_one_measurement() -> None:
    config = EngineCalibrationConfig(json="", url="http://x/v1", served_model="m", num_requests=20, rounds=3)
    rng = np.random.default_rng(0)
    ids = [one.request_id for index in range(3) for one in draw_probes(config, 2.0, index, rng)]
    assert ids == [f"r{number}" for number in range(20)]
    rows = measured(TRUE, 6.0)
    later = joined([rows, rows])
    assert later[: len(rows)] == rows
    assert min(one.sent_s for one in later[len(rows) :]) > max(one.token_s[-1] for one in rows)
    once, twice = (fit_step_time(step_samples(one)) for one in (rows, later))
    assert twice.num_samples == 2 * once.num_samples
    assert twice.parameters == pytest.approx(once.parameters, rel=1e-6)


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


def test_no_time_is_ever_negative() -> None:
    works = [StepWork((), [100 * place] * (place + 1)) for place in range(20)]
    fit = fit_step_time([StepSample(1.0 - 0.01 * place, work) for place, work in enumerate(works)])
    assert all(value >= 0 for value in fit.parameters.values())
    with pytest.raises(InputError, match="measured steps"):
        fit_step_time([StepSample(1.0, works[0])] * 3)


def probes(*prompts: str) -> list[Probe]:
    return [
        Probe(request_id=f"r{number}", arrival_s=0.05 * number, prompt=prompt, max_tokens=5 + number)
        for number, prompt in enumerate(prompts)
    ]


def test_a_live_engine_is_asked_in_time_and_all_tokens_are_noted() -> None:
    rng = np.random.default_rng(0)
    sent = probes(*(random_prompt(10 + number, rng) for number in range(6)), "fail please")
    with fake_engine(LinearStepTime(base_s=0.002), LIMITS) as url:
        counted: list[int] = []
        send(Endpoint(url=url, served_model="m"), sent, progress=counted.append)
        with pytest.raises(TailcastError, match="503"):
            send(Endpoint(url=url, served_model="m"), probes("fail"))
    assert sum(counted) == 7
    assert (sent[-1].error or "").startswith("HTTP 503")
    for number, one in enumerate(sent[:-1]):
        assert one.error is None
        assert (one.prompt_tokens, one.output_tokens) == (10 + number, 5 + number)
        assert len(one.token_s) == one.output_tokens
        assert one.arrival_s <= one.sent_s < one.token_s[0]
        assert one.token_s == sorted(one.token_s)


def test_nobody_there_and_wrong_values_are_told() -> None:
    with pytest.raises(TailcastError, match="all requests failed"):
        send(Endpoint(url="http://127.0.0.1:9/v1", served_model="m"), probes("x"))
    wrong: list[tuple[str, Any]] = [("url", "ftp://x"), ("rounds", 21), ("prompt_words", (9, 3))]
    for name, value in wrong:
        values: dict[str, Any] = {"json": "", "url": "http://x/v1", "served_model": "m", name: value}
        with pytest.raises(InputError, match=name):
            EngineCalibrationConfig(**values)


@pytest.mark.slow
def test_a_live_engine_is_calibrated_on_one_load_and_predicted_on_another() -> None:
    true = LinearStepTime(base_s=0.03, per_prefill_token_s=4e-4, per_decode_s=3e-3, per_context_token_s=0.0)
    loads: dict[str, Any] = {"rate": 2.0, "held_out_rate": 5.0, "num_requests": 40}
    loads |= {"prompt_words": (8, 300), "output_tokens": (5, 30), "scheduler": LIMITS}
    with fake_engine(true, LIMITS) as url:
        result = run_calibration(EngineCalibrationConfig(json="", url=url, served_model="m", **loads))
    written = json.loads(json.dumps(result))
    again = make_step_time(written["step_time"]["name"], written["step_time"]["parameters"])
    assert isinstance(again, LinearStepTime)
    # The engine sleeps, so its steps are never shorter than they should be, and longer on a busy machine.
    assert again.base_s == pytest.approx(true.base_s, rel=0.5)
    assert again.per_prefill_token_s == pytest.approx(true.per_prefill_token_s, rel=0.5)
    assert abs(result["held_out"]["error"]["ttlt_s"]) < 0.3
    assert result["held_out"]["num_failed"] == 0
