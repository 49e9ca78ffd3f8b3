"""The scheduler with a stand-in for vLLM, step by step; test_vllm_engine.py runs the real one."""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from scheduler_core.adapters import vllm as adapter
from scheduler_core.adapters.engine_metrics import process_metrics
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.policies.base import Policy
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.prediction.predictor import JointPredictor, PredictionRequest
from scheduler_core.request import RequestState
from tests.scheduler_core.adapters.length_reader import ORDERS, LengthReader, settle
from tests.scheduler_core.adapters.stand_in import FakeRequest, modules, run_step, vllm_config

Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Schedulers on the stand-in, with requests of the lengths in `lengths`; `mode` is a predictor's of length_reader.py."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("TAILCAST_CONFIG", raising=False)
    monkeypatch.setattr(adapter, "open_predictor", lambda url, **_: LengthReader(url.partition("://")[2]))
    adapter.scheduler_class.cache_clear()
    schedulers = []

    def build(name: str, *lengths: int, mode: str | None = "answers", **options: Any) -> Any:
        settings = {"policy": name, "predictor": mode and f"prompted://{mode}"} | options.pop("settings", {})
        scheduler = adapter.TailcastScheduler(vllm_config=vllm_config(settings, **options))
        schedulers.append(scheduler)
        add(scheduler, *(FakeRequest(f"r{at}", length) for at, length in enumerate(lengths)), mode=mode)
        return scheduler

    yield build
    for scheduler in schedulers:
        scheduler.shutdown()
        assert scheduler.is_shut_down
    adapter.scheduler_class.cache_clear()


def add(scheduler: Any, *requests: FakeRequest, mode: str | None = "answers") -> None:
    """Adds requests and waits for their predictions, which the next step takes."""
    for request in requests:
        scheduler.add_request(request)
    if mode == "answers":
        settle(scheduler._tailcast_thread)


def drain(scheduler: Any) -> list[str]:
    """Runs it empty; the ids in the order they finished."""
    finished: list[str] = []
    while scheduler.requests:
        finished += run_step(scheduler)[1]
        assert len(finished) < 1000
    assert not scheduler.waiting
    assert not scheduler._tailcast_order.states
    return finished


@pytest.mark.parametrize(("mode", "order"), [("answers", "r1 r2 r0"), ("hangs", "r0 r1 r2")])
def test_the_predicted_order_without_waiting_for_it(make: Make, mode: str, order: str) -> None:
    assert drain(make("ssjf", 9, 3, 6, mode=mode, max_num_seqs=1)) == order.split()


@pytest.mark.parametrize("mode", ["garbage", "breaks:2"])
def test_a_predictor_that_fails_loses_no_request(make: Make, mode: str) -> None:
    scheduler = make("tie", mode=mode)
    finished = []
    for number in range(12):
        scheduler.add_request(FakeRequest(f"r{number}", 1 + number % 5))
        if number % 3 == 0:
            finished += run_step(scheduler)[1]
    assert sorted(finished + drain(scheduler)) == sorted(f"r{number}" for number in range(12))


class OneHead(LengthReader):
    """A part of a joined predictor, with one head."""

    def __init__(self, mode: str, head: str) -> None:
        super().__init__(mode)
        self._head = head

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> Sequence[Prediction]:
        predictions = await super().predict(requests)
        return [Prediction(**{self._head: getattr(each, self._head)}) for each in predictions]


@pytest.mark.parametrize("mode", ["answers", "breaks:0", "garbage", "hangs"])
@pytest.mark.parametrize(("policy", "used", "other"), [("ssjf", 0, 1), ("hpjf", 1, 0)])
def test_the_order_of_the_part_that_answers(
    make: Make, monkeypatch: pytest.MonkeyPatch, policy: str, used: int, other: int, mode: str
) -> None:
    """Length and urgency are joined, and the one that the policy does not use fails, or is late."""
    heads, modes = ("length", "urgency"), {used: "answers", other: mode}
    parts: list[Any] = [OneHead(modes[number], head) for number, head in enumerate(heads)]
    monkeypatch.setattr(adapter, "open_predictor", lambda url, **_: JointPredictor(parts, heads))
    lengths = (58, 45, 35, 25, 15, 5)
    counter = process_metrics().predictions
    before = {each: counter.labels(each)._value.get() for each in ("answered", "partial", "failed")}
    settings = {"timeout_s": 0.2}
    finished = drain(make(policy, *lengths, max_num_seqs=1, settings=settings))
    assert finished == ORDERS[policy].split()
    counted = {each: counter.labels(each)._value.get() - count for each, count in before.items()}
    is_whole = mode == "answers"
    assert counted == {"answered": 6 * is_whole, "partial": 6 * (not is_whole), "failed": 0}


