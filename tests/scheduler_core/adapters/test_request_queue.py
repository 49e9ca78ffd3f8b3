"""The queue behind vLLM's interface: policy's order, whatever vLLM calls."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.adapters.live_order import LiveOrder
from scheduler_core.adapters.vllm_requests import PolicyQueue
from scheduler_core.policies import make_policy
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import Phase, Request
from tests.scheduler_core.adapters.stand_in import FakeRequest, RequestQueue


def prediction(tokens: float) -> LengthPrediction:
    return LengthPrediction(math.log(tokens), 0.1, 5.0)


def made(policy: str = "ssjf") -> tuple[LiveOrder, PolicyQueue]:
    order = LiveOrder(make_policy(policy), max_num_seqs=2)
    return order, PolicyQueue(order, lambda: 100.0)


def put(order: LiveOrder, queue: PolicyQueue, name: str, at_s: float = 0.0) -> FakeRequest:
    request = FakeRequest(name, 1)
    order.arrive(Request(request_id=name, arrival_s=at_s, prompt_tokens=4, max_tokens=64), at_s)
    queue.add_request(request)
    return request


def test_it_has_every_method_of_vllms_interface() -> None:
    for name in RequestQueue.__abstractmethods__:
        assert callable(getattr(PolicyQueue, name))


def test_an_empty_queue() -> None:
    _, queue = made()
    assert not queue
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()
    queue.remove_requests([FakeRequest("a", 1)])
    with pytest.raises(ValueError, match="request a"):
        queue.remove_request(FakeRequest("a", 1))


def test_late_predictions_place_requests_anew() -> None:
    order, queue = made()
    long, short, unknown = (put(order, queue, name) for name in ("long", "short", "unknown"))
    assert list(queue) == [long, short, unknown], "nothing is known: by arrival"
    assert order.predict("short", prediction(3), 1.0) is not None
    order.predict("long", prediction(30), 1.0)
    assert [r.request_id for r in queue] == ["short", "long", "unknown"]
    order.predict("unknown", None, 1.0)
    assert order.states["unknown"].prediction_failed
    assert queue.pop_request() is short
    assert queue.peek_request() is long
    assert order.predict("nobody", prediction(3), 1.0) is None


def test_what_vllm_prepends_goes_where_its_key_says_and_keeps_its_score() -> None:
    order, queue = made()
    requests = [put(order, queue, name) for name in "abc"]
    for name, tokens in (("a", 30), ("b", 20), ("c", 10)):
        order.predict(name, prediction(tokens), 0.0)
    out = [queue.pop_request() for _ in range(3)]
    assert out == requests[::-1]
    order.schedule(["c"], 1.0)
    order.preempt("c", 2.0)
    queue.prepend_request(requests[2])
    queue.prepend_requests(requests[:2])
    assert [r.request_id for r in queue] == ["c", "b", "a"]
    assert order.states["c"].prediction == prediction(10)
    assert order.states["c"].num_preemptions == 1


def test_removed_requests_never_come_back() -> None:
    order, queue = made()
    a, b, c = (put(order, queue, name) for name in "abc")
    queue.remove_requests({a, c, FakeRequest("elsewhere", 1)})
    assert (len(queue), list(queue)) == (1, [b])
    assert b in queue
    assert a not in queue
    queue.remove_request(b)
    assert not queue


def test_pressure_and_time_give_new_keys() -> None:
    order, queue = made("tie")
    for number in range(30):
        put(order, queue, f"r{number}")
    assert order.start_step(1.0), "15 times as many wait as run: beta moves"
    assert not order.start_step(1.0)
    order, queue = made("hrrn")
    put(order, queue, "a")
    assert order.start_step(1.0)


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from("apxkrf"), st.integers(1, 50)), max_size=60))
def test_the_first_is_always_the_one_of_the_smallest_key(actions: list[tuple[int, str, int]]) -> None:
    """Against a sorted list: add, pop, take out, prediction, preemption, end."""
    order, queue = made()
    live: dict[str, FakeRequest] = {}
    inside: set[str] = set()
    known: dict[str, int] = {}
    for number, action, tokens in actions:
        name = f"r{number}"
        if action == "a" and name not in live:
            live[name] = put(order, queue, name)
            inside.add(name)
        elif action == "p" and inside:
            first = queue.pop_request().request_id
            expected = min(inside, key=lambda n: (known.get(n, 64), order.states[n].order))
            assert first == expected
            inside.discard(first)
        elif action == "x" and name in inside:
            queue.remove_request(live[name])
            inside.discard(name)
        elif action == "k" and name in live:
            order.predict(name, prediction(tokens), 0.0)
            known[name] = tokens
        elif action == "r" and name in live and name not in inside:
            queue.prepend_request(live[name])
            inside.add(name)
        elif action == "f" and name in live:
            queue.remove_requests([live.pop(name)])
            order.leave(name)
            inside.discard(name)
            known.pop(name, None)
        assert len(queue) == len(inside)
        assert {r.request_id for r in queue} == inside
    order.waiting.validate()


def test_a_request_whose_prompt_was_cached_decodes_after_its_first_token() -> None:
    order, _ = made()
    order.arrive(Request(request_id="a", arrival_s=0.0, prompt_tokens=100, max_tokens=64), 0.0)
    order.schedule(["a"], 1.0)
    order.progress("a", 36, 100, 1, 2.0)
    state = order.states["a"]
    assert (state.phase, state.attained_tokens, state.first_token_s) == (Phase.DECODE, 36, 2.0)
    order.preempt("a", 3.0)
    order.progress("a", 1, 102, 2, 4.0)
    assert (state.num_computed_tokens, state.num_output_tokens) == (0, 1), "output of before the preemption"
