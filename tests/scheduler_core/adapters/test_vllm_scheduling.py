"""The scheduler with a stand-in for vLLM, step by step; test_vllm_engine.py runs the real one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_core.adapters import vllm as adapter
from scheduler_core.errors import InputError, MissingExtraError
from tests.scheduler_core.adapters.length_reader import LengthReader
from tests.scheduler_core.adapters.stand_in import FakeRequest, modules, run_step, vllm_config

Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Schedulers on the stand-in; `mode` is a predictor's of length_reader.py."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("TAILCAST_CONFIG", raising=False)
    monkeypatch.setattr(adapter, "open_predictor", lambda url: LengthReader(url.partition("://")[2]))
    adapter.scheduler_class.cache_clear()
    made = []

    def build(order: str, mode: str | None = "answers", **options: Any) -> Any:
        settings = {
            "policy": order,
            "predictor": mode and f"prompted://{mode}",
            **options.pop("settings", {}),
        }
        made.append(adapter.TailcastScheduler(vllm_config=vllm_config(settings, **options)))
        return made[-1]

    yield build
    for scheduler in made:
        scheduler.shutdown()
        assert scheduler.is_shut_down
    adapter.scheduler_class.cache_clear()


def wait_for(scheduler: Any, count: int) -> None:
    """Until so many answers are there, to be taken by the next step."""
    end = time.monotonic() + 60
    while len(scheduler._tailcast_thread._events) < count:
        assert time.monotonic() < end
        time.sleep(0.001)


def drain(scheduler: Any) -> list[str]:
    """Runs it empty; the ids in the order they finished."""
    found: list[str] = []
    while scheduler.requests:
        found += run_step(scheduler)[1]
        assert len(found) < 1000
    return found


def test_the_predicted_order(make: Make) -> None:
    scheduler = make("ssjf", max_num_seqs=1)
    for number, length in enumerate((9, 3, 6)):
        scheduler.add_request(FakeRequest(f"r{number}", length))
    wait_for(scheduler, 3)
    assert drain(scheduler) == ["r1", "r2", "r0"]
    assert not scheduler._tailcast_order.states


def test_nobody_waits_for_a_predictor_that_hangs(make: Make) -> None:
    scheduler = make("ssjf", "hangs", max_num_seqs=1)
    for number, length in enumerate((9, 3, 6)):
        scheduler.add_request(FakeRequest(f"r{number}", length))
    assert drain(scheduler) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("mode", ["garbage", "breaks:2"])
def test_a_predictor_that_fails_loses_nobody(make: Make, mode: str) -> None:
    scheduler = make("tie", mode, max_num_seqs=2)
    for number in range(12):
        scheduler.add_request(FakeRequest(f"r{number}", 1 + number % 5))
        if number % 3 == 0:
            run_step(scheduler)
    done = drain(scheduler)
    assert len(set(done)) == len(done)
    assert not scheduler.waiting
    assert not scheduler._tailcast_order.states


def test_a_preemptive_policy_takes_places_and_scores_stay(make: Make) -> None:
    scheduler = make("srpt", max_num_seqs=1)
    scheduler.add_request(FakeRequest("long", 30))
    wait_for(scheduler, 1)
    run_step(scheduler)
    known = scheduler._tailcast_order.states["long"].prediction
    scheduler.add_request(FakeRequest("short", 2))
    wait_for(scheduler, 1)
    assert set(run_step(scheduler)[0]) == {"short"}
    state = scheduler._tailcast_order.states["long"]
    assert (state.num_preemptions, state.num_output_tokens) == (1, 1)
    assert state.prediction is known is not None
    assert drain(scheduler) == ["short", "long"]


def test_a_policy_that_does_not_preempt_leaves_them_where_they_are(make: Make) -> None:
    scheduler = make("ssjf", max_num_seqs=1)
    scheduler.add_request(FakeRequest("long", 30))
    wait_for(scheduler, 1)
    run_step(scheduler)
    scheduler.add_request(FakeRequest("short", 2))
    wait_for(scheduler, 1)
    assert set(run_step(scheduler)[0]) == {"long"}


def test_one_that_cannot_run_yet_takes_nobodys_place(make: Make) -> None:
    scheduler = make("srpt", max_num_seqs=1)
    scheduler.add_request(FakeRequest("long", 30))
    wait_for(scheduler, 1)
    run_step(scheduler)
    scheduler.add_request(FakeRequest("short", 2, status="blocked"))
    wait_for(scheduler, 1)
    assert set(run_step(scheduler)[0]) == {"long"}
    scheduler.requests["short"].status = "waiting"
    assert set(run_step(scheduler)[0]) == {"short"}


def test_while_the_engine_is_paused_nobody_loses_a_place(make: Make) -> None:
    scheduler = make("srpt", max_num_seqs=1)
    scheduler.add_request(FakeRequest("long", 30))
    wait_for(scheduler, 1)
    run_step(scheduler)
    scheduler.add_request(FakeRequest("short", 2))
    wait_for(scheduler, 1)
    scheduler.pause_state = SimpleNamespace(name="PAUSED_NEW")
    assert set(run_step(scheduler)[0]) == {"long"}


def test_the_last_running_one_is_the_policys_victim(make: Make) -> None:
    """vLLM takes the last where memory runs out."""
    scheduler = make("srpt", max_num_seqs=3)
    for number, length in enumerate((30, 10, 20)):
        scheduler.add_request(FakeRequest(f"r{number}", length))
    wait_for(scheduler, 3)
    run_step(scheduler)
    run_step(scheduler)
    assert [request.request_id for request in scheduler.running] == ["r1", "r2", "r0"]


def test_abort_in_any_state(make: Make) -> None:
    scheduler = make("srpt", max_num_seqs=1)
    scheduler.add_request(FakeRequest("preempted", 30))
    wait_for(scheduler, 1)
    run_step(scheduler)
    scheduler.add_request(FakeRequest("running", 5))
    wait_for(scheduler, 1)
    run_step(scheduler)
    scheduler.add_request(FakeRequest("waiting", 20))
    scheduler.add_request(FakeRequest("unpredicted", 20))
    assert scheduler.requests["preempted"].status == "preempted"
    for name in ("preempted", "running", "waiting", "unpredicted"):
        scheduler.finish_requests(name)
    assert not scheduler.waiting
    assert not scheduler._tailcast_order.states
    scheduler.add_request(FakeRequest("later", 2))
    assert drain(scheduler) == ["later"]


def test_what_clients_say_reaches_the_policy_and_mistakes_are_left_out(make: Make) -> None:
    scheduler = make("priority", None, max_num_seqs=1, policy="priority")
    assert scheduler.policy.value == "fcfs", "victims are not vLLM's to choose by priority"
    hints = {
        "tailcast_tier": 0,
        "tailcast_tenant": "a",
        "tailcast_ttft_slo_s": -1.0,
        "tailcast_tbt_slo_s": "x",
    }
    scheduler.add_request(FakeRequest("r0", 2, priority=5, extra_args=hints))
    scheduler.add_request(FakeRequest("r1", 2, priority=-5, extra_args={"other": 1}))
    request = scheduler._tailcast_order.states["r0"].request
    assert (request.tier, request.tenant, request.ttft_slo_s, request.tbt_slo_s) == (0, "a", None, None)
    assert drain(scheduler) == ["r1", "r0"]


def test_every_policy_that_only_orders_runs_dry(make: Make) -> None:
    from scheduler_core.adapters.settings import engine_policies

    for policy in engine_policies():
        scheduler = make(policy, max_num_seqs=2)
        for number in range(9):
            scheduler.add_request(FakeRequest(f"r{number}", 1 + number * 5 % 7))
            run_step(scheduler)
        drain(scheduler)
        assert not scheduler.waiting, policy
        assert not scheduler._tailcast_order.states, policy


def test_add_request_returns_while_text_is_being_made(make: Make) -> None:
    """The tokenizer works in the predictor's thread."""
    may_go = threading.Event()

    class Slow:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            assert may_go.wait(60)
            return f"w{ids[0]}"

    scheduler = make("ssjf", max_num_seqs=1, tokenizer=Slow())
    scheduler.add_request(FakeRequest("r0", 9))
    scheduler.add_request(FakeRequest("r1", 3))
    run_step(scheduler)
    may_go.set()
    wait_for(scheduler, 2)
    assert drain(scheduler) == ["r0", "r1"]


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.scheduler_class.cache_clear()
    for name, module in modules("0.99.1").items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(InputError, match=r"version of vLLM: got '0\.99\.1'; allowed: 0\.32\.x"):
        _ = adapter.TailcastScheduler
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"tailcast\[vllm\]"):
        _ = adapter.TailcastScheduler
    with pytest.raises(AttributeError, match="Other"):
        _ = adapter.Other