@pytest.mark.parametrize(
    ("policy", "status", "pause", "runs"),
    [
        ("srpt", "waiting", "UNPAUSED", "short"),
        ("ssjf", "waiting", "UNPAUSED", "r0"),  # does not preempt
        ("srpt", "blocked", "UNPAUSED", "r0"),  # cannot run yet
        ("srpt", "waiting", "PAUSED_NEW", "r0"),
    ],
)
def test_who_runs_when_a_short_one_comes(make: Make, policy: str, status: str, pause: str, runs: str) -> None:
    scheduler = make(policy, 30, max_num_seqs=1)
    run_step(scheduler)
    prediction = scheduler._tailcast_order.states["r0"].prediction
    add(scheduler, FakeRequest("short", 2, status=status))
    scheduler.pause_state = SimpleNamespace(name=pause)
    assert set(run_step(scheduler)[0]) == {runs}
    state = scheduler._tailcast_order.states["r0"]
    assert state.num_preemptions == (runs == "short")
    assert state.prediction is prediction is not None
    if status == "blocked":
        scheduler.requests["short"].status = "waiting"
        assert set(run_step(scheduler)[0]) == {"short"}


def test_the_last_running_one_is_the_policys_victim(make: Make) -> None:
    """vLLM takes the last where memory runs out."""
    scheduler = make("srpt", 30, 10, 20, max_num_seqs=3)
    run_step(scheduler)
    run_step(scheduler)
    assert [request.request_id for request in scheduler.running] == ["r1", "r2", "r0"]


@pytest.mark.mend  # The last admitted one, often the most urgent, was the victim under vLLM's own rule for fcfs.
def test_the_least_urgent_is_the_last_running_one_without_displacement(make: Make) -> None:
    scheduler = make("priority", mode=None, max_num_seqs=3, policy="priority")
    for name, priority in (("r0", 9), ("r1", -4), ("r2", 2), ("r3", -9)):
        scheduler.add_request(FakeRequest(name, 30, priority=priority))
        run_step(scheduler)
    run_step(scheduler)
    assert [request.request_id for request in scheduler.running] == ["r1", "r2", "r0"]
    assert len(scheduler.waiting) == 1, "no slot is taken from a running request"
    scheduler = make("fcfs", mode=None, max_num_seqs=3)
    for name, priority in (("r0", 9), ("r1", -4)):
        scheduler.add_request(FakeRequest(name, 30, priority=priority))
        run_step(scheduler)
    assert [request.request_id for request in scheduler.running] == ["r0", "r1"]


def test_abort_in_any_state(make: Make) -> None:
    scheduler = make("srpt", 30, max_num_seqs=1)
    run_step(scheduler)
    add(scheduler, FakeRequest("running", 5))
    run_step(scheduler)
    for name in ("waiting", "unpredicted"):
        scheduler.add_request(FakeRequest(name, 20))
    assert scheduler.requests["r0"].status == "preempted"
    for name in ("r0", "running", "waiting", "unpredicted"):
        scheduler.finish_requests(name)
    assert not scheduler.waiting
    assert not scheduler._tailcast_order.states
    scheduler.add_request(FakeRequest("later", 2))
    assert drain(scheduler) == ["later"]


def test_what_clients_declare_reaches_the_policy_and_mistakes_are_left_out(make: Make) -> None:
    scheduler = make("priority", mode=None, max_num_seqs=1, policy="priority")
    assert scheduler.policy.value == "fcfs", "victims are not vLLM's to choose by priority"
    hints = {"tailcast_tier": 0, "tailcast_tenant": "a", "tailcast_ttft_slo_s": -1.0}
    hints |= {"tailcast_tbt_slo_s": "x", "tailcast_ttlt_slo_s": True}
    scheduler.add_request(FakeRequest("r0", 2, priority=5, extra_args=hints))
    scheduler.add_request(FakeRequest("r1", 2, priority=-5, extra_args={"other": 1, "tailcast_tenant": 3}))
    request, other = (scheduler._tailcast_order.states[name].request for name in ("r0", "r1"))
    assert (request.tier, request.tenant, other.tenant) == (0, "a", "")
    assert (request.ttft_slo_s, request.tbt_slo_s, request.ttlt_slo_s) == (None, None, None)
    assert drain(scheduler) == ["r1", "r0"]


