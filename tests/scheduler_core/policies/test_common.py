"""What holds for every policy, or for all that promise it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from scheduler_core.policies import POLICIES
from scheduler_core.policies.base import Policy
from scheduler_core.request import Request
from tests.scheduler_core.policies.streams import Item, Run, full_prediction, random_items, run_stream, start

ALL = pytest.mark.parametrize("name", POLICIES)


@ALL
def test_serves_everybody_and_wastes_no_seat(name: str) -> None:
    """With memory in abundance nobody waits while a seat and tokens of the step are left."""
    run = start(name, num_kv_blocks=4000)
    arriving = random_items(40, seed=3)
    while arriving or run.core.num_waiting + run.core.num_running:
        while arriving and arriving[0].request.arrival_s <= run.now:
            run.add(arriving.pop(0))
        before = len(run.plans)
        present = run.core.num_waiting + run.core.num_running
        busy = run.step()
        assert busy == (present > 0), "idle although there is work"
        if busy:
            prefills, decodes, _, _ = run.plans[before]
            tokens = sum(chunk.num_tokens for chunk in prefills) + len(decodes)
            batch = len({chunk.request_id for chunk in prefills} | set(decodes))
            assert batch == min(present, 3) or tokens == 64, "a seat and tokens are left, and somebody waits"
    assert set(run.finished_s) == set(run.items)
    assert all(run.served[key] == item.output_tokens for key, item in run.items.items())


@ALL
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_nobody_is_lost_when_memory_is_short_and_users_give_up(name: str, preemption: str) -> None:
    """Aborts hit requests in every state; validate() runs after every call; the policy keeps nothing of the gone."""
    limits = {"num_kv_blocks": 12, "preemption": preemption, "late_steps": 3}
    if preemption == "swap":
        limits["num_swap_blocks"] = 20
    for seed in (11, 12):
        run = run_stream(name, seed, abort_share=0.3, **limits)
        assert run.aborted
        assert set(run.finished_s) | run.aborted == set(run.items)
        assert not set(run.finished_s) & run.aborted
        assert kept(run.core.policy) == []


def kept(policy: Policy) -> list[str]:
    """Private fields in which a policy still keeps something under the id of a request."""
    found = []
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if (
            not field.init
            and isinstance(value, (dict, set))
            and any(str(key).startswith("r") for key in value)
        ):
            found.append(field.name)
    return found


def stream_of_short_ones(name: str, parameters: dict[str, float], steps: int) -> Run:
    """One seat that short requests alone keep busy (three steps of work every three steps); a long one is among them.

    Short: 4 prompt and 3 output tokens, predicted well; long: 40 and 50, arrives in the 10th step.
    """
    run = start(name, parameters, max_num_seqs=1, num_kv_blocks=4000)
    for step in range(steps):
        if step % 3 == 0 or step < 5:
            run.add(short(f"s{step}", run.now))
        if step == 10:
            request = Request(
                request_id="long",
                arrival_s=run.now,
                prompt_tokens=40,
                max_tokens=60,
                tenant="b",
                ttlt_slo_s=20.0,
            )
            run.add(Item(request, full_prediction(50.0, 0.1), 50))
        run.step()
    return run


def short(name: str, now: float) -> Item:
    request = Request(
        request_id=name, arrival_s=now, prompt_tokens=4, max_tokens=60, tenant="a", ttlt_slo_s=1.0
    )
    return Item(request, full_prediction(3.0, 0.1), 3)


#: Policies that say nobody starves, with parameters that make the wait short enough for a test.
FAIR: dict[str, dict[str, float]] = {
    "fcfs": {},
    "ltr": {},
    "tie": {"tau_s": 1.0},
    "hrrn": {"token_s": 0.05},
    "edf": {},
    "mlfq": {},
    "distboost": {"gamma_per_s": 1.0},
    "uniboost": {"bin_tokens": 1, "gamma_per_s": 1.0, "gamma_min_per_s": 0.5},
    "predicted_boost": {"gamma_per_s": 1.0, "adapt_gamma": False},
    "tail_guard": {},
    "vtc": {},
}


@pytest.mark.parametrize("name", FAIR)
def test_nobody_starves_where_that_is_promised(name: str) -> None:
    run = stream_of_short_ones(name, FAIR[name], steps=800)
    assert run.served.get("long", 0) > 0


@pytest.mark.parametrize("name", ["spf", "ssjf", "sept", "srpt", "trail", "elis", "s3", "semantic"])
def test_the_long_one_does_starve_under_the_others(name: str) -> None:
    """So that the test above can fail."""
    run = stream_of_short_ones(name, {}, steps=800)
    assert run.served.get("long", 0) == 0


@ALL
def test_keys_are_finite_before_and_after_every_prediction(name: str) -> None:
    run = start(name, max_num_seqs=1)
    policy = run.core.policy
    items = random_items(3, seed=2)
    for item in items:
        run.add(item, predict=False)
    for step in range(12):
        run.step()
        for item in items:
            request_id = item.request.request_id
            if request_id not in run.core:
                continue
            if step == 4:
                run.core.update(request_id, item.prediction, run.now)
            assert math.isfinite(policy.key(run.core.state(request_id), run.now))
            assert policy.eviction_key(run.core.state(request_id), run.now) < math.inf
    assert policy.inputs <= {"length", "urgency", "bucket", "rank", "priority", "tier", "tenant", "slo"}
