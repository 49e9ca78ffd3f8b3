"""Parts of the adapter: its queue, prompts as text, the predictor's thread, what is counted, the page for users."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from scheduler_core.adapters.engine_metrics import EngineMetrics
from scheduler_core.adapters.live_order import LiveOrder
from scheduler_core.adapters.prediction_thread import PredictionThread, PromptDecoder
from scheduler_core.adapters.settings import EngineSettings
from scheduler_core.adapters.vllm import PolicyQueue
from scheduler_core.adapters.vllm_version import check_plannable
from scheduler_core.errors import InputError
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.policies import make_policy
from scheduler_core.policies.base import Policy
from scheduler_core.prediction.predictions import (
    LengthPrediction,
    MissingPart,
    Prediction,
    UrgencyPrediction,
)
from scheduler_core.prediction.predictor import (
    AsyncPredictor,
    PredictionEvent,
    PredictionRequest,
    PredictionStatus,
)
from scheduler_core.prediction.prompt_text import Message, user_text
from scheduler_core.request import Phase, Request, RequestState
from tests.scheduler_core.adapters.length_reader import LengthReader, of_length, settle
from tests.scheduler_core.adapters.stand_in import QUEUE_METHODS, FakeRequest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "vllm.md"
Start = Callable[..., PredictionThread]


def put(order: LiveOrder, queue: PolicyQueue, name: str) -> FakeRequest:
    request = FakeRequest(name, 1)
    order.arrive(Request(request_id=name, arrival_s=0.0, prompt_tokens=4, max_tokens=64), 0.0)
    queue.add_request(request)
    return request


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from("apxkrf"), st.integers(1, 50)), max_size=60))
def test_the_first_is_always_the_one_of_the_smallest_key(actions: list[tuple[int, str, int]]) -> None:
    """Against a sorted list: add, pop, take out, prediction, preemption, end."""
    order = LiveOrder(make_policy("ssjf"), max_num_seqs=2)
    queue = PolicyQueue(order, lambda: 100.0)
    assert all(callable(getattr(queue, name)) for name in QUEUE_METHODS)
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
            assert first == min(inside, key=lambda n: (known.get(n, 64), order.states[n].order))
            order.schedule([first], 0.0)
            inside.discard(first)
        elif action == "x" and name in inside:
            queue.remove_requests({live[name], FakeRequest("elsewhere", 1)})
            inside.discard(name)
        elif action == "k" and name in live:
            order.predict(name, of_length(tokens), 0.0)
            known[name] = tokens
        elif action == "r" and name in live and name not in inside:
            order.preempt(name, 0.0)
            queue.prepend_requests([live[name]])
            inside.add(name)
        elif action == "f" and name in live:
            queue.remove_requests([live.pop(name)])
            assert order.leave(name) is not None
            inside.discard(name)
            known.pop(name, None)
        assert (len(queue), {request.request_id for request in queue}) == (len(inside), inside)
        assert {name for name, request in live.items() if request in queue} == inside
    order.waiting.validate(0.0, keys_are_fresh=False)


def test_held_requests_wait_while_others_run_and_never_alone() -> None:
    """vLLM asks the queue before each admission whether it is empty."""

    @dataclass(kw_only=True, slots=True)
    class OneSession(Policy):
        """Turns of a session run only alone or with others of it."""

        running: list[str] = field(default_factory=list)

        def key(self, state: RequestState, now: float) -> float:
            return state.request.arrival_s

        def on_admit(self, state: RequestState, now: float) -> None:
            self.running.append(state.request.session)

        def may_admit(self, state: RequestState, now: float) -> bool:
            return state.request.session in self.running

    order = LiveOrder(OneSession(), max_num_seqs=4)
    running: list[FakeRequest] = []
    queue = PolicyQueue(
        order, lambda: 1.0, lambda: running, lambda request: order.schedule([request.request_id], 1.0)
    )
    for number, session in enumerate("aabb"):
        name = f"{session}{number}"
        request = Request(request_id=name, arrival_s=number, prompt_tokens=4, max_tokens=64, session=session)
        order.arrive(request, 0.0)
        queue.add_request(FakeRequest(name, 1))

    def admitted() -> list[str]:
        while queue:
            running.append(queue.pop_request())
        return [request.request_id for request in running]

    assert admitted() == ["a0", "a1"], "the policy knows of the first admission at the second one"
    assert len(queue) == 2, "vLLM goes on while there are any"
    running.clear()
    assert admitted() == ["b2", "b3"], "nothing runs, so the first one is admitted"
    assert not queue


def test_a_request_whose_prompt_was_cached_decodes_after_its_first_token() -> None:
    order = LiveOrder(make_policy("ssjf"), max_num_seqs=2)
    order.arrive(Request(request_id="a", arrival_s=0.0, prompt_tokens=100, max_tokens=64), 0.0)
    order.schedule(["a"], 1.0)
    order.progress("a", 36, 100, 1, 2.0)
    state = order.states["a"]
    assert (state.phase, state.first_token_s) == (Phase.DECODE, 2.0)
    order.preempt("a", 3.0)
    order.progress("a", 1, 102, 2, 4.0)
    assert (state.num_computed_tokens, state.num_output_tokens) == (0, 1), "output of before the preemption"
    assert state.num_preemptions == 1


#: Chat templates as of models in use; Hermes puts results of tools into user messages.
TEMPLATES = {
    "chatml": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
    "hermes": (
        "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
        "{{ '<tool_response>' + m.content if m.role == 'tool' else m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n<think>\n"
    ),
    "llama": (
        "<|begin|>{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content }}<|eot|>{% endfor %}"
        "<|start|>assistant<|end|>\n\n"
    ),
    "mistral": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    ),
}


class ChatTokenizer:
    """Ids are characters; the template is the only thing that is special."""

    def __init__(self, template: str) -> None:
        self._template = jinja2.Template(template)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return self._template.render(messages=messages)


CHATS = [
    ["user"], ["system", "user"], ["user", "assistant", "user"], ["user", "assistant", "tool"],
    ["system", "user", "assistant", "tool", "assistant", "tool"],
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        (name, roles)
        for name in TEMPLATES
        for roles in CHATS
        if name != "mistral" or (len(set(roles)) < 3 and "system" not in roles)
    ],
)
def test_the_last_user_message_of_a_chat_is_read_as_it_stands(name: str, roles: list[str]) -> None:
    tokenizer = ChatTokenizer(TEMPLATES[name])
    texts = [f"{role} {number}: how far is it? <3" for number, role in enumerate(roles)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    ids = list(map(ord, tokenizer.apply_chat_template(messages)))
    last = max(number for number, role in enumerate(roles) if role == "user")
    decoded = PromptDecoder(tokenizer)(ids)
    assert user_text(decoded) == texts[last]
    if name != "mistral":  # whose template has no names of roles
        assert decoded == tuple(map(Message, roles, texts))
    assert user_text(PromptDecoder(tokenizer, whole=True)(ids)) == "".join(map(chr, ids))


@pytest.mark.parametrize(
    "template", ["{{ raise_exception() }}", "{% for m in messages %}{{ m.content }}{% endfor %}"]
)
def test_other_prompts_are_read_whole(template: str) -> None:
    ids = list(map(ord, "plain text"))
    plain = (Message("user", "plain text"),)
    assert PromptDecoder(ChatTokenizer(template))(ids) == plain
    assert PromptDecoder(ChatTokenizer(TEMPLATES["chatml"]))(ids) == plain


@pytest.fixture
def start() -> Any:
    """Makes threads, and ends them."""
    threads: list[PredictionThread] = []

    def start(predictor: Any, decode: Callable[[Sequence[int]], str] = lambda ids: f"w{ids[0]}") -> Any:
        def messages(ids: Sequence[int]) -> tuple[Message, ...]:
            return (Message("user", decode(ids)),)

        threads.append(PredictionThread(AsyncPredictor(predictor, max_batch=16), messages))
        return threads[-1]

    yield start
    for thread in threads:
        thread.close()


def events(thread: PredictionThread, count: int) -> dict[str, PredictionEvent]:
    settle(thread)
    rows = thread.take()
    assert len(rows) == len({event.request_id for event in rows}) == count
    return {event.request_id: event for event in rows}


def test_prompts_that_cannot_be_read_fail_alone(start: Start) -> None:
    def read(ids: Sequence[int]) -> str:
        if ids[0] == 13:
            raise UnicodeError("not this one")
        return f"w{ids[0]}"

    thread = start(LengthReader("answers"), read)
    for name, ids in (("bad", [13]), ("none", None), ("good", [14])):
        thread.submit(PredictionRequest(name, "", 64), ids)
    rows = events(thread, 3)
    assert rows["bad"].error == "UnicodeError: not this one"
    assert rows["none"].error == "the prompt has no text"
    assert rows["good"].status is PredictionStatus.ANSWERED


def test_a_closed_thread_fails_what_it_has_and_what_comes(start: Start) -> None:
    class Broken(LengthReader):
        async def close(self) -> None:
            raise OSError("no")

    thread = start(Broken("hangs"))
    thread.submit(PredictionRequest("under way", "", 64), [1])
    thread.close()
    thread.submit(PredictionRequest("after", "", 64), [1])
    thread.withdraw("after")
    assert {event.status for event in events(thread, 2).values()} == {PredictionStatus.FAILED}


def test_a_real_artifact_in_the_threads_of_this_process(tmp_path: Path, start: Start) -> None:
    """What an artifact folder opens, with all heads, as many queries at once as may come."""
    from predictors.service.in_process import InProcessPredictor
    from tests.predictors.fakes import write_rich_artifact

    folder = write_rich_artifact(tmp_path / "artifact")
    thread = start(InProcessPredictor(str(folder)), lambda ids: "name three rivers " * len(ids))
    for number in range(40):
        thread.submit(PredictionRequest(f"r{number}", "", 64), [0] * (1 + number))
    rows = events(thread, 40).values()
    assert {event.status for event in rows} == {PredictionStatus.ANSWERED}
    assert all(event.prediction and event.prediction.length.artifact_version for event in rows)


def test_what_is_counted() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    order = LiveOrder(make_policy("ssjf"), 2)
    order.arrive(Request(request_id="a", arrival_s=0.0, prompt_tokens=1, max_tokens=64), 0.0)
    state = order.predict("a", of_length(10, sigma=0.5), 0.0)
    assert state is not None
    metrics.observe_length(state, 10)
    metrics.observe_prediction(PredictionEvent("a", None, "gone", 0.25, PredictionStatus.FAILED))
    value = registry.get_sample_value
    assert value("tailcast_length_quantile_sum") == pytest.approx(0.5)
    assert state.prediction is not None
    quantiles = tuple(math.log(10) + min(level, 0.5) - 0.25 for level in LEVELS)
    state.prediction = replace(state.prediction, quantiles=quantiles)
    metrics.observe_length(state, 10)
    assert value("tailcast_length_quantile_sum") == pytest.approx(0.5 + 0.25)
    assert value("tailcast_prediction_latency_seconds_sum") == 0.25


@pytest.mark.parametrize(
    ("free", "num_blocks", "stuck", "victims"),
    [
        ((1, 4), 4, "", ""),  # it fits
        ((0, 9), 4, "", "a"),  # a slot is needed
        ((1, 0), 4, "", "ab"),  # memory is needed
        ((0, 0), 7, "", ""),  # all of them together do not free enough
        ((0, 9), 4, "a", ""),  # its blocks are being written
    ],
)
def test_as_many_go_as_are_needed(free: tuple[int, int], num_blocks: int, stuck: str, victims: str) -> None:
    order = LiveOrder(make_policy("srpt"), 3)
    for name, tokens in (("a", 40), ("b", 30), ("c", 20), ("new", 5)):
        order.arrive(Request(request_id=name, arrival_s=0.0, prompt_tokens=1, max_tokens=64), 0.0)
        order.predict(name, of_length(tokens), 0.0)
    order.schedule("abc", 0.0)
    worst = order.worst_first("abc", 0.0)
    assert [state.request_id for _, state in worst] == ["a", "b", "c"]
    states = order.victims_for(
        "new", num_blocks, worst, 0.0, num_free_slots=free[0], num_free_blocks=free[1],
        held_blocks=lambda name: None if name == stuck else 2,
    )  # fmt: skip
    assert "".join(state.request_id for state in states) == victims


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        ("scheduler", "connector", object(), "KV connector"),
        ("scheduler", "use_v2_model_runner", True, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("scheduler", "is_encoder_decoder", True, "encoder-decoder"),
        ("scheduler", "need_mamba_block_aligned_split", True, "Mamba"),
        ("scheduler", "is_mm_encoder_only", True, "--mm-encoder-only"),
        ("sizes", "enable_chunked_prefill", False, "--no-enable-chunked-prefill"),
        ("sizes", "disable_chunked_mm_input", True, "bidirectional attention in images"),
        ("parallel", "pipeline_parallel_size", 2, "pipeline parallelism"),
    ],
)
def test_engines_whose_steps_cannot_be_planned_are_refused(
    owner: str, name: str, value: object, reason: str
) -> None:
    features = (
        "is_encoder_decoder",
        "use_v2_model_runner",
        "need_mamba_block_aligned_split",
        "is_mm_encoder_only",
    )
    parts = {
        "scheduler": SimpleNamespace(connector=None, **dict.fromkeys(features, False)),
        "sizes": SimpleNamespace(enable_chunked_prefill=True, disable_chunked_mm_input=False),
        "parallel": SimpleNamespace(pipeline_parallel_size=1),
    }
    model = SimpleNamespace(supports_multimodal_inputs=True)
    config = SimpleNamespace(
        scheduler_config=parts["sizes"], parallel_config=parts["parallel"], model_config=model
    )
    check_plannable(parts["scheduler"], config, "slai")
    setattr(parts[owner], name, value)
    with pytest.raises(InputError, match=f"batching: got 'slai'; allowed: unset.*{reason}"):
        check_plannable(parts["scheduler"], config, "slai")


def test_the_page_names_every_setting_and_metric() -> None:
    page = PAGE.read_text(encoding="utf-8")
    registry = CollectorRegistry()
    EngineMetrics(registry)
    for name in (*EngineSettings.__dataclass_fields__, *(family.name for family in registry.collect())):
        assert name in page


def test_a_request_whose_length_is_missing_gets_the_typical_one() -> None:
    """Of a joined predictor, whose urgency has answered."""
    order = LiveOrder(make_policy("sept"), max_num_seqs=1)
    for name in ("known", "missing"):
        order.arrive(Request(request_id=name, arrival_s=0.0, prompt_tokens=4, max_tokens=1000), 0.0)
    length = LengthPrediction(4.0, 0.5, 3.5)
    order.predict("known", Prediction(length=length), 0.0)
    missing = (MissingPart("length", "late"),)
    state = order.predict("missing", Prediction(urgency=UrgencyPrediction((0.9, 0.1)), missing=missing), 0.0)
    assert state is not None
    assert state.urgency == UrgencyPrediction((0.9, 0.1))
    assert state.prediction is not None
    assert state.prediction.mu == pytest.approx(length.mu, abs=0.5)