@dataclass(kw_only=True, slots=True)
class Ends(Policy):
    """Keeps how the turns of sessions have ended."""

    inputs: ClassVar[frozenset[str]] = frozenset({"session"})
    ends: list[str] = field(default_factory=list)

    def key(self, state: RequestState, now: float) -> float:
        return state.request.arrival_s

    def on_finish(self, state: RequestState) -> None:
        self.ends.append(state.ended_by)


def test_the_policy_knows_how_turns_have_ended(make: Make) -> None:
    scheduler = make(f"{__name__}:Ends", mode=None, max_num_seqs=1)
    outputs = ((5, 0), (7, 5, 0), (5, 0))
    for number, output in enumerate(outputs):
        add(scheduler, FakeRequest(f"r{number}", 2, output_token_ids=output), mode=None)
    add(scheduler, FakeRequest("aborted", 9, output_token_ids=(7,)), mode=None)
    run_step(scheduler)
    scheduler.finish_requests("aborted")
    drain(scheduler)
    assert scheduler._tailcast_order.policy.ends == ["", "", "tool_use", "end_turn"]


def session_of(hints: dict[str, Any] | None, own: str | None = None, salt: str | None = None) -> str:
    request = FakeRequest("r0", 2, extra_args=hints)
    vars(request).update(session_id=own, cache_salt=salt)
    return adapter.request_of(request, 0.0)[0].session


def test_session_of_a_request() -> None:
    """The hint, else vLLM's session_id."""
    named = {"tailcast_session": "a"}
    assert session_of(named) == session_of(named, "b") == session_of(None, "a") != session_of({}, "b")
    assert session_of({"tailcast_session": 3}, "b") == session_of(None, "b")
    assert session_of(None) == ""


@pytest.mark.mend  # clients could join the sessions of other tenants, and those without a name by the ids of requests
def test_no_client_can_name_a_session_of_another_tenant() -> None:
    names = [
        session_of({"tailcast_session": session, "tailcast_tenant": tenant}, salt=salt)
        for session, tenant, salt in (
            ("b", "a", None),
            ("b", "", None),
            ("b", "a", "salt"),
            ("a\nb", "", None),
            ("', None, 'b", "a", None),
            ("~r0", "", None),
        )
    ]
    assert len(set(names)) == len(names)
    assert not any(name.startswith(("~", "\0")) for name in names)


def test_a_declared_priority_and_tier_come_before_the_policys_key(make: Make) -> None:
    """A tier is one step of priority, as in the proxy."""
    scheduler = make("ssjf", max_num_seqs=1)
    hints = {"tailcast_tier": 0}
    requests = (
        ("batch", 1, 10, None),
        ("long", 9, 0, None),
        ("short", 3, 0, None),
        ("urgent", 8, 0, hints),
        ("first", 8, -3, None),
    )
    add(
        scheduler, *(FakeRequest(name, length, priority, extra) for name, length, priority, extra in requests)
    )
    assert drain(scheduler) == ["first", "urgent", "short", "long", "batch"]


def test_a_forced_length_is_known_and_teaches_nothing(make: Make) -> None:
    """min_tokens is a lower bound, and with ignore_eos the length is max_tokens."""
    scheduler = make("ssjf", max_num_seqs=1)
    forced, bounded, free = (FakeRequest(name, 3, max_tokens=30) for name in ("forced", "bounded", "free"))
    forced.sampling_params.ignore_eos, bounded.sampling_params.min_tokens = True, 20
    lengths: list[int] = []
    scheduler._tailcast_calibration.observe = lambda _, outcome: lengths.append(outcome.output_tokens)
    add(scheduler, forced, bounded, free)
    run_step(scheduler)
    states = scheduler._tailcast_order.states
    medians = {name: round(math.exp(states[name].prediction.mu)) for name in states}
    assert medians == {"forced": 30, "bounded": 20, "free": 3}
    assert drain(scheduler) == ["free", "bounded", "forced"]
    assert lengths == [3]


def test_a_request_that_cannot_be_predicted_is_neither_first_nor_last(make: Make) -> None:
    """A prompt of embeddings has no text."""
    scheduler = make("ssjf", max_num_seqs=1)
    unknown = FakeRequest("unknown", 1)
    unknown.prompt_token_ids = None  # type: ignore[assignment]
    add(scheduler, *(FakeRequest(f"r{length}", length) for length in (3, 40, 4, 45)), unknown)
    finished = drain(scheduler)
    assert 0 < finished.index("unknown") < 4


