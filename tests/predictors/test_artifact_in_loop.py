"""A simulation with a real artifact in the loop: it runs in this process, and its answers order the requests."""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from predictors.client import InProcessPredictor
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.predictions import Predictions, fetch_predictions
from scheduler_core.simulator.step_time import LinearStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest

PROMPTS = ("sea", "name three rivers", "write a long essay about the sea", "a a a")


def trace() -> Trace:
    rows = [
        TraceRequest(
            request_id=f"r{number}",
            arrival_s=0.0,
            prompt_tokens=8,
            output_tokens=20,
            max_tokens=100,
            prompt=PROMPTS[number % len(PROMPTS)],
        )
        for number in range(12)
    ]
    return Trace(tuple(rows))


def test_an_artifact_orders_the_requests_of_a_simulation(artifact_folder: Path) -> None:
    predictions = fetch_predictions(trace(), InProcessPredictor(artifact_folder), served_model="tiny-llm")
    assert predictions.num_failed == 0
    assert all(seconds > 0 for seconds in predictions.latency_s.values())
    core = Scheduler(SchedulerConfig(max_num_seqs=1), make_policy("ssjf"))
    out = Simulation(trace(), core, LinearStepTime(), replace(predictions, latency_s={})).run()
    mus = [record.predicted_mu for record in out.records]
    assert len(set(mus)) == len(PROMPTS), "answers depend on the prompt"
    assert mus == sorted(mus, key=lambda mu: mu if mu is not None else 0.0), "shortest predicted median first"


def test_answers_come_as_late_as_they_did(artifact_folder: Path) -> None:
    predictions = fetch_predictions(trace(), InProcessPredictor(artifact_folder), served_model="tiny-llm")
    late = dict.fromkeys(predictions.by_id, 1e6)
    core = Scheduler(SchedulerConfig(max_num_seqs=1), make_policy("ssjf"))
    out = Simulation(trace(), core, LinearStepTime(), predictions, delays_s=late).run()
    assert core.counters.num_late_predictions == len(out.records) == 12
    assert [record.request_id for record in out.records] == [f"r{number}" for number in range(12)]


def test_the_scheme_local_is_registered() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, name = project["project"]["entry-points"]["tailcast.predictors"]["local"].partition(":")
    assert isinstance(getattr(importlib.import_module(module), name)("folder"), InProcessPredictor)


def test_no_artifact_is_told(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="first 12 predictions failed"):
        assert isinstance(fetch_predictions(trace(), InProcessPredictor(tmp_path)), Predictions)
