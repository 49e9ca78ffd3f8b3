"""Requests by replica kept from events, choices from them, and that nothing of a request is left once it has ended."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.adapters.litellm import LiveStrategy
from scheduler_core.adapters.live_routing import LiveRouting, RoutedPrompt, RoutingSettings, routed_prompt
from scheduler_core.prediction.api_request import ApiRequest
from scheduler_core.prediction.prompt_text import Message
from scheduler_core.routing import ROUTERS
from tests.scheduler_core.adapters.length_reader import LengthReader, settle

REPLICAS = ("a", "b")


def prompt_of(text: str, **fields: Any) -> RoutedPrompt:
    return RoutedPrompt(ApiRequest(texts=(text,), **fields))


def settings(**values: object) -> RoutingSettings:
    return RoutingSettings.of({"router": "jsq", **values}, "test")


@contextmanager
def predicting(**values: object) -> Iterator[LiveRouting]:
    """With a predictor, until the end of the block."""
    routing = LiveRouting(settings(**values), predictor=LengthReader("answers"))
    try:
        yield routing
    finally:
        routing.close()


def test_requests_go_where_fewer_are_and_ends_are_seen() -> None:
    routing = LiveRouting(settings())
    assert [routing.send(name, RoutedPrompt(), REPLICAS) for name in "123"] == ["a", "b", "a"]
    routing.finish("1")
    routing.abort("3")
    assert routing.num_requests == {"b": 1}
    routing.move("2", "a")
    assert routing.num_requests == {"a": 1}
    routing.gone("a")
    assert routing.num_requests == {}
    routing.finish("2")  # late


def test_requests_of_other_routers_count() -> None:
    assert LiveRouting(settings()).send("1", RoutedPrompt(), REPLICAS, {"a": 1}) == "b"


def test_predictions_count_for_the_choices_after_they_have_come() -> None:
    """One slot each: after the prediction of the output on a, 3 tokens, that slot is free sooner than b's, of 1,000."""
    with predicting(router="predicted_wait", max_num_seqs=1) as routing:
        routing.send("1", prompt_of("w3"), REPLICAS)
        routing.send("2", prompt_of("w1000"), REPLICAS)
        settle(routing._thread)
        assert routing.send("3", RoutedPrompt(), ("b", "a")) == "a"


def test_finished_requests_count_with_their_predictions() -> None:
    """Also where no choice was between the prediction and the end: 3 tokens, and another router's request is short."""
    with predicting(router="predicted_work", default_max_tokens=96) as routing:
        routing.send("1", prompt_of("w3"), REPLICAS)
        settle(routing._thread)
        routing.finish("1")
        routing.send("2", RoutedPrompt(ApiRequest(max_tokens=40)), "b")
        assert routing.send("3", RoutedPrompt(), REPLICAS, {"a": 1}) == "a"


def test_a_request_without_events_expires() -> None:
    now = [0.0]
    routing = LiveRouting(settings(expire_s=10.0), clock=lambda: now[0])
    routing.send("silent", RoutedPrompt(), REPLICAS)
    routing.send("moved", RoutedPrompt(), REPLICAS)
    now[0] = 8.0
    routing.move("moved", "a")
    now[0] = 12.0
    assert routing.num_requests == {"a": 1}
    assert "silent" not in routing
    routing.drop("moved")
    assert routing.num_requests == {}


@pytest.mark.parametrize("router", sorted(set(ROUTERS) - {"disaggregated"}))
@given(actions=st.lists(st.tuples(st.sampled_from("sfadmg"), st.integers(0, 5)), max_size=40))
def test_no_state_is_left_of_ended_requests(router: str, actions: list[tuple[str, int]]) -> None:
    """Whatever the order of events, in the bookkeeping and in the router."""
    routing = LiveRouting(settings(router=router, max_num_seqs=2, num_kv_blocks=8))
    live: dict[str, str] = {}
    for action, number in actions:
        name = str(number)
        if action == "s":
            live[name] = routing.send(name, prompt_of("x" * 100 * number, max_tokens=9), REPLICAS)
        elif action == "m" and name in live:
            live[name] = REPLICAS[number % 2]
            routing.move(name, live[name])
        elif action == "g":
            gone = REPLICAS[number % 2]
            routing.gone(gone)
            live = {key: replica for key, replica in live.items() if replica != gone}
        elif action in "fad":
            {"f": routing.finish, "a": routing.abort, "d": routing.drop}[action](name)
            live.pop(name, None)
        expected = {key: [*live.values()].count(key) for key in REPLICAS if key in live.values()}
        assert routing.num_requests == expected
    for name in list(live):
        routing.finish(name)
    for replica_id in REPLICAS:
        routing.gone(replica_id)
    assert (routing.num_requests, routing.replica_ids) == ({}, [])
    for state in ("_left", "_stats", "_sent"):
        assert not getattr(routing._router, state, None)


