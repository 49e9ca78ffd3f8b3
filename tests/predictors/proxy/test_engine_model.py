"""Model of the engine's prefix cache and costs, against the core's accountant and a synthetic engine."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.proxy.engine_model import CacheSize, End, EngineModel, read_cache_size
from predictors.proxy.order import HoldQueue
from scheduler_core.adapters.live_calibration import packed, unpacked
from scheduler_core.adapters.live_order import UnknownEngine
from scheduler_core.policies import make_policy
from scheduler_core.request import Request, RequestState, Segment
from tests.scheduler_core.helpers import Clock

COMPLETE = End(is_complete=True)


def state_of(name: str, *content: tuple[str, int], session: str = "") -> RequestState:
    segments = tuple(Segment(key, num) for key, num in content)
    num_tokens = sum(segment.num_tokens for segment in segments)
    request = Request(
        request_id=name,
        arrival_s=0.0,
        prompt_tokens=num_tokens,
        max_tokens=99,
        session=session,
        content=segments,
    )
    return RequestState(request, order=0)


def generate(model: EngineModel, state: RequestState, num_tokens: int) -> None:
    """Processes the prompt and so many tokens of output."""
    for number in range(1, num_tokens + 1):
        state.num_output_tokens = number
        state.first_token_s = 1.0
        state.num_computed_tokens = state.known_tokens - 1
        model.compute(state)


def turn(
    model: EngineModel, session: str, num_tokens: int, cached: int | None = None, output: int = 1
) -> int:
    """A turn of a session with a prompt of so many tokens; returns what the model has of it."""
    state = state_of("r", (session, num_tokens), session=session)
    model.send(state)
    generate(model, state, output)
    model.end(state, End(is_complete=True, cached_tokens=cached))
    return state.cached_tokens


def test_contexts_stay_until_their_memory_is_needed() -> None:
    model = EngineModel(CacheSize(1000, 10))
    assert (model.capacity_tokens, turn(model, "a", 400, output=21)) == (1000, 0)
    assert (model.resident_tokens("a"), model.resident_tokens("b")) == (420, 0)
    assert turn(model, "a", 500) == 420
    assert turn(model, "b", 400) == 0
    assert (model.resident_tokens("a"), model.num_resident_tokens) == (500, 900)
    turn(model, "c", 300)
    assert (model.resident_tokens("a"), model.resident_tokens("b")) == (300, 400)
    waiting = state_of("w", ("a", 600), session="a")
    model.look_up([waiting])
    assert waiting.cached_tokens == 300
    model.clear(CacheSize(2000, 10))
    assert (model.capacity_tokens, model.resident_tokens("a"), model.num_resident_tokens) == (2000, 0, 0)


def test_an_unknown_engine_evicts_nothing() -> None:
    model = EngineModel()
    for number in range(9):
        turn(model, str(number), 10**9)
    assert model.resident_tokens("0") == 10**9 // 16 * 16
    assert model.capacity_tokens == UnknownEngine.capacity_tokens


@pytest.mark.mend
def test_an_unknown_engine_does_not_take_all_memory_of_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request without a session left a node of the tree for good."""
    monkeypatch.setattr("predictors.proxy.engine_model.MAX_STREAMS", 40)
    model = EngineModel()
    for number in range(200):
        turn(model, str(number), 1000 + number)
        assert len(model._prefixes) <= 40
    assert model.resident_tokens("199") == 1199 // 16 * 16


def test_the_cache_that_an_engine_reports_corrects_the_model() -> None:
    model = EngineModel(CacheSize(10_000, 10))
    for session in "abcd":
        turn(model, session, 1000)
    turn(model, "b", 1500, cached=0)
    assert [model.resident_tokens(session) for session in "abcd"] == [0, 1500, 1000, 1000]
    turn(model, "c", 1500, cached=950)  # an estimate of tokens may be off by so much
    assert model.resident_tokens("d") == 1000
    turn(model, "b", 2000, cached=None)
    assert model.resident_tokens("d") == 1000


