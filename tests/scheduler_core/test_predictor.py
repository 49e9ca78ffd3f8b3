"""Predictors by URL, and the collector: every request has one event, whatever its prediction does, and none waits."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction import predictor as predictors
from scheduler_core.prediction.predictions import LengthPrediction, Prediction, UrgencyPrediction
from scheduler_core.prediction.predictor import AsyncPredictor, PredictionRequest, Predictor, open_predictor
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.trace_predictions import Predictions
from tests.scheduler_core.helpers import random_trace, settle, simulate

PREDICTION = Prediction(length=LengthPrediction(4.0, 0.5, 3.5, "artifact", "1"))


class Scripted(Predictor):
    """Responds as the prompts say, once the gate is open; a prompt other than "good" fails the whole call."""

    def __init__(self, prediction: Prediction = PREDICTION, *, gate_is_open: bool = True) -> None:
        self.prediction = prediction
        self.gate = asyncio.Event()
        if gate_is_open:
            self.gate.set()
        self.sizes: list[int] = []
        self.in_flight = self.max_in_flight = 0
        self.closed = False

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[Prediction]:
        self.sizes.append(len(requests))
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await self.gate.wait()
        finally:
            self.in_flight -= 1
        prompts = {item.prompt for item in requests}
        if "refused" in prompts:
            raise TailcastError("queue is full")
        if "broken" in prompts:
            raise ZeroDivisionError("oops")
        return [self.prediction] * (len(requests) + ("miscounted" in prompts))

    async def close(self) -> None:
        self.closed = True


class Addressed(Scripted):
    """Target of an entry point."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address


def submit(collector: AsyncPredictor, *names: str, prompt: str = "good") -> None:
    for name in names:
        collector.submit(PredictionRequest(name, prompt, 100))


def test_a_scheme_selects_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("fake", f"{__name__}:Addressed", "tailcast.predictors")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    predictor = open_predictor("fake://somewhere:1")
    assert isinstance(predictor, Addressed)
    assert predictor.address == "somewhere:1"


@pytest.mark.parametrize("spelling", ["", "no/such/folder", "nosuch://host:1", "grpc://"])
def test_an_unknown_predictor_is_refused_with_what_is_allowed(spelling: str) -> None:
    with pytest.raises(InputError, match="pretrained, tiny, an artifact folder, or grpc://HOST:PORT"):
        open_predictor(spelling)


class OfUrgency(Addressed):
    """A predictor of urgency; its own length must not replace that of the first predictor."""

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> Sequence[Prediction]:
        if requests[0].prompt == "unclear":
            raise TailcastError("no urgency")
        urgency = UrgencyPrediction((0.8, 0.2))
        return [Prediction(urgency=urgency, length=LengthPrediction(9.0, 1.0, 3.5), prompt_tokens=7)] * len(
            requests
        )


async def test_joined_predictors_give_the_heads_of_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    points = [
        metadata.EntryPoint(name, f"{__name__}:{kind}", "tailcast.predictors")
        for name, kind in (("fake", "Addressed"), ("level", "OfUrgency"))
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    joint = open_predictor("fake://a:1+level://b:2")
    [prediction] = await joint.predict([PredictionRequest("a", "good", 100)])
    assert prediction.length == PREDICTION.length
    assert prediction.urgency == UrgencyPrediction((0.8, 0.2))
    assert prediction.prompt_tokens is None
    [prediction] = await joint.predict([PredictionRequest("b", "unclear", 100)])
    assert (prediction.length, prediction.urgency) == (PREDICTION.length, None)
    assert [part.part for part in prediction.missing] == ["level://b:2"]
    await joint.close()
    assert all(part.closed for part in joint.predictors)  # type: ignore[attr-defined]
    folder = tmp_path / "tiny+urgency"
    folder.mkdir()
    assert predictors.addresses(str(folder)) == [str(folder)]
    assert predictors.PredictorAddress.of(f"tiny+{folder.parent}").scheme == "joint"


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refused", "queue is full"),
        ("broken", "ZeroDivisionError: oops"),
        ("miscounted", r"2 predictions for 1 request(s)"),
    ],
)
async def test_one_bad_request_affects_no_other(prompt: str, error: str, max_batch: int) -> None:
    predictor = Scripted()
    collector = AsyncPredictor(predictor, max_batch=max_batch)
    submit(collector, "a")
    submit(collector, "b", prompt=prompt)
    submit(collector, "c")
    assert collector.num_open == 3
    assert collector.ready_events() == [], "submitting does not wait"
    await settle()
    events = {event.request_id: event for event in collector.ready_events()}
    assert events["a"].prediction == events["c"].prediction == PREDICTION
    assert events["a"].error is None
    assert (events["b"].prediction, events["b"].error) == (None, error)
    assert events["b"].status is predictors.PredictionStatus.FAILED
    assert predictor.sizes == [3, 1, 1, 1] if max_batch == 4 else [1, 1, 1]
    await collector.close()
    assert predictor.closed


