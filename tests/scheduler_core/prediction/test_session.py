"""Session features: what the state keeps, what messages tell, the embedding, and what is learned from it."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.errors import InputError
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.prediction.prompt_text import ASSISTANT, USER, Message, messages_of
from scheduler_core.prediction.session import (
    MAX_FEATURE,
    NUM_FEATURES,
    SESSION_WEIGHT,
    SessionFeatures,
    SessionPredictor,
    SessionStates,
    joined,
    request_embedding,
    session_context,
    session_of,
)
from scheduler_core.statistics import kendall_tau

FEATURES = st.builds(
    SessionFeatures,
    turn=st.integers(0, 10**6),
    last_output_tokens=st.none() | st.floats(0, 1e9),
    mean_output_tokens=st.none() | st.floats(0, 1e9),
    input_tokens=st.none() | st.integers(0, 10**9),
    new_input_tokens=st.none() | st.integers(0, 10**9),
    is_tool_result=st.booleans(),
    pause_s=st.none() | st.floats(0, 1e9),
    depth=st.integers(0, 10),
)


@given(FEATURES)
def test_every_embedding_is_a_unit_vector_of_one_length(features: SessionFeatures) -> None:
    vector = features.vector()
    assert vector.shape == (NUM_FEATURES,)
    assert vector[0] == 1.0
    assert abs(vector).max() <= MAX_FEATURE
    embedding = features.embedding()
    assert embedding.dtype == np.float32
    assert abs(float(embedding @ embedding) - 1.0) < 1e-5


def test_the_formula_of_the_docstring() -> None:
    features = SessionFeatures(
        turn=5,
        last_output_tokens=300.0,
        mean_output_tokens=250.0,
        input_tokens=50_000,
        new_input_tokens=700,
        is_tool_result=True,
        pause_s=4.0,
        depth=1,
    )
    expected = [
        1.0,
        math.log(300) - 5.5,
        2 * (math.log(250) - 5.5),
        0.5 * (math.log(6) - 3),
        0.5 * (math.log(50_001) - 11),
        1.2 * (math.log(701) - 6.5),
        2 * (1 - 0.8),
        0.8 * (math.log(5) - 2.5),
        1.0,
    ]
    assert features.vector() == pytest.approx(expected)
    assert features.embedding() == pytest.approx(np.array(expected) / np.linalg.norm(expected), abs=1e-6)


def test_unknown_values_are_in_the_middle() -> None:
    vector = SessionFeatures().vector()
    assert vector[[1, 2, 4, 5, 7]].tolist() == [0.0] * 5
    assert SessionFeatures(pause_s=0.0).vector()[7] < -1


def test_similar_requests_have_similar_embeddings() -> None:
    one = SessionFeatures(turn=9, last_output_tokens=200.0, mean_output_tokens=220.0, new_input_tokens=300)
    near = replace(one, last_output_tokens=220.0, new_input_tokens=350)
    far = replace(one, new_input_tokens=30_000)
    products = [float(one.embedding() @ other.embedding()) for other in (near, far)]
    assert products[0] > 0.99 > 0.9 > products[1]


def test_a_state_keeps_the_outputs_of_a_session() -> None:
    sessions = SessionStates()
    assert sessions.features("a", input_tokens=1000, now=5.0) == SessionFeatures(
        input_tokens=1000, new_input_tokens=1000
    )
    sessions.observe("a", output_tokens=100, input_tokens=1000, now=7.0)
    sessions.observe("a", output_tokens=400, input_tokens=1300, now=12.0)
    features = sessions.features("a", input_tokens=2000, is_tool_result=True, depth=1, now=15.5)
    assert features.mean_output_tokens == pytest.approx(200.0)
    assert features == SessionFeatures(
        turn=2,
        last_output_tokens=400.0,
        mean_output_tokens=features.mean_output_tokens,
        input_tokens=2000,
        new_input_tokens=300,
        is_tool_result=True,
        pause_s=3.5,
        depth=1,
    )
    assert sessions.features("b").turn == 0


def test_new_tokens_are_measured_counted_or_all_after_a_compaction() -> None:
    sessions = SessionStates()
    sessions.observe("a", output_tokens=100, input_tokens=50_000)
    assert sessions.features("a", input_tokens=50_600).new_input_tokens == 500
    assert sessions.features("a", input_tokens=50_600, new_input_tokens=664).new_input_tokens == 664
    assert sessions.features("a", input_tokens=9_000).new_input_tokens == 9_000
    assert sessions.features("a").new_input_tokens is None
    sessions.observe("a", output_tokens=100)
    assert sessions.features("a", input_tokens=60_000).new_input_tokens is None


def test_a_clock_that_goes_back_gives_no_negative_pause() -> None:
    sessions = SessionStates()
    sessions.observe("a", output_tokens=1, now=10.0)
    assert sessions.features("a", now=9.0).pause_s == 0.0
    assert sessions.features("a").pause_s is None


def test_the_mean_follows_a_session_whose_outputs_change() -> None:
    sessions = SessionStates()
    for tokens in [100] * 50 + [1000] * 20:
        sessions.observe("a", output_tokens=tokens)
    mean = sessions.features("a").mean_output_tokens
    assert mean is not None
    assert 900 < mean < 1000


def test_the_sessions_that_were_used_last_are_kept() -> None:
    sessions = SessionStates(max_sessions=3)
    for name in ("a", "b", "c", "a", "d"):
        sessions.observe(name, output_tokens=10)
    assert len(sessions) == 3
    assert [sessions.features(name).turn for name in "abcd"] == [2, 0, 1, 1]
    sessions.forget("a")
    sessions.forget("unknown")
    assert len(sessions) == 2
    assert sessions.features("a").turn == 0


@pytest.mark.parametrize("num", [0, -1])
def test_invalid_numbers_are_refused(num: int) -> None:
    with pytest.raises(InputError, match="max_sessions"):
        SessionStates(max_sessions=num)
    with pytest.raises(InputError, match="output_tokens"):
        SessionStates().observe("a", output_tokens=num)
    with pytest.raises(InputError, match="output_tokens"):
        SessionPredictor().observe(SessionFeatures(), num)


OPENAI = [
    {"role": "system", "content": "s" * 400},
    {"role": "user", "content": "u" * 80},
    {"role": "assistant", "content": "a" * 160},
    {"role": "user", "content": "u" * 40},
    {
        "role": "assistant",
        "content": "b" * 31,
        "tool_calls": [{"type": "function", "function": {"name": "run", "arguments": "x" * 43}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "r" * 1200},
]
ANTHROPIC = [
    {"role": "user", "content": "u" * 80},
    {"role": "assistant", "content": [{"type": "text", "text": "a" * 160}]},
    {"role": "user", "content": [{"type": "text", "text": "u" * 40}]},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "b" * 31},
            {"type": "tool_use", "id": "1", "name": "run", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r" * 1200}]},
]


@pytest.mark.parametrize("messages", [OPENAI, ANTHROPIC])
def test_messages_tell_the_session(messages: list[dict[str, Any]]) -> None:
    features = session_of(messages_of(messages))
    assert features.turn == 2
    assert features.is_tool_result
    assert features.new_input_tokens == 300
    last = features.last_output_tokens
    assert last is not None
    assert 9 <= last <= 20
    assert features.mean_output_tokens == pytest.approx(math.sqrt(40 * last))
    assert features.pause_s is None
    assert features.depth == 0
    text = sum(len(message.text) for message in messages_of(messages))
    assert features.input_tokens == text // 4
    assert session_of(messages_of(messages), input_tokens=777).input_tokens == 777


def test_items_of_one_output_are_one_turn() -> None:
    items = [
        {"role": "user", "content": "u" * 40},
        {"type": "function_call", "name": "read", "arguments": "a" * 74},
        {"type": "function_call", "name": "read", "arguments": "b" * 74},
        {"type": "function_call_output", "output": "r" * 400},
    ]
    features = session_of(messages_of(items))
    assert (features.turn, features.last_output_tokens) == (1, 40.0)
    assert features.is_tool_result
    assert features.new_input_tokens == 100


def test_first_messages_and_nothing() -> None:
    first = session_of(messages_of([{"role": "user", "content": "u" * 40}]))
    assert first == SessionFeatures(input_tokens=10, new_input_tokens=10)
    assert session_of(()) == SessionFeatures(input_tokens=0, new_input_tokens=0)


def test_messages_and_state_agree() -> None:
    sessions, messages = SessionStates(), [{"role": "user", "content": "q" * 400}]
    for tokens in (30, 80, 200, 50, 70, 90):
        sessions.observe("a", output_tokens=tokens)
        messages += [
            {"role": "assistant", "content": "a" * 4 * tokens},
            {"role": "tool", "content": "r" * 80},
        ]
    one, other = session_of(messages_of(messages)), sessions.features("a")
    assert (one.turn, one.last_output_tokens) == (other.turn, other.last_output_tokens)
    assert one.mean_output_tokens == pytest.approx(other.mean_output_tokens)


def test_products_of_joined_embeddings_are_weighted() -> None:
    rng = np.random.default_rng(0)
    texts = [np.asarray(x / np.linalg.norm(x), np.float32) for x in rng.standard_normal((2, 64))]
    parts = [SessionFeatures(turn=turn).embedding() for turn in (1, 200)]
    one, other = (joined(text, session) for text, session in zip(texts, parts, strict=True))
    assert one.shape == (64 + NUM_FEATURES,)
    assert one.dtype == np.float32
    assert float(one @ one) == pytest.approx(1.0, abs=1e-5)
    expected = (1 - SESSION_WEIGHT) * texts[0] @ texts[1] + SESSION_WEIGHT * parts[0] @ parts[1]
    assert float(one @ other) == pytest.approx(float(expected), abs=1e-5)


def requests(num: int, seed: int) -> list[tuple[SessionFeatures, int]]:
    """Requests whose outputs are long after much new input, and as long as their session's, but short from 5,000 new tokens."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(num):
        new, mean = int(np.exp(rng.uniform(3, 10))), float(np.exp(rng.uniform(5, 6)))
        mu = 0.3 * math.log(new) + 0.6 * math.log(mean) - 2.0 * (new > 5000)
        features = SessionFeatures(turn=9, new_input_tokens=new, mean_output_tokens=mean)
        rows.append((features, max(int(np.exp(mu + 0.3 * rng.standard_normal())), 1)))
    return rows