def test_add_request_returns_while_text_is_being_made(make: Make) -> None:
    """The tokenizer works in the predictor's thread."""
    may_go = threading.Event()

    class Slow:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            assert may_go.wait(60)
            return f"w{ids[0]}"

    scheduler = make("ssjf", max_num_seqs=1, tokenizer=Slow())
    add(scheduler, FakeRequest("r0", 9), FakeRequest("r1", 3), mode=None)
    run_step(scheduler)
    may_go.set()
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
    ("text", "error"),
    [
        ("policy: tyre", "policy: got 'tyre'; allowed: fcfs, "),
        ("policy: s3", "policy s3 reserves KV memory"),
        ("policy: tie\npolicy_parameters: {gamma: 2}", "gamma: got 2; allowed: numbers"),
        ("policy: tie\npolicy_parameters: 3", "policy_parameters: got 3"),
        ("policy: tie\npredictor: ''", "predictor: got ''"),
        ("policy: tie\ntimeout_s: 0", "timeout_s: got 0; allowed: seconds > 0"),
        ("policy: tie\nprompt: some", "prompt: got 'some'; allowed: user, whole"),
        ("policy: tie\npolice: 1", "setting: got 'police'; allowed: predictor, model"),
        ("{}", "TAILCAST_CONFIG, policy: got None; allowed: fcfs, "),
        ("- tie", "TAILCAST_CONFIG: .*names with values"),
        ("policy: [", "TAILCAST_CONFIG: .*readable YAML"),
    ],
)
def test_a_bad_configuration_does_not_start(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, error: str
) -> None:
    path = tmp_path / "tailcast.yaml"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("TAILCAST_CONFIG", str(path))
    with pytest.raises(InputError, match=error):
        adapter.TailcastScheduler(vllm_config=vllm_config(None))


def test_where_settings_come_from(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tailcast.yaml"
    path.write_text("policy: las\n", encoding="utf-8")

    def policy(entry: Any) -> str:
        scheduler = adapter.TailcastScheduler(vllm_config=vllm_config(entry))
        return str(scheduler._tailcast_settings.policy)

    with pytest.raises(InputError, match="TAILCAST_CONFIG: got None"):
        policy(None)
    assert policy(str(path)) == "las"
    monkeypatch.setenv("TAILCAST_CONFIG", str(path))
    assert policy(None) == "las"
    with pytest.raises(InputError, match="either"):
        policy({"policy": "tie"})
    monkeypatch.setenv("TAILCAST_CONFIG", str(tmp_path / "missing.yaml"))
    with pytest.raises(InputError, match="missing.yaml"):
        policy(None)


def test_lengths_of_ended_requests_correct_the_next_predictions(make: Make, tmp_path: Path) -> None:
    """Predicted are 12 tokens; the outputs have 4."""
    settings = {"calibration_file": str(tmp_path / "calibration.json")}
    options: dict[str, Any] = {"settings": settings, "max_num_seqs": 4}
    scheduler = make("ssjf", **options)

    def ends(number: int) -> FakeRequest:
        request = FakeRequest(f"r{number}", 4)
        request.prompt_token_ids = [12] * 4
        return request

    for number in range(40):
        add(scheduler, ends(number))
        drain(scheduler)
    assert not scheduler._tailcast_predictions
    scheduler._tailcast_calibration.publish()
    metrics = scheduler._tailcast_calibration.calibration.metrics("")
    assert (metrics["num_outputs"], metrics["num_censored"]) == (40, 0)

    def median(scheduler: Any, name: str) -> float:
        return float(scheduler._tailcast_order.states[name].prediction.distribution().ppf(0.5))

    add(scheduler, ends(40))
    run_step(scheduler)
    corrected = median(scheduler, "r40")
    assert corrected == pytest.approx(4, abs=1.5)
    scheduler.finish_requests("r40")
    scheduler._tailcast_calibration.publish()
    assert scheduler._tailcast_calibration.calibration.metrics("")["num_censored"] == 1
    scheduler.shutdown()
    again = make("ssjf", **options)
    add(again, ends(41))
    run_step(again)
    assert median(again, "r41") == pytest.approx(corrected, rel=0.1)
    off = make("ssjf", settings={"online_calibration": False})
    add(off, ends(42))
    run_step(off)
    assert median(off, "r42") == pytest.approx(12)
    assert off._tailcast_calibration is None


def test_requests_without_a_prediction_teach_nothing(make: Make) -> None:
    scheduler = make("ssjf", 3, 5, mode="garbage")
    drain(scheduler)
    scheduler._tailcast_calibration.publish()
    assert not scheduler._tailcast_calibration.calibration.served_models
