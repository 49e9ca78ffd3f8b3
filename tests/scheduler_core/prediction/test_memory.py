"""Memory of past requests: what it learns, what it must not learn, tenants, changes, bounds, state."""

import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.adapters.live_calibration import packed, unpacked
from scheduler_core.errors import InputError
from scheduler_core.prediction import memory
from scheduler_core.prediction.correction import (
    MAX_NAME_CHARS,
    OWN_OUTPUTS,
    Correction,
    CorrectionConfig,
    RequestContext,
)
from scheduler_core.prediction.memory import KEPT_AT_CHANGE, NUM_NEIGHBORS, Memory, Shift
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import Embedding, LengthPrediction, Prediction
from scheduler_core.prediction.prompt_text import Message, prompt_key
from scheduler_core.statistics import kendall_tau

RAW = LengthPrediction(5.0, 0.6, 3.5)
SAME = Shift(RAW, 0.0)
DIMENSION = 16


def embedding(application: int, rng: np.random.Generator | None = None) -> Embedding:
    """A unit vector near that of the application; the applications are orthogonal."""
    vector = np.zeros(DIMENSION)
    vector[application] = 1.0
    if rng is not None:
        vector += 0.1 * rng.standard_normal(DIMENSION)
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def context(vector: Embedding | None, **more: Any) -> RequestContext:
    return RequestContext(**{"served_model": "m", "embedding": vector, **more})


def outcome(tokens: int, **more: Any) -> Outcome:
    return Outcome(**{"output_tokens": tokens, "finished": True, "prediction": RAW, **more})