def tau_of(predictor: SessionPredictor, rows: list[tuple[SessionFeatures, int]]) -> float:
    tau = kendall_tau([predictor.predict(features).mu for features, _ in rows], [y for _, y in rows])
    return tau or 0.0


def test_the_predictor_learns_the_features() -> None:
    rows, predictor = requests(600, 0), SessionPredictor()
    assert predictor.predict(rows[0][0]) == LengthPrediction(5.4, 0.65, 3.5)
    shorts = [row for row in rows if (row[0].new_input_tokens or 0) < 5000]
    for features, tokens in shorts[:300]:
        predictor.observe(features, tokens)
    assert tau_of(predictor, shorts[300:]) > 0.6


def test_the_memory_learns_what_the_predictor_cannot() -> None:
    predictor, correction = SessionPredictor(), Correction()
    corrected, raw, lengths = [], [], []
    for features, tokens in requests(1500, 1):
        prediction = predictor.predict(features)
        context = RequestContext(embedding=features.embedding())
        raw.append(prediction.mu)
        corrected.append(correction.correct(context, prediction).mu)
        lengths.append(tokens)
        predictor.observe(features, tokens)
        correction.observe(context, Outcome(output_tokens=tokens, finished=True, prediction=prediction))
    one, other = (kendall_tau(mu[500:], lengths[500:]) for mu in (raw, corrected))
    assert one is not None
    assert other is not None
    assert other > one + 0.2


