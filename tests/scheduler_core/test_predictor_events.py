"""What becomes of a request whose prediction is pending, late, failed or absent: one event each, and nobody waits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.plan import StepResult
from scheduler_core.predictions import LengthPrediction, Prediction, UrgencyPrediction
from scheduler_core.predictor import (
    AsyncPredictor,
    PredictionEvent,
    PredictionRequest,
    PredictionStatus,
    deliver,
)
from scheduler_core.simulator import LinearStepTime, Predictions, RequestRecord
from scheduler_core.simulator.loop import Simulation
from tests.scheduler_core.helpers import random_trace, request, scheduler
from tests.scheduler_core.test_predictor import ANSWER, ask, settled


class Batched:
    """Answers what it can; a prompt "bad" spoils the whole call. Keeps the sizes of its calls."""

    def __init__(self, answer: LengthPrediction | Prediction = ANSWER) -> None:
        self.answer = answer
        self.sizes: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def predict(self, requests: Sequence[PredictionRequest]) -> Sequence[LengthPrediction | Prediction]:
        self.sizes.append(len(requests))
        await self.gate.wait()
        if any(item.prompt == "bad" for item in requests):
            raise TailcastError("a bad prompt")
        if any(item.prompt == "miscounted" for item in requests):
            return [self.answer] * (len(requests) + 1)
        return [self.answer] * len(requests)

    async def close(self) -> None:
        """Nothing to give up."""


async def test_requests_submitted_together_go_together_and_later_ones_do_not_wait_for_company() -> None:
    source = Batched()
    collector = AsyncPredictor(source, max_batch=4)
    for number in range(10):
        collector.submit(ask(str(number), "good"))
    await settled()
    assert source.sizes == [4, 4, 2]
    collector.submit(ask("late", "good"))
    await settled()
    assert source.sizes == [4, 4, 2, 1]
    assert [event.request_id for event in collector.ready_events()] == [*map(str, range(10)), "late"]


async def test_what_waits_for_a_free_call_is_batched() -> None:
    source = Batched()
    source.gate.clear()
    collector = AsyncPredictor(source, max_batch=8, max_in_flight=1)
    for number in range(7):
        collector.submit(ask(str(number), "good"))
        await settled()
    source.gate.set()
    await settled()
    assert source.sizes == [1, 6]


@pytest.mark.parametrize(
    ("prompt", "error"), [("bad", "a bad prompt"), ("miscounted", "2 answers to one request")]
)
async def test_one_bad_request_spoils_no_others_prediction(prompt: str, error: str) -> None:
    source = Batched()
    collector = AsyncPredictor(source, max_batch=3)
    for name, text in (("a", "good"), ("b", prompt), ("c", "good")):
        collector.submit(ask(name, text))
    await settled()
    events = {event.request_id: event for event in collector.ready_events()}
    assert events["a"].prediction == events["c"].prediction == ANSWER
    assert (events["b"].prediction, events["b"].error) == (None, error)
    assert events["b"].status is PredictionStatus.FAILED
    assert source.sizes == [3, 1, 1, 1]


async def test_after_a_timeout_nobody_is_asked_about_again() -> None:
    source = Batched()
    source.gate.clear()
    collector = AsyncPredictor(source, max_batch=3, timeout_s=1e-3)
    for name in "abc":
        collector.submit(ask(name, "good"))
    events = [await collector.next_event() for _ in "abc"]
    assert {event.error for event in events} == {"no answer within 0.001 s"}
    assert source.sizes == [3]


async def test_without_a_predictor_every_request_fails_at_once_and_without_a_call() -> None:
    collector = AsyncPredictor(None)
    collector.submit(ask("a", "good"))
    [event] = collector.ready_events()
    assert event == PredictionEvent("a", None, "there is no predictor", 0.0, PredictionStatus.ABSENT)
    await collector.close()


async def test_an_answer_for_a_withdrawn_request_is_late_and_an_unsent_one_is_never_sent() -> None:
    source = Batched()
    source.gate.clear()
    collector = AsyncPredictor(source, max_in_flight=1)
    collector.submit(ask("sent", "good"))
    collector.submit(ask("unsent", "good"))
    await settled()
    assert collector.withdraw("sent")
    assert not collector.withdraw("sent"), "once"
    assert collector.withdraw("unsent")
    assert not collector.withdraw("never seen")
    source.gate.set()
    await settled()
    events = {event.request_id: event for event in collector.ready_events()}
    assert events["sent"].status is PredictionStatus.LATE
    assert events["sent"].prediction == ANSWER, "it may still be of use, for instance to check calibration"
    assert events["unsent"].error == "withdrawn before it was sent"
    assert source.sizes == [1]
    assert collector.num_open == 0


async def test_closing_loses_nobody() -> None:
    source = Batched()
    source.gate.clear()
    collector = AsyncPredictor(source, max_in_flight=2)
    for name in "abc":
        collector.submit(ask(name, "good"))
    await settled()
    collector.submit(ask("just submitted", "good"))
    await collector.close()
    events = collector.ready_events()
    assert {event.request_id: event.error for event in events} == dict.fromkeys(
        ["a", "b", "c", "just submitted"], "closed"
    )
    with pytest.raises(TailcastError, match="closed"):
        collector.submit(ask("d", "good"))


async def test_an_id_is_open_once() -> None:
    collector = AsyncPredictor(Batched())
    collector.submit(ask("a", "good"))
    with pytest.raises(InputError, match="request_id"):
        collector.submit(ask("a", "good"))
    await collector.next_event()
    collector.submit(ask("a", "good"))
    await collector.close()


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.sampled_from(["good", "bad", "miscounted"]), max_size=12),
    max_batch=st.integers(1, 5),
    max_in_flight=st.integers(1, 3),
    withdrawn=st.sets(st.integers(0, 11)),
    turns=st.integers(0, 6),
)
def test_every_request_has_exactly_one_event(
    prompts: list[str], max_batch: int, max_in_flight: int, withdrawn: set[int], turns: int
) -> None:
    async def run() -> list[PredictionEvent]:
        collector = AsyncPredictor(Batched(), max_batch=max_batch, max_in_flight=max_in_flight)
        for number, prompt in enumerate(prompts):
            collector.submit(ask(str(number), prompt))
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


async def test_events_reach_the_scheduler_and_late_ones_harm_nobody() -> None:
    bundle = Prediction(length=ANSWER, urgency=UrgencyPrediction((0.9, 0.1, 0.0, 0.0, 0.0)))
    collector = AsyncPredictor(Batched(bundle), max_batch=4)
    core = scheduler("tie")
    for name in ("here", "gone"):
        core.add(request(name), 0.0)
        collector.submit(ask(name, "good"))
    core.abort("gone", 0.5)
    await settled()
    assert deliver(collector.ready_events(), core, 1.0) == 2
    assert core.state("here").prediction == ANSWER
    assert core.state("here").urgency == bundle.urgency
    assert (core.counters.num_predictions, core.counters.num_late_predictions) == (1, 1)
    core.validate()


async def test_while_predictions_are_pending_the_scheduler_goes_on() -> None:
    source = Batched()
    source.gate.clear()
    collector = AsyncPredictor(source)
    core = scheduler("tie")
    core.add(request("a"), 0.0)
    collector.submit(ask("a", "good"))
    await settled()
    assert deliver(collector.ready_events(), core, 0.0) == 0
    plan = core.schedule(0.0)
    assert plan is not None
    assert plan.admitted == ("a",)
    core.complete(StepResult(plan.step, ("a",)), 0.1)
    source.gate.set()
    deliver([await collector.next_event()], core, 0.2)
    assert core.counters.num_late_predictions == 1


def simulated(policy: str, *, answered: bool) -> list[RequestRecord]:
    """What becomes of a trace at twice what the engine can serve, when every prediction fails or none is asked for."""
    trace = random_trace(60, rate_rps=40.0)
    answers = {row.request_id: None for row in trace.requests} if answered else {}
    core = scheduler(policy, max_num_seqs=4, max_num_batched_tokens=256)
    return Simulation(trace, core, LinearStepTime(), Predictions("dead", answers)).run().records


@pytest.mark.parametrize("policy", ["tie", "sept", "ssjf"])
@pytest.mark.parametrize("answered", [True, False], ids=["failed", "absent"])
def test_a_policy_whose_predictor_never_answers_is_first_come_first_served(
    policy: str, answered: bool
) -> None:
    """All caps are equal, so every unknown length has the same key and arrival decides: not one step differs."""
    assert simulated(policy, answered=answered) == simulated("fcfs", answered=False)