@pytest.mark.parametrize(
    ("text", "field", "allowed"),
    [
        ("policy: tyre", "policy", "tie"),
        ("policy: s3", "policy", "reserves memory"),
        ("policy: slai", "policy", "forms batches"),
        ("policy: tie\npolicy_parameters: {gama: 1}", "parameter of policy tie", "gamma"),
        ("policy: tie\npolicy_parameters: {gamma: 2}", "gamma", "(0, 1]"),
        ("policy: tie\npolicy_parameters: {gamma: much}", "policy_parameters.gamma", "numbers"),
        ("policy: tie\npredictor: localhost:1", "predictor", "SCHEME://ADDRESS"),
        ("policy: tie\ntimeout_s: 0", "timeout_s", "seconds > 0"),
        ("policy: tie\nmax_batch: 1.5", "max_batch", "integers > 0"),
        ("policy: tie\nprompt: some", "prompt", "user, whole"),
        ("policy: tie\npolice: 1", "setting", "policy_parameters"),
        ("{}", "policy", "tie"),
        ("- tie", "TAILCAST_CONFIG", "policy: tie"),
        ("policy: [", "TAILCAST_CONFIG", "readable YAML"),
    ],
)
def test_a_bad_configuration_does_not_start(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, field: str, allowed: str
) -> None:
    path = tmp_path / "tailcast.yaml"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("TAILCAST_CONFIG", str(path))
    with pytest.raises(InputError) as caught:
        adapter.TailcastScheduler(vllm_config=vllm_config(None))
    assert field in caught.value.field
    assert allowed in caught.value.allowed


def test_where_settings_come_from(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tailcast.yaml"
    path.write_text("policy: las\n", encoding="utf-8")
    with pytest.raises(InputError, match="TAILCAST_CONFIG: got None"):
        adapter.TailcastScheduler(vllm_config=vllm_config(None))
    scheduler = adapter.TailcastScheduler(vllm_config=vllm_config(str(path)))
    assert scheduler._tailcast_settings.policy == "las"
    monkeypatch.setenv("TAILCAST_CONFIG", str(path))
    with pytest.raises(InputError, match="either"):
        adapter.TailcastScheduler(vllm_config=vllm_config({"policy": "tie"}))
    monkeypatch.setenv("TAILCAST_CONFIG", str(tmp_path / "missing.yaml"))
    with pytest.raises(InputError, match="missing.yaml"):
        adapter.TailcastScheduler(vllm_config=vllm_config(None))