def test_a_censored_output_is_longer_than_observed() -> None:
    features = SessionFeatures(turn=3)

    def learned(tokens: int, finished: bool) -> float:
        predictor = SessionPredictor()
        for _ in range(50):
            predictor.observe(features, tokens, finished=finished)
        return predictor.predict(features).mu

    start = SessionPredictor().predict(features).mu
    assert learned(400, False) > learned(400, True) + 0.1
    assert learned(10, False) == pytest.approx(start, abs=0.15)
    assert learned(10, True) < start - 1


def test_old_outputs_are_forgotten() -> None:
    predictor, features = SessionPredictor(memory=50), SessionFeatures()
    for tokens in [50] * 300 + [1000] * 300:
        predictor.observe(features, tokens)
    assert predictor.predict(features).mu == pytest.approx(math.log(1000), abs=0.15)


def test_first_requests_are_compared_by_their_texts_and_later_ones_with_their_sessions() -> None:
    text = np.array([0.6, 0.8], np.float32)
    other = np.array([0.8, -0.6], np.float32)
    question = [Message(USER, "Why?")]
    turns = [*question, Message(ASSISTANT, "Because. " * 50), Message(USER, "And then?")]
    first, same = (request_embedding(text, messages) for messages in (question, ()))
    later, apart = request_embedding(text, turns), request_embedding(other, turns)
    assert first is not None
    assert same is not None
    assert later is not None
    assert apart is not None
    assert first.shape == later.shape == (2 + NUM_FEATURES,)
    assert float(first @ same) == pytest.approx(1.0)
    for vector in (first, later, apart):
        assert float(vector @ vector) == pytest.approx(1.0, abs=1e-6)
    assert float(first @ later) == pytest.approx(math.sqrt(1 - SESSION_WEIGHT))
    assert float(later @ apart) == pytest.approx(SESSION_WEIGHT, abs=1e-6)
    assert request_embedding(None, turns) is None