def feed(
    correction: Correction,
    count: int,
    means: tuple[float, ...] = (3.0, 5.0, 7.0),
    seed: int = 0,
    scale: float = 0.3,
    **more: Any,
) -> list[tuple[float, float]]:
    """(predicted mu, ln tokens) of requests of several applications that are all predicted alike."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        application = int(rng.integers(len(means)))
        one = context(embedding(application, rng), **more)
        log_length = means[application] + scale * float(rng.standard_normal())
        rows.append((correction.correct(one, RAW).mu, log_length))
        correction.observe(one, outcome(max(1, round(math.exp(log_length)))))
    return rows


def test_the_order_of_applications_is_learned() -> None:
    correction = Correction()
    rows = feed(correction, 600)
    predicted, lengths = np.array(rows[200:]).T
    assert (kendall_tau(predicted, lengths) or 0.0) > 0.55
    metrics = correction.metrics("m")
    assert metrics["is_used"]
    assert metrics["memory_weight"] > 0.99
    assert metrics["num_hits"] > 550
    assert metrics["after"]["crps"] < 0.4 * metrics["calibrated"]["crps"] < 0.4 * metrics["before"]["crps"]
    assert metrics["calibrated"]["tau"] is None or metrics["calibrated"]["tau"] < 0.1
    for name, level in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert metrics["after"]["coverage"][name] == pytest.approx(level, abs=0.06)


def test_a_request_without_similar_ones_keeps_its_prediction() -> None:
    one = Memory(100)
    vector = embedding(0)
    assert one.shift(vector, "m", 0, RAW).prediction is RAW
    one.observe(vector, "m", 0, RAW, SAME, 1000, finished=True)
    assert one.shift(vector, "m", 0, RAW).prediction.mu == pytest.approx(
        5.0 + (math.log(1000) - 5.0) / (1.0 + memory.CAUTION)
    )
    other = one.shift(embedding(1), "m", 0, RAW)
    assert other.prediction.mu == pytest.approx(5.0, abs=0.01)
    assert other.weight < 0.01


def test_another_served_model_or_system_prompt_counts_less() -> None:
    one = Memory(100)
    vector = embedding(0)
    for _ in range(5):
        one.observe(vector, "m", 7, RAW, SAME, 3000, finished=True)
    same, of_model, of_prompt, of_both = (
        one.shift(vector, name, key, RAW).prediction.mu
        for name, key in (("m", 7), ("n", 7), ("m", 8), ("n", 8))
    )
    assert same > of_model == pytest.approx(of_prompt)
    assert of_model > of_both > 5.0
    assert prompt_key(()) == prompt_key([Message("user", "hello")]) == 0
    assert prompt_key([Message("system", "Be brief.")]) != prompt_key([Message("system", "Explain.")]) != 0


def test_half_of_a_predicted_difference_is_kept_if_half_is_real() -> None:
    """Lengths of one application that vary half as much with mu as predicted."""
    one, rng = Memory(5000), np.random.default_rng(0)
    for _ in range(1500):
        mu = float(rng.normal(5.0, 1.0))
        prediction = LengthPrediction(mu, 0.6, 3.5)
        tokens = max(1, round(math.exp(5.0 + 0.5 * (mu - 5.0) + 0.1 * float(rng.standard_normal()))))
        vector = embedding(0)
        shifted = one.shift(vector, "m", 0, prediction)
        one.observe(vector, "m", 0, prediction, shifted, tokens, finished=True)
    assert one.slope("m") == pytest.approx(0.5, abs=0.1)
    assert one.slope("unknown") == 1.0


def test_censored_lengths_are_lower_bounds() -> None:
    """Outputs of about 1,100 tokens, predicted 150, and truncated at 400 or aborted early: as if they were 400 or less
    without the bound, which would be a mu of 6 and less."""
    rng = np.random.default_rng(1)
    one = Memory(1000)
    for _ in range(400):
        vector, tokens = embedding(0, rng), max(1, round(math.exp(7.0 + 0.3 * float(rng.standard_normal()))))
        limit = 400 if rng.random() < 0.7 else int(rng.integers(1, 3000))
        shifted = one.shift(vector, "m", 0, RAW)
        one.observe(vector, "m", 0, RAW, shifted, min(tokens, limit), finished=tokens <= limit)
    assert one.shift(embedding(0), "m", 0, RAW).prediction.mu > 6.4
    early = Memory(10)
    early.observe(embedding(0), "m", 0, RAW, SAME, 2, finished=False)  # says nothing about the length
    assert len(early) == 0


def test_without_an_embedding_the_memory_is_not_used() -> None:
    correction = Correction()
    for _ in range(100):
        correction.observe(context(None), outcome(20))
    assert correction.num_scopes == correction.num_remembered == 0
    assert correction.metrics("m")["memory_weight"] == 0.0
    assert correction.metrics("m")["is_used"]
    feed(correction, 300)
    without = correction.correct(context(None), RAW)
    assert without == correction.correct(context(None), RAW) != RAW


def test_a_memory_that_does_not_help_is_not_used() -> None:
    """Lengths have nothing to do with the embedding, and are as predicted."""
    correction, rng = Correction(), np.random.default_rng(2)
    for _ in range(1500):
        prediction = LengthPrediction(float(rng.normal(5, 1)), 0.3, 3.5)
        tokens = max(1, round(math.exp(prediction.mu + 0.3 * float(rng.standard_t(3.5)))))
        vector = embedding(int(rng.integers(DIMENSION)), rng)
        correction.observe(context(vector), outcome(tokens, prediction=prediction))
    metrics = correction.metrics("m")
    assert metrics["after"]["crps"] <= 1.005 * metrics["calibrated"]["crps"]
    assert metrics["memory_weight"] < 0.5


@pytest.mark.mend  # copies of other tenants' prompts with long outputs moved the predictions of all
def test_what_a_tenant_sends_does_not_change_the_predictions_of_others() -> None:
    alone, flooded = Correction(), Correction()
    for correction in (alone, flooded):
        feed(correction, 300, tenant="a")
    for number in range(1500):
        vector = embedding(number % 3)
        flooded.observe(context(vector, tenant="b"), outcome(8000))
    probes = [context(embedding(application), tenant="a") for application in range(3)]
    assert [flooded.correct(probe, RAW) for probe in probes] == [
        alone.correct(probe, RAW) for probe in probes
    ]
    assert len(flooded._memories[""]) == 2 * OWN_OUTPUTS


def test_a_new_tenant_starts_with_the_calibration_of_all() -> None:
    correction = Correction()
    feed(correction, 300, means=(6.5, 6.5), tenant="a")
    new = context(embedding(0), tenant="new")
    assert correction.correct(new, RAW).mu == pytest.approx(6.5, abs=0.3)
    feed(correction, OWN_OUTPUTS, means=(6.5, 6.5), tenant="new", seed=1)
    assert correction.correct(new, RAW).mu == pytest.approx(6.5, abs=0.3)
    assert correction.metrics("m", "new")["num_outputs"] == OWN_OUTPUTS
    assert correction.metrics("m")["num_outputs"] == 300 + OWN_OUTPUTS


def test_many_small_tenants_share_one_memory() -> None:
    """A tenant for each API key, with a few requests each."""
    correction = Correction()
    for number in range(60):
        feed(correction, 10, tenant=f"key {number}", seed=number)
    mus = [
        correction.correct(context(embedding(application), tenant="new"), RAW).mu for application in range(3)
    ]
    assert mus == pytest.approx([3.0, 5.0, 7.0], abs=0.4)
    metrics = correction.metrics("m")
    assert metrics["num_outputs"] == 600
    assert metrics["after"]["tau"] > 0.55


def test_scopes_are_bounded_and_go_with_their_last_model() -> None:
    correction = Correction(CorrectionConfig(max_models=4))
    for tenant in "abcdef":
        feed(correction, 60, tenant=tenant)
    assert correction.num_scopes <= 4
    assert correction.num_remembered <= 3 * 60 + 6 * 60
    assert {tenant for tenant, _ in correction._pairs} == set(correction._memories) | {""}
    with pytest.raises(InputError, match="tenant"):
        correction.observe(context(embedding(0), tenant="x" * 257), outcome(5))


def test_the_memory_of_a_replaced_model_is_cleared() -> None:
    correction = Correction()
    feed(correction, 600, means=(3.0, 5.0, 7.0))
    before = correction.num_remembered
    rows = feed(correction, 400, means=(6.5, 6.0, 4.0), seed=1)
    assert correction.metrics("m")["num_alarms"] >= 1
    assert correction.num_remembered < before
    predicted, lengths = np.array(rows[200:]).T
    assert np.abs(predicted - lengths).mean() < 0.5


@pytest.mark.mend
def test_an_alarm_of_a_model_without_entries_changes_nothing() -> None:
    """An alarm of a model whose entries were all replaced by others' raised IndexError, and its output was not learned."""
    memory = Memory(10)
    for name in ("a", *"b" * 10):
        memory.observe(embedding(0), name, 0, RAW, SAME, 100, finished=True)
    assert not memory.forget("a")
    assert len(memory) == 10