def test_shared_system_prompts_stay_when_sessions_are_dropped() -> None:
    model = EngineModel(CacheSize(10_000, 10))
    for session in "abc":
        state = state_of("r", ("system:x", 500), (session, 1000), session=session)
        model.send(state)
        assert state.cached_tokens == (0 if session == "a" else 500)
        generate(model, state, 1)
        model.end(state, COMPLETE)
    state = state_of("r", ("system:x", 500), ("c", 1100), session="c")
    model.send(state)
    model.end(state, End(is_complete=True, cached_tokens=100))
    assert [model.resident_tokens(session) for session in "abc"] == [0, 0, 1590]
    state = state_of("r", ("system:x", 500), ("d", 1000))
    model.send(state)
    assert state.cached_tokens == 500


def test_requests_without_memory_wait_in_the_engine() -> None:
    model = EngineModel(CacheSize(1000, 10))
    states = [state_of(name, (name, 600), session=name) for name in "abc"]
    for state in states:
        model.send(state)
    assert model.num_resident_tokens == 600
    generate(model, states[0], 1)
    model.end(states[0], COMPLETE)
    assert model.num_resident_tokens == 1000  # the second request, and what is left of the first one
    model.end(states[1], End())  # failed before its first token
    assert model.resident_tokens("b") == 0
    model.end(states[2], COMPLETE)
    model.end(states[2], COMPLETE)  # has left
    assert model.resident_tokens("c") == 600 - 10  # the last token of an output is not computed


@pytest.mark.mend  # a context counted as cached although the engine had evicted it before the request's turn
def test_a_context_is_lost_while_its_request_waits_in_the_engine() -> None:
    model = EngineModel(CacheSize(1000, 10))
    turn(model, "a", 400)
    states = [state_of("b", ("b", 600)), state_of("c", ("c", 900)), state_of("r", ("a", 500), session="a")]
    for state in states:
        model.send(state)
    assert states[2].cached_tokens == 400
    for state in states:
        generate(model, state, 1)
        model.end(state, COMPLETE)
    assert states[2].cached_tokens == 0
    assert model.resident_tokens("a") == 500


