"""Predictors by URL, and the collector that never waits and never loses a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import pytest

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import AsyncPredictor, PredictionRequest, Predictor, open_predictor

ANSWER = LengthPrediction(4.0, 0.5, 3.5, "artifact", "1")


class Scripted:
    """Answers each request as its prompt says, once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.under_way = 0
        self.most_under_way = 0
        self.closed = False

    async def predict(self, requests: Sequence[PredictionRequest]) -> list[LengthPrediction]:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.gate.wait()
        finally:
            self.under_way -= 1
        replies: dict[str, Callable[[], list[LengthPrediction]]] = {
            "good": lambda: [ANSWER for _ in requests],
            "short": lambda: [],
        }
        prompt = requests[0].prompt
        if prompt == "refused":
            raise TailcastError("queue is full")
        if prompt == "broken":
            raise ZeroDivisionError("oops")
        return replies[prompt]()

    async def close(self) -> None:
        self.closed = True


async def settled() -> None:
    """Lets everything run that can run without news from outside."""
    for _ in range(20):
        await asyncio.sleep(0)


def ask(name: str, prompt: str) -> PredictionRequest:
    return PredictionRequest(name, prompt, 100)


async def test_every_request_comes_back_as_one_event_whatever_happens() -> None:
    source = Scripted()
    collector = AsyncPredictor(source)
    prompts = {"a": "good", "b": "refused", "c": "broken", "d": "short"}
    for name, prompt in prompts.items():
        collector.submit(ask(name, prompt))
    assert collector.num_open == 4
    assert collector.ready_events() == [], "submitting does not wait"
    source.gate.set()
    events = {}
    while collector.num_open:
        event = await collector.next_event()
        events[event.request_id] = event
    assert events["a"].prediction == ANSWER
    assert events["a"].error is None
    assert [events[name].prediction for name in "bcd"] == [None, None, None]
    assert events["b"].error == "queue is full"
    assert events["c"].error == "ZeroDivisionError: oops"
    assert events["d"].error == "0 answers to one request"
    await collector.close()
    assert source.closed


async def test_no_more_than_max_in_flight_calls_are_under_way() -> None:
    source = Scripted()
    collector = AsyncPredictor(source, max_in_flight=3)
    for index in range(10):
        collector.submit(ask(str(index), "good"))
    await settled()
    assert source.under_way == 3
    source.gate.set()
    for _ in range(10):
        await collector.next_event()
    assert source.most_under_way == 3


async def test_latency_is_that_of_the_call_alone() -> None:
    times = iter([10.0, 10.5])
    source = Scripted()
    source.gate.set()
    collector = AsyncPredictor(source, clock=lambda: next(times))
    collector.submit(ask("a", "good"))
    assert (await collector.next_event()).latency_s == 0.5


async def test_a_call_without_answer_fails_after_the_timeout() -> None:
    collector = AsyncPredictor(Scripted(), timeout_s=1e-3)
    collector.submit(ask("a", "good"))
    event = await collector.next_event()
    assert event.prediction is None
    assert event.error == "no answer within 0.001 s"


async def test_closing_cancels_calls_under_way() -> None:
    source = Scripted()
    collector = AsyncPredictor(source)
    collector.submit(ask("a", "good"))
    await settled()
    assert source.under_way == 1
    await collector.close()
    assert source.under_way == 0


@pytest.mark.parametrize("values", [{"max_in_flight": 0}, {"timeout_s": 0.0}, {"max_batch": 0}])
async def test_wrong_limits_are_named(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        AsyncPredictor(Scripted(), **values)


def test_a_predictor_is_found_by_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint(
        "fake", "tests.scheduler_core.test_predictor:Addressed", "tailcast.predictors"
    )
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    found = open_predictor("fake://somewhere:1")
    assert isinstance(found, Predictor)
    assert isinstance(found, Addressed)
    assert found.address == "somewhere:1"


class Addressed(Scripted):
    """What an entry point names."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address


@pytest.mark.parametrize("url", ["", "somewhere", "nosuch://host:1", "grpc://"])
def test_an_unknown_url_is_refused_with_what_is_known(url: str) -> None:
    with pytest.raises(InputError, match="grpc://ADDRESS"):
        open_predictor(url)