@pytest.mark.mend
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_nearly_constant_lengths_keep_their_coverage(noise: float) -> None:
    """With a sigma of 0.001, P99 covered 72 % of such outputs, and a difference of a token ended the use of the memory."""
    rng, correction = np.random.default_rng(0), Correction()
    for _ in range(1800):
        application = int(rng.integers(8))
        tokens = max(1, round(5 * 2**application * (1 + noise * rng.standard_normal())))
        correction.observe(context(embedding(application)), outcome(tokens))
    metrics = correction.metrics("m")
    assert metrics["memory_weight"] > 0.99
    assert metrics["after"]["coverage"]["p99"] > 0.98
    assert metrics["after"]["crps"] < 0.01


@pytest.mark.mend
def test_long_ids_are_shortened() -> None:
    """Ids that clients choose, of any length, filled the memory and its file."""
    correction = Correction()
    correction.observe(context(embedding(0)), outcome(5, request_id="x" * 10**6))
    assert correction.neighbors(context(embedding(0)))[0].request_id == "x" * MAX_NAME_CHARS


def test_an_alarm_without_a_change_keeps_the_memory() -> None:
    one, rng = Memory(5000), np.random.default_rng(0)
    for number in range(400):
        application = number % 8
        tokens = max(1, round(math.exp(2.0 + application / 2 + 0.3 * float(rng.standard_normal()))))
        one.observe(embedding(application, rng), "m", 0, RAW, SAME, tokens, finished=True)
    assert not one.forget("unknown")
    assert not one.forget("m")
    assert len(one) == 400
    for number in range(KEPT_AT_CHANGE):
        one.observe(
            embedding(number % 8, rng), "m", 0, RAW, SAME, 3 if number % 8 > 3 else 2000, finished=True
        )
    assert one.forget("m")
    assert len(one) == KEPT_AT_CHANGE


def test_the_oldest_entries_are_replaced() -> None:
    one = Memory(100)
    for number in range(250):
        one.observe(
            embedding(0), f"m{number}", number, RAW, SAME, 100 + number, finished=True, request_id=str(number)
        )
    assert len(one) == 100
    neighbors = one.neighbors(embedding(0), "m249", 249)
    assert len(neighbors) == NUM_NEIGHBORS
    assert neighbors[0].request_id == "249"
    assert neighbors[0].served_model == "m249"
    assert neighbors[0].output_tokens == pytest.approx(349)
    assert neighbors[0].predicted_tokens == pytest.approx(math.exp(5.0))
    assert min(int(each.request_id) for each in neighbors) >= 150
    other = embedding(0)[:8]
    assert one.neighbors(other, "m249", 249) == []
    one.observe(other, "m", 0, RAW, SAME, 10, finished=True)  # another predictor: a new memory
    assert len(one) == 1


