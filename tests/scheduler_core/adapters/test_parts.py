"""Parts of the adapter: prompts as text, the predictor's thread, what is counted, the page for users."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from scheduler_core.adapters.engine_metrics import EngineMetrics
from scheduler_core.adapters.live_order import EngineCapacity, LiveOrder
from scheduler_core.adapters.prediction_thread import PredictionThread, PromptDecoder
from scheduler_core.adapters.settings import EngineSettings, engine_policies
from scheduler_core.policies import make_policy
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionEvent, PredictionRequest, PredictionStatus
from scheduler_core.request import Request
from tests.scheduler_core.adapters.length_reader import LengthReader

PAGE = Path(__file__).resolve().parents[3] / "docs" / "vllm.md"


class ChatTokenizer:
    """Ids are characters; special ones stand in <>."""

    def __init__(self, has_template: bool = True) -> None:
        self._has_template = has_template

    def ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text = "".join(map(chr, ids))
        return text.replace("<u>", "").replace("<a>", "") if skip_special_tokens else text

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        if not self._has_template:
            raise ValueError("no template")
        return "<u>" + messages[0]["content"] + "<a>"


def test_a_lone_user_message_is_read_as_it_stands() -> None:
    tokenizer = ChatTokenizer()
    decode = PromptDecoder(tokenizer)
    assert decode(tokenizer.ids("<u>How far is it? <3<a>")) == "How far is it? <3"
    assert decode(tokenizer.ids("<u>one<a>two<u>three<a>")) == "onetwothree", "a conversation is read whole"
    assert decode(tokenizer.ids("plain text")) == "plain text", "a completion"
    assert PromptDecoder(tokenizer, whole=True)(tokenizer.ids("<u>a<a>")) == "a"
    plain = ChatTokenizer(has_template=False)
    assert PromptDecoder(plain)(plain.ids("<u>a<a>")) == "a"


@pytest.fixture
def ask() -> Any:
    """Makes threads, and ends them."""
    made: list[PredictionThread] = []

    def start(mode: str, read: Callable[[Sequence[int]], str] = lambda ids: f"w{ids[0]}") -> PredictionThread:
        made.append(PredictionThread(LengthReader(mode), read, max_batch=4))
        return made[-1]

    yield start
    for thread in made:
        thread.close()


def events(thread: PredictionThread, count: int) -> list[PredictionEvent]:
    found: list[PredictionEvent] = []
    end = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < end
        found += thread.take()
        time.sleep(0.001)
    return found


def test_every_question_comes_back_once(ask: Any) -> None:
    thread = ask("answers")
    for number in range(200):
        thread.submit(PredictionRequest(f"r{number}", "", 64), [1 + number])
    found = events(thread, 200)
    assert sorted(event.request_id for event in found) == sorted(f"r{number}" for number in range(200))
    for event in found:
        assert event.length is not None
        assert event.length.mu == pytest.approx(math.log(1 + int(event.request_id[1:])))


def test_prompts_that_cannot_be_read_fail_alone(ask: Any) -> None:
    def read(ids: Sequence[int]) -> str:
        if ids[0] == 13:
            raise UnicodeError("not this one")
        return f"w{ids[0]}"

    thread = ask("answers", read)
    thread.submit(PredictionRequest("bad", "", 64), [13])
    thread.submit(PredictionRequest("none", "", 64), None)
    thread.submit(PredictionRequest("good", "", 64), [14])
    found = {event.request_id: event for event in events(thread, 3)}
    assert found["bad"].error == "UnicodeError: not this one"
    assert found["none"].error == "the prompt has no text"
    assert found["good"].status is PredictionStatus.ANSWERED


def test_a_closed_thread_answers_at_once(ask: Any) -> None:
    thread = ask("hangs")
    thread.submit(PredictionRequest("under way", "", 64), [1])
    thread.close()
    thread.submit(PredictionRequest("after", "", 64), [1])
    thread.withdraw("after")
    found = {event.request_id: event for event in events(thread, 2)}
    assert {event.status for event in found.values()} == {PredictionStatus.FAILED}


def test_what_is_counted() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    order = LiveOrder(make_policy("ssjf"), 2)
    order.arrive(Request(request_id="a", arrival_s=0.0, prompt_tokens=1, max_tokens=64), 0.0)
    state = order.predict("a", LengthPrediction(math.log(10), 0.5, 5.0), 0.0)
    assert state is not None
    metrics.observe_length(state, 10)
    metrics.observe_prediction(PredictionEvent("a", None, "gone", 0.25, PredictionStatus.FAILED))
    metrics.bad_hints.labels("tailcast_tier").inc()
    value = registry.get_sample_value
    assert value("tailcast_length_quantile_sum") == pytest.approx(0.5)
    assert value("tailcast_predictions_total", {"status": "failed"}) == 1
    assert value("tailcast_predictions_total", {"status": "answered"}) == 0
    assert value("tailcast_prediction_latency_seconds_sum") == 0.25
    assert value("tailcast_bad_hints_total", {"hint": "tailcast_tier"}) == 1


def test_as_many_go_as_are_needed_and_no_more() -> None:
    order = LiveOrder(make_policy("srpt"), 3)
    for name, tokens in (("a", 40), ("b", 30), ("c", 20), ("new", 5)):
        order.arrive(Request(request_id=name, arrival_s=0.0, prompt_tokens=1, max_tokens=64), 0.0)
        order.predict(name, LengthPrediction(math.log(tokens), 0.1, 5.0), 0.0)
    order.schedule("abc", 0.0)
    worst = order.worst_first("abc", 0.0)
    assert [state.request_id for _, state in worst] == ["a", "b", "c"]

    def victims(num_slots: int, num_free_blocks: int, num_blocks: int, stuck: str = "") -> list[str]:
        capacity = EngineCapacity(num_slots, num_free_blocks, lambda name: 2, lambda name: name != stuck)
        states = order.victims_for("new", num_blocks, worst, capacity, 0.0)
        return [state.request_id for state in states]

    assert victims(1, 4, 4) == [], "it fits"
    assert victims(0, 9, 4) == ["a"], "a slot is needed"
    assert victims(1, 0, 4) == ["a", "b"], "memory is needed"
    assert victims(0, 0, 7) == [], "all of them together do not free enough"
    assert victims(0, 9, 4, stuck="a") == [], "its blocks are being written"


def test_the_page_names_every_policy_setting_and_metric() -> None:
    page = PAGE.read_text(encoding="utf-8")
    listed = page.split("that only orders: ")[1].split(".")[0]
    assert listed.split(", ") == list(engine_policies())
    for setting in EngineSettings.__dataclass_fields__:
        assert setting in page
    registry = CollectorRegistry()
    EngineMetrics(registry)
    for family in registry.collect():
        assert family.name in page


def test_a_policy_from_outside_is_named_by_its_class() -> None:
    settings = EngineSettings(policy="scheduler_core.policies.tie:Tie", policy_parameters={"gamma": 0.5})
    assert settings.make_policy() == make_policy("tie", {"gamma": 0.5})
    assert settings.uses_predictions


def test_a_real_artifact_in_the_threads_of_this_process(tmp_path: Path) -> None:
    """What `local://FOLDER` opens, behind the predictor's thread, with as many questions at once as may come."""
    from predictors.client import load
    from tests.predictors.fakes import write_artifact

    folder = write_artifact(tmp_path / "artifact")
    thread = PredictionThread(load(str(folder)), lambda ids: "name three rivers " * len(ids), max_batch=16)
    for number in range(40):
        thread.submit(PredictionRequest(f"r{number}", "", 64), [0] * (1 + number))
    found = events(thread, 40)
    assert {event.status for event in found} == {PredictionStatus.ANSWERED}, found[0].error
    assert all(event.length is not None and event.length.artifact_version for event in found)
    thread.close()