def test_the_input_after_a_call_of_a_tool_is_its_result() -> None:
    sessions = SessionStates()
    for ended_by, is_tool_result in (("tool_use", True), ("end_turn", False), ("", False)):
        sessions.observe("a", output_tokens=5, ended_by=ended_by)
        assert sessions.features("a").is_tool_result == is_tool_result
        assert not sessions.features("a", is_tool_result=False).is_tool_result


def test_context_of_a_session_is_the_same_at_arrival_and_end() -> None:
    sessions, context = SessionStates(), RequestContext(prompt_tokens=900, tenant="t")
    sessions.observe("a", output_tokens=50, input_tokens=600, now=3.0)
    arrival = session_context(context, sessions, "a")
    sessions.observe("b", output_tokens=70)
    end = session_context(context, sessions, "a")
    assert arrival.tenant == "t"
    assert arrival.embedding is not None
    assert end.embedding is not None
    assert (arrival.embedding == end.embedding).all()
    assert (arrival.embedding == sessions.features("a", input_tokens=900).embedding()).all()
    assert session_context(context, sessions, "") is context


def test_contexts_with_a_text_have_embeddings_of_one_length() -> None:
    sessions = SessionStates()
    context = RequestContext(embedding=np.array([0.6, 0.8], np.float32))
    sessions.observe("a", output_tokens=50)
    later, first, without = (session_context(context, sessions, name).embedding for name in ("a", "new", ""))
    assert later is not None
    assert first is not None
    assert without is not None
    assert len(later) == len(first) == 2 + NUM_FEATURES
    assert (first == without).all()
    assert float(first @ later) == pytest.approx(math.sqrt(1 - SESSION_WEIGHT))