def test_a_state_goes_through_a_file_and_gives_the_same_predictions() -> None:
    correction = Correction()
    feed(correction, 300)
    feed(correction, 100, tenant="a", system_prompt=-5)
    restored = Correction()
    restored.restore(unpacked(packed(correction.state())))
    assert restored.num_remembered == correction.num_remembered == 400 + OWN_OUTPUTS
    for tenant, key in (("", 0), ("a", -5)):
        probe = context(embedding(2), tenant=tenant, system_prompt=key)
        one, two = (each.correct(probe, RAW) for each in (correction, restored))
        assert (one.mu, one.sigma) == pytest.approx((two.mu, two.sigma), abs=0.05)  # embeddings are rounded
        ids = [[each.similarity for each in one.neighbors(probe)] for one in (correction, restored)]
        assert ids[0] == pytest.approx(ids[1], abs=2e-3)
    small = Correction(CorrectionConfig(memory=50))
    small.restore(correction.state())
    assert small.num_remembered == 100


@pytest.mark.parametrize(
    "change",
    [
        {"embeddings": np.ones((2, DIMENSION))}, {"embeddings": np.full((100, DIMENSION), np.nan)},
        {"embeddings": np.ones((100, DIMENSION))}, {"columns": np.zeros((4, 100))}, {"columns": np.ones((3, 100))},
        {"keys": [[0], [0]]}, {"served_models": [1]}, {"served_models": []}, {"served_models": ["m", "m"]},
        {"request_ids": np.frombuffer(b"[]", np.uint8)}, {"request_ids": np.frombuffer(b"[", np.uint8)}, {"slopes": {"m": [1.0]}},
        {"slopes": {"m": [math.nan, 1.0]}}, {"embeddings": "x"},
    ],
)  # fmt: skip
def test_a_broken_memory_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    correction, other = Correction(), Correction()
    feed(correction, 100)
    feed(other, 100)
    state = correction.state()
    state["memories"][0][1] |= change
    before = packed(other.state())
    with pytest.raises(InputError):
        other.restore(state)
    assert packed(other.state()) == before


@pytest.mark.mend
@pytest.mark.parametrize("vector", [np.full(4, np.nan), np.ones(4), np.zeros(4), np.eye(2)])
def test_an_embedding_is_a_unit_vector(vector: Any) -> None:
    """One NaN from a predictor of a user made all later corrections fail, and the file unreadable."""
    with pytest.raises(InputError, match="embedding"):
        Prediction(length=RAW, embedding=vector.astype(np.float32))


def test_predictions_during_observations_are_valid() -> None:
    correction = Correction(CorrectionConfig(memory=200))
    feed(correction, 200)
    stop, errors = threading.Event(), []

    def observe() -> None:
        try:
            feed(correction, 600, seed=1)
            correction._memories[""].forget("m")
            feed(correction, 100, means=(6.0, 2.0), seed=2)
        except Exception as error:
            errors.append(error)
        finally:
            stop.set()

    thread = threading.Thread(target=observe)
    thread.start()
    num = 0
    while not stop.is_set() or num == 0:
        assert 1.0 < correction.correct(context(embedding(num % 3)), RAW).mu < 9.0
        assert len(correction.neighbors(context(embedding(0)))) <= NUM_NEIGHBORS
        num += 1
    thread.join()
    assert not errors


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(-50, 50), st.floats(1e-9, 50), st.floats(0.1, 1e9), st.integers(1, 2**53 - 1),
            st.booleans(), st.integers(0, 3), st.sampled_from(["", "a"]),
        ),
        min_size=1,
        max_size=60,
    )
)  # fmt: skip
def test_any_stream_leaves_all_in_range(
    stream: list[tuple[float, float, float, int, bool, int, str]],
) -> None:
    correction = Correction(CorrectionConfig(memory=20))
    for mu, sigma, nu, tokens, finished, application, tenant in stream:
        prediction = LengthPrediction(mu, sigma, nu)
        one = context(embedding(application), tenant=tenant)
        correction.observe(one, outcome(tokens, prediction=prediction, finished=finished))
        assert math.isfinite(correction.correct(one, prediction).mu)
    restored = Correction(CorrectionConfig(memory=20))
    restored.restore(unpacked(packed(correction.state())))
    assert restored.num_remembered == correction.num_remembered
