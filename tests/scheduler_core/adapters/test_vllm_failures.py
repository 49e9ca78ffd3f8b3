"""Exceptions in our hooks, with a stand-in for vLLM; test_vllm_formers.py raises in the real one."""

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scheduler_core.adapters import vllm as adapter
from scheduler_core.adapters.settings import EngineSettings
from scheduler_core.errors import InputError
from tests.scheduler_core.adapters.length_reader import LengthReader, settle
from tests.scheduler_core.adapters.stand_in import FakeRequest, OwnQueue, modules, run_step, vllm_config

pytestmark = pytest.mark.mend

LENGTHS = (9, 4, 7, 1, 5, 2)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Schedulers on the stand-in, with a predictor."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("TAILCAST_CONFIG", raising=False)
    monkeypatch.setattr(adapter, "open_predictor", lambda url, **_: LengthReader("answers"))
    adapter.scheduler_class.cache_clear()

    def build(policy: str, engine_policy: str = "fcfs") -> Any:
        settings = {"policy": policy, "predictor": "prompted://answers"}
        return adapter.TailcastScheduler(vllm_config=vllm_config(settings, policy=engine_policy))

    yield build
    adapter.scheduler_class.cache_clear()


def fail(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(type(owner), name, raises)


def add_requests(scheduler: Any) -> None:
    """Requests of `LENGTHS`, the first with the largest priority; waits for their predictions."""
    for at, length in enumerate(LENGTHS):
        request = FakeRequest(f"r{at}", length, priority=-at)
        request.arrival_time = float(at)
        scheduler.add_request(request)
    if scheduler._tailcast_thread is not None:
        settle(scheduler._tailcast_thread)


def served(scheduler: Any) -> list[str]:
    add_requests(scheduler)
    finished: list[str] = []
    while scheduler.requests:
        finished += run_step(scheduler)[1]
    return finished


@pytest.mark.parametrize(
    "hook", ["key", "on_admit", "on_finish", "take_changed", "on_pressure", "on_prediction"]
)
def test_the_engine_serves_all_in_its_own_order(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    scheduler = make("ssjf")
    fail(scheduler._tailcast_order.policy, hook, monkeypatch)
    before = scheduler._tailcast_metrics.failures
    with caplog.at_level(logging.ERROR, "vllm.tailcast"):
        finished = served(scheduler)
    assert sorted(finished) == [f"r{at}" for at in range(len(LENGTHS))]
    assert isinstance(scheduler.waiting, OwnQueue)
    assert scheduler._tailcast_thread is None
    records = [
        record for record in caplog.records if "vLLM schedules in its own order" in record.getMessage()
    ]
    assert len(records) == 1
    assert "RuntimeError" in records[0].getMessage()
    assert sum(metric.value for family in before.collect() for metric in family.samples) >= 1
    scheduler.shutdown()


@pytest.mark.parametrize("engine_policy", ["fcfs", "priority"])
def test_the_own_order_is_that_of_the_engine(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, engine_policy: str
) -> None:
    """Of those that wait after the failure; two run, r0 and r1 or, by vLLM's priority, r5 and r4."""
    scheduler = make("fcfs", engine_policy)
    fail(scheduler._tailcast_order, "start_step", monkeypatch)
    add_requests(scheduler)
    admitted = []
    for _ in range(40):
        running = {request.request_id for request in scheduler.running}
        run_step(scheduler)
        admitted += [each.request_id for each in scheduler.running if each.request_id not in running]
    expected = range(len(LENGTHS)) if engine_policy == "fcfs" else range(len(LENGTHS) - 1, -1, -1)
    # A request of one token ends in its first step.
    assert [name for name in admitted if name != "r3"] == [f"r{at}" for at in expected if at != 3]
    assert scheduler.policy.value == engine_policy
    assert not scheduler.requests


def test_a_predictor_that_cannot_be_reached_costs_only_the_predictions(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make("ssjf")
    fail(scheduler._tailcast_thread, "take", monkeypatch)
    assert len(served(scheduler)) == len(LENGTHS)
    assert not scheduler._tailcast_failed
    assert (scheduler._tailcast_thread, scheduler._tailcast_calibration) == (None, None)


@pytest.mark.parametrize("hook", ["correct", "observe", "publish_if_due"])
def test_calibration_that_fails_costs_only_itself(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    scheduler = make("ssjf")
    fail(scheduler._tailcast_calibration, hook, monkeypatch)
    assert len(served(scheduler)) == len(LENGTHS)
    assert not scheduler._tailcast_failed
    assert scheduler._tailcast_calibration is None
    assert scheduler._tailcast_thread is not None
    scheduler.shutdown()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batching": "slay"}, "batching: got 'slay'"),
        ({"batching": "slai", "batching_parameters": {"delta": 1}}, "batching"),
        ({"batching_parameters": {"delta_low": 1.0}}, "batching_parameters"),
        ({"batching": "rad", "policy": "trail"}, "policies that are not preemptive"),
        ({"tbt_slo_s": {"paying": 0.0}}, "tbt_slo_s.paying: got 0.0"),
        ({"tbt_slo_s": {"paying": True}}, "tbt_slo_s.paying: got True"),
    ],
)
def test_wrong_settings_of_batches_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        EngineSettings(**({"policy": "fcfs"} | values))
    assert message in str(error.value)