def test_several_outputs_count_with_their_total() -> None:
    """A request for four outputs of three tokens is four times the work, and one that ignores EOS has its limit."""
    with predicting(router="predicted_work", default_max_tokens=96) as routing:
        routing.send("1", prompt_of("w3", num_outputs=4), REPLICAS)
        routing.send("2", prompt_of("w3", max_tokens=20, ignores_eos=True), REPLICAS)
        settle(routing._thread)
        routing.finish("none")
        lengths = [live.state.prediction for live in routing._requests.values()]
    assert [round(math.exp(length.mu)) for length in lengths if length is not None] == [12, 20]


def test_prompts_are_read_from_mappings_and_objects() -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    messages = [{"role": "system", "content": "Be brief."}, user, {"role": "assistant", "content": None}]
    turns = (Message("system", "Be brief."), Message("user", "Hello"), Message("assistant", ""))
    expected = RoutedPrompt(ApiRequest(messages=turns, max_tokens=7, temperature=0.0), tier=0)
    body = {"messages": messages, "max_tokens": 9, "max_completion_tokens": 7, "temperature": 0}
    assert routed_prompt(body, {"tailcast_tier": 0}) == expected
    assert routed_prompt(SimpleNamespace(**body), {"tailcast_tier": 0}) == expected
    assert routed_prompt({"prompt": "Once", "max_tokens": True}, {"tailcast_tier": -1}) == prompt_of("Once")
    assert routed_prompt({"prompt": [1, 2], "messages": None}).request.prompt_tokens() == 2


class OneRouter:
    """LiteLLM's router with three healthy deployments."""

    async def select(self, model: str, options: Any, **more: Any) -> list[dict[str, Any]]:
        return [{"model_info": {"id": name}} for name in "abc"]

    def registry(self) -> Any:
        return SimpleNamespace(has_deployment=lambda replica_id: True)


# LiteLLM's strategy trusted `tailcast_tried` of a client's metadata: it ended requests of others and chose deployments.
@pytest.mark.mend
@pytest.mark.parametrize("field", ["metadata", "litellm_metadata"])
async def test_attempts_in_a_clients_metadata_are_ignored(field: str) -> None:
    strategy = LiveStrategy(OneRouter(), RoutingSettings())  # type: ignore[arg-type]

    async def chosen(options: dict[str, Any]) -> str:
        deployment = await strategy.async_get_available_deployment("m", request_kwargs=options)
        return str(deployment["model_info"]["id"])

    victim: dict[str, Any] = {field: {}}
    first = await chosen(victim)
    [(name, _)] = victim[field]["tailcast_tried"]
    for tried in (
        [[name, "b"]],
        [(name, "b")],
        ((name, "b"), (name, "c")),
        5,
        "abc",
        [1],
        None,
        [[]],
        {name: "b"},
    ):
        forged = {"tailcast_tried": tried, "tailcast_attempt": name, "attempted_retries": 1}
        await strategy.async_log_failure_event({"litellm_params": {field: dict(forged)}}, None, None, None)
        await strategy.async_log_success_event({"litellm_params": {field: dict(forged)}}, None, None, None)
        options = {field: dict(forged)}
        await chosen(options)
        await strategy.async_log_failure_event({"litellm_params": options}, None, None, None)
        assert strategy.routing.num_requests == {first: 1}
    for malformed in ("text", 5, ["x"]):
        options = {field: malformed}  # type: ignore[dict-item]
        await chosen(options)
        await strategy.async_log_failure_event({"litellm_params": options}, None, None, None)
    assert strategy.routing.num_requests == {first: 1}
    victim[field]["attempted_retries"] = 1  # a retry of its own goes elsewhere
    assert await chosen(victim) != first
    await strategy.async_log_success_event({"litellm_params": victim}, None, None, None)
    assert strategy.routing.num_requests == {}