def test_reported_tokens_replace_estimates() -> None:
    model = EngineModel(CacheSize(10_000, 10))
    state = state_of("r", ("system:x", 100), ("a", 200), session="a")
    model.send(state)
    generate(model, state, 1)
    content = (Segment("system:x", 100), Segment("a", 400))
    model.end(state, End(is_complete=True, prompt_tokens=500, content=content))
    assert model.resident_tokens("a") == 500


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "end", "fail", "miss", "compute", "clear"]),
        st.integers(0, 5),
        st.integers(1, 700),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_memory_is_conserved(steps: list[tuple[str, int, int]]) -> None:
    """Whatever requests and reports come, each block is free, unused or of a running request."""
    model = EngineModel(CacheSize(1000, 10))
    running: dict[str, RequestState] = {}
    for number, (action, slot, size) in enumerate(steps):
        name = str(slot)
        if action == "send" and name not in running:
            content = (("system:x", 50), (f"s{slot % 3}", size), (f"n{number % 4}", 30))
            running[name] = state_of(name, *content[: 1 + slot % 3], session=f"s{slot % 3}")
            model.send(running[name])
        elif action == "clear":
            model.clear(CacheSize(1000, 10))
        elif name in running and action == "compute":
            generate(model, running[name], size // 20 + 1)
        elif name in running:
            cached = {"miss": 0, "end": 10**6}.get(action)
            model.end(running.pop(name), End(is_complete=action != "fail", cached_tokens=cached))
        holders = {name for name in running if model._kv.held_by(name)}
        model._kv.validate(holders, set())
        assert model.num_resident_tokens <= model.capacity_tokens
    for name in list(running):
        model.end(running.pop(name), COMPLETE)
    assert model._kv.num_free_blocks == 100


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("num_running", [2, 16])
async def test_costs_are_those_of_the_engine(is_stream: bool, num_running: int) -> None:
    """An engine that takes 12 ms for a step, 33 us for a prompt token and 0.25 ms for a decode, in chunks of 4,096 tokens."""
    rng, clock = np.random.default_rng(0), Clock()
    model = EngineModel()
    queue = HoldQueue(make_policy("hrrn"), 64, clock, model=model)
    left: dict[str, list[int]] = {}  # prompt and output tokens that are not computed
    for number in range(300):
        if len(left) < num_running:
            prompt, output = (int(math.exp(rng.uniform(*bounds))) for bounds in ((5.0, 10.0), (3.0, 6.0)))
            request = Request(
                request_id=str(number), arrival_s=clock.now, prompt_tokens=prompt, max_tokens=output
            )
            await queue.enter(request)
            left[request.request_id] = [prompt, output]
        while len(left) == num_running:
            budget, ends = 4096, []
            decodes = [name for name, tokens in left.items() if not tokens[0]]
            for name, tokens in left.items():
                chunk = min(budget, tokens[0])
                tokens[0] -= chunk
                budget -= chunk
                if chunk and not tokens[0]:
                    ends.append(name)
            clock.now += 0.012 + (4096 - budget) / 30_000 + 0.00025 * len(decodes)
            for name in decodes + ends:
                left[name][1] -= 1
                is_end = not left[name][1]
                if is_stream or is_end:
                    queue.on_output(name, 1 if is_stream else queue._order.states[name].request.max_tokens)
                if is_end:
                    del left[name]
                    queue.leave(name, COMPLETE)
    assert model.costs.prefill_s(1000) == pytest.approx(1 / 30, rel=0.2)
    assert model.costs.decode_s(1) == pytest.approx(0.00025 + 0.012 / num_running, rel=0.35)


@pytest.mark.mend  # after a restart of the proxy prompts seemed to cost nothing, because the engine had them
async def test_what_the_engine_had_cached_costs_nothing() -> None:
    clock = Clock()
    model = EngineModel(CacheSize(10**6, 10))
    queue = HoldQueue(make_policy("hrrn"), 64, clock, model=model)
    for number in range(50):
        content = (Segment(str(number), 10_000),)
        request = Request(
            request_id="r", arrival_s=clock.now, prompt_tokens=10_000, max_tokens=9, content=content
        )
        await queue.enter(request)
        cached = 9_900 if number % 2 else 0
        clock.now += 0.1 + (10_000 - cached) / 20_000
        queue.on_output("r", 9)
        queue.leave("r", End(is_complete=True, cached_tokens=cached))
    assert model.costs.prefill_s(1000) == pytest.approx(1 / 20, rel=0.1)


def test_contexts_stay_over_a_restart_of_the_proxy() -> None:
    model, restored = EngineModel(CacheSize(1000, 10)), EngineModel()
    for session in "abc":
        turn(model, session, 390, output=21)
    restored.restore(unpacked(packed(model.state())))
    assert [model.resident_tokens(session) for session in "abc"] == [180, 410, 410]
    assert [restored.resident_tokens(session) for session in "abc"] == [pytest.approx(180, abs=10), 410, 410]
    assert turn(restored, "b", 500) == turn(model, "b", 500) == 410
    restored.restore(unpacked(packed(EngineModel().state())))
    assert (restored.size, restored.num_resident_tokens) == (None, 0)


VLLM = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="90"%s} 1.0
vllm:num_requests_running{engine="0"} 3.0
"""
SGLANG = """sglang:max_total_num_tokens{dp_rank="%d",model_name="m",tp_rank="0"} 47125.0
sglang:page_size{dp_rank="%d",model_name="m"} 64.0
"""


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (VLLM % "", CacheSize(11_520, 128)),
        (VLLM % ',kv_cache_size_tokens="None"', CacheSize(11_520, 128)),
        (VLLM % ',kv_cache_size_tokens="5000"', CacheSize(5000, 128)),
        (SGLANG % (0, 0) + SGLANG % (1, 1), CacheSize(94_250, 64)),
        ("llamacpp:n_decode_total 3\n", None),
        ("vllm:cache_config_info{", None),
        ('vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1.0', None),
        ("", None),
    ],
)
def test_the_size_is_read_from_metrics(text: str, size: CacheSize | None) -> None:
    assert read_cache_size(text) == size