async def test_after_a_timeout_nothing_is_sent_again() -> None:
    predictor = Scripted(gate_is_open=False)
    collector = AsyncPredictor(predictor, max_batch=3, timeout_s=1e-3)
    submit(collector, *"abc")
    events = [await collector.next_event() for _ in "abc"]
    assert {event.error for event in events} == {"no prediction within 0.001 s"}
    assert ({event.prediction for event in events}, predictor.sizes) == ({None}, [3])


async def test_a_withdrawn_request_comes_back_late_and_an_unsent_one_is_never_sent() -> None:
    predictor = Scripted(gate_is_open=False)
    collector = AsyncPredictor(predictor, max_in_flight=1)
    submit(collector, "sent", "unsent")
    await settle()
    assert collector.withdraw("sent")
    assert not collector.withdraw("sent"), "once"
    assert collector.withdraw("unsent")
    assert not collector.withdraw("unknown")
    predictor.gate.set()
    await settle()
    events = {event.request_id: event for event in collector.ready_events()}
    assert events["sent"].status is predictors.PredictionStatus.LATE
    assert events["sent"].prediction == PREDICTION, "it may still be of use, as to check calibration"
    assert (events["unsent"].error, predictor.sizes) == ("withdrawn before it was sent", [1])
    assert collector.num_open == 0


async def test_closing_cancels_calls_and_loses_no_request() -> None:
    predictor = Scripted(gate_is_open=False)
    collector = AsyncPredictor(predictor, max_in_flight=2)
    submit(collector, *"abc")
    await settle()
    assert predictor.in_flight == 2
    submit(collector, "just submitted")
    await collector.close()
    assert predictor.in_flight == 0
    events = {event.request_id: event.error for event in collector.ready_events()}
    assert events == dict.fromkeys(["a", "b", "c", "just submitted"], "closed")
    with pytest.raises(TailcastError, match="closed"):
        submit(collector, "d")


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.sampled_from(["good", "refused", "miscounted"]), max_size=12),
    max_batch=st.integers(1, 5), max_in_flight=st.integers(1, 3), withdrawn=st.sets(st.integers(0, 11)),
    turns=st.integers(0, 6),
)  # fmt: skip
def test_every_request_has_exactly_one_event(
    prompts: list[str], max_batch: int, max_in_flight: int, withdrawn: set[int], turns: int
) -> None:
    async def run() -> list[predictors.PredictionEvent]:
        collector = AsyncPredictor(Scripted(), max_batch=max_batch, max_in_flight=max_in_flight)
        for number, prompt in enumerate(prompts):
            submit(collector, str(number), prompt=prompt)
        for number in withdrawn:
            collector.withdraw(str(number))
        for _ in range(turns):
            await asyncio.sleep(0)
        await collector.close()
        return collector.ready_events()

    events = asyncio.run(run())
    assert Counter(event.request_id for event in events) == Counter(map(str, range(len(prompts))))
    for event in events:
        assert (event.prediction is None) == (event.error is not None)
        assert event.prediction is None or prompts[int(event.request_id)] == "good"


def records_of(policy: str, *, failed: bool) -> list[RequestRecord]:
    """A trace at twice what the engine can serve, where every prediction fails or none is requested."""
    trace = random_trace(60, rate_rps=40.0)
    predictions = dict.fromkeys((row.request_id for row in trace.requests), None) if failed else {}
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256)
    return simulate(trace, policy, predictions=Predictions("dead", predictions), scheduler=limits).records


@pytest.mark.parametrize("policy", ["tie", "sept", "ssjf"])
@pytest.mark.parametrize("failed", [True, False], ids=["failed", "absent"])
def test_a_policy_whose_predictor_never_answers_is_first_come_first_served(policy: str, failed: bool) -> None:
    """All max_tokens are equal, so every unknown length has the same key and arrival decides: not one step differs."""
    assert records_of(policy, failed=failed) == records_of("fcfs", failed=False)
