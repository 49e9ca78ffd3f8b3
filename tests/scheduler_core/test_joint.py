"""A joined predictor: a part that fails or is late costs its own heads only, and is named and logged."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.joint import PAUSE, Parts
from scheduler_core.prediction.predictions import (
    LengthPrediction,
    MissingPart,
    Prediction,
    UrgencyPrediction,
)
from scheduler_core.prediction.predictor import (
    AsyncPredictor,
    JointPredictor,
    PredictionRequest,
    PredictionStatus,
    Predictor,
)

LENGTH = Prediction(length=LengthPrediction(5.0, 1.0, 3.5), prompt_tokens=7)
URGENCY = Prediction(urgency=UrgencyPrediction((0.8, 0.2)))
NAMES = ("length", "urgency")


@dataclass
class Part(Predictor):
    """Answers, fails for prompts in `fails` (None: all) with `error`, or waits for `gate`."""

    prediction: Prediction
    error: Exception | None = None
    fails: frozenset[str] | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    is_open: bool = True
    num_calls: int = 0

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> Sequence[Prediction]:
        self.num_calls += 1
        if not self.is_open:
            await self.gate.wait()
        if self.error and (self.fails is None or self.fails & {each.prompt for each in requests}):
            raise self.error
        return [self.prediction] * len(requests)


def joined(*parts: Part) -> JointPredictor:
    return JointPredictor(parts, NAMES)


def request(prompt: str = "sea") -> PredictionRequest:
    return PredictionRequest(prompt, prompt, 100)


class Unavailable(TailcastError):
    code = "UNAVAILABLE"


REASONS = [
    (Unavailable("predictor a:1: UNAVAILABLE: down"), "predictor a:1: UNAVAILABLE: down"),
    (
        InputError("artifact file model.onnx", "SHA-256 1", "2"),
        "artifact file model.onnx: got 'SHA-256 1'; allowed: 2",
    ),
    (InputError("prompt", "a secret", "others"), "InputError"),
    (ValueError("quotes a secret"), "ValueError"),
]


@pytest.mark.parametrize(("error", "reason"), REASONS)
@pytest.mark.parametrize("failing", [0, 1])
async def test_the_other_part_responds_and_the_failure_is_named_and_logged_once(
    failing: int, error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [Part(LENGTH), Part(URGENCY)]
    parts[failing].error = error
    joint = joined(*parts)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            [prediction] = await joint.predict([request()])
    assert prediction.missing == (MissingPart(NAMES[failing], reason),)
    assert (prediction.length is None, prediction.urgency is None) == (failing == 0, failing == 1)
    [line] = caplog.messages
    assert reason in line
    assert NAMES[failing] in line
    assert "secret" not in line


async def test_if_all_parts_fail_the_error_is_the_first_ones() -> None:
    joint = joined(Part(LENGTH, Unavailable("gone")), Part(URGENCY, ValueError()))
    with pytest.raises(Unavailable, match="gone"):
        await joint.predict([request()])


async def test_a_request_that_one_part_refuses_costs_the_others_nothing() -> None:
    joint = joined(Part(LENGTH), Part(URGENCY, TailcastError("no"), frozenset({"bad"})))
    good, bad, other = await joint.predict([request(), request("bad"), request("essay")])
    assert good == other
    assert (good.urgency, good.missing) == (URGENCY.urgency, ())
    assert bad.length == LENGTH.length
    assert bad.missing == (MissingPart("urgency", "TailcastError"),)


async def test_a_request_that_each_part_refuses_fails_by_itself() -> None:
    error, refused = TailcastError("no"), frozenset({"bad"})
    collector = AsyncPredictor(
        joined(Part(LENGTH, error, refused), Part(URGENCY, error, refused)), max_batch=8
    )
    for each in (request(), request("bad")):
        collector.submit(each)
    events = {event.request_id: event for event in [await collector.next_event() for _ in range(2)]}
    assert events["sea"].status is PredictionStatus.ANSWERED
    assert (events["bad"].status, events["bad"].error) == (PredictionStatus.FAILED, "no")
    await collector.close()


@pytest.mark.parametrize("late", [0, 1])
async def test_a_late_part_is_left_out_at_the_deadline_and_then_paused(
    late: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each request would wait for it until its deadline, as long as it hangs."""
    parts = [Part(LENGTH), Part(URGENCY)]
    parts[late].is_open = False
    joint = joined(*parts)
    now_s = 100.0
    joint._parts = Parts(NAMES, lambda: now_s)
    [prediction] = await joint.predict([request()], timeout_s=0.01)
    assert prediction.missing == (MissingPart(NAMES[late], "late"),)
    assert parts[late].num_calls == 1
    [prediction] = await joint.predict([request()], timeout_s=0.01)
    assert prediction.missing == (MissingPart(NAMES[late], "late"),)
    assert parts[late].num_calls == 1
    assert len(caplog.messages) == 1
    now_s += PAUSE * 0.01
    parts[late].is_open = True
    for _ in range(2):
        [prediction] = await joint.predict([request()], timeout_s=0.01)
        assert prediction.missing == ()
    assert parts[late].num_calls == 3


async def test_after_a_pause_one_request_asks_the_late_part() -> None:
    parts = [Part(LENGTH), Part(URGENCY, is_open=False)]
    joint = joined(*parts)
    now_s = 0.0
    joint._parts = Parts(NAMES, lambda: now_s)
    await joint.predict([request()], timeout_s=0.01)
    now_s += PAUSE * 0.01
    await asyncio.gather(*(joint.predict([request()], timeout_s=0.01) for _ in range(3)))
    assert parts[1].num_calls == 2


async def test_a_paused_part_is_called_if_the_other_fails() -> None:
    parts = [Part(LENGTH, is_open=False), Part(URGENCY)]
    joint = joined(*parts)
    await joint.predict([request()], timeout_s=0.01)
    parts[0].is_open, parts[1].error = True, Unavailable("gone")
    [prediction] = await joint.predict([request()], timeout_s=0.01)
    assert prediction.length == LENGTH.length
    assert prediction.missing == (MissingPart("urgency", "gone"),)


async def test_without_an_response_the_deadline_is_the_callers() -> None:
    parts = [Part(LENGTH, is_open=False), Part(URGENCY, is_open=False)]
    waiting = asyncio.create_task(joined(*parts).predict([request()], timeout_s=0.001))
    done, _ = await asyncio.wait({waiting}, timeout=0.01)
    assert not done
    parts[1].gate.set()
    [prediction] = await waiting
    assert prediction.urgency == URGENCY.urgency
    assert prediction.missing == (MissingPart("length", "late"),)


async def test_without_a_deadline_each_part_is_waited_for() -> None:
    parts = [Part(LENGTH), Part(URGENCY, is_open=False)]
    waiting = asyncio.create_task(joined(*parts).predict([request()]))
    done, _ = await asyncio.wait({waiting}, timeout=0.01)
    assert not done
    parts[1].gate.set()
    assert (await waiting)[0].missing == ()


@pytest.mark.mend
async def test_the_plugin_gets_the_length_within_its_deadline_and_counts_the_part() -> None:
    """The deadline of the scheduler's own call ended the whole prediction."""
    collector = AsyncPredictor(joined(Part(LENGTH), Part(URGENCY, is_open=False)), timeout_s=0.05)
    collector.submit(request())
    event = await collector.next_event()
    assert event.status is PredictionStatus.PARTIAL
    assert event.error == "urgency: late"
    assert event.prediction is not None
    assert event.prediction.length == LENGTH.length
    await collector.close()
