"""Online calibration: identity at the start, convergence, censoring, forgetting, safeguards, bounded memory, state."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from scheduler_core.errors import InputError
from scheduler_core.lengths.student_t import student_t_cdf
from scheduler_core.prediction import linear_correction
from scheduler_core.prediction.correction import (
    ADMITTED_OUTPUTS,
    Correction,
    CorrectionConfig,
    RequestContext,
)
from scheduler_core.prediction.drift import DriftAlarm
from scheduler_core.prediction.linear_correction import Coefficients, features_of, fit, fit_each
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction

NU = 3.5
TYPICAL = LengthPrediction(6.0, 0.4, NU)
Lengths = Callable[[LengthPrediction, int, np.random.Generator], float]
PARAMETERS = (st.floats(-50, 50), st.floats(1e-9, 50), st.floats(0.1, 1e9))
TOKENS = (st.integers(0, 2**53 - 1), st.integers(1, 2**53 - 1))


def context(served_model: str, prompt_tokens: int | None = None) -> RequestContext:
    return RequestContext(served_model=served_model, prompt_tokens=prompt_tokens)


def outcome(
    prediction: LengthPrediction, prompt_tokens: int | None, output_tokens: int, **more: Any
) -> Outcome:
    return Outcome(
        prediction=prediction,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        **{"finished": True, **more},
    )


def drawn(rng: np.random.Generator) -> LengthPrediction:
    return LengthPrediction(float(rng.normal(6, 1)), float(rng.uniform(0.2, 0.6)), NU)


def as_predicted(prediction: LengthPrediction, prompt_tokens: int, rng: np.random.Generator) -> float:
    return prediction.mu + prediction.sigma * float(rng.standard_t(NU))


def longer_and_wider(prediction: LengthPrediction, prompt_tokens: int, rng: np.random.Generator) -> float:
    return prediction.mu + 0.5 + 1.8 * prediction.sigma * float(rng.standard_t(NU))


def steeper(prediction: LengthPrediction, prompt_tokens: int, rng: np.random.Generator) -> float:
    """As of a model whose lengths vary more with the prompt."""
    center = prediction.mu + 0.6 * (prediction.mu - 6) - 0.3 * (math.log(prompt_tokens) - 5)
    return center + prediction.sigma * float(rng.standard_t(NU))


def feed(
    calibration: Correction, count: int, lengths: Lengths, cap: int | None = None, **more: Any
) -> list[DriftAlarm]:
    """Outputs of the served model `model`, m unless it is given, drawn with `seed`."""
    model, seed = more.get("model", "m"), more.get("seed", 0)
    rng = np.random.default_rng(seed)
    alarms = []
    for _ in range(count):
        prediction = drawn(rng)
        prompt_tokens = int(np.exp(rng.normal(5, 1))) + 1
        tokens = max(1, round(math.exp(min(lengths(prediction, prompt_tokens, rng), 25.0))))
        cut = tokens if cap is None else min(tokens, cap)
        finished = cap is None or tokens < cap
        observed = outcome(prediction, prompt_tokens, cut, finished=finished, max_tokens=cap)
        alarm = calibration.observe(context(model), observed)
        alarms += [] if alarm is None else [alarm]
    return alarms


def test_without_outputs_a_prediction_stays_as_it_is() -> None:
    prediction = LengthPrediction(5.0, 0.5, NU, "artifact", "3")
    assert Correction().correct(context("m", 100), prediction) is prediction
    calibration = Correction()
    feed(calibration, 200, longer_and_wider)
    assert calibration.correct(context("another", 100), prediction) is prediction
    corrected = calibration.correct(context("m", 100), prediction)
    assert corrected != prediction
    assert (corrected.nu, corrected.artifact_id, corrected.artifact_version) == (NU, "artifact", "3")


@pytest.mark.parametrize("cap", [None, 500], ids=["complete", "a third truncated"])
def test_shift_and_scale_are_found_also_from_truncated_outputs(cap: int | None) -> None:
    calibration = Correction(CorrectionConfig(memory=100_000))
    feed(calibration, 6000, longer_and_wider, cap=cap)
    for mu, sigma in ((5.0, 0.3), (7.0, 0.5)):
        corrected = calibration.correct(context("m", 150), LengthPrediction(mu, sigma, NU))
        assert corrected.mu == pytest.approx(mu + 0.5, abs=0.12)
        assert corrected.sigma == pytest.approx(1.8 * sigma, rel=0.15)
    metrics = calibration.metrics("m")
    assert (metrics["num_outputs"], metrics["num_censored"] > 1500) == (6000, cap is not None)
    for name, level in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        error = 4 * math.sqrt(level * (1 - level) / 150)
        if metrics["after"]["coverage"][name] is not None:
            assert metrics["after"]["coverage"][name] == pytest.approx(level, abs=error)
    assert metrics["before"]["coverage"]["p50"] < 0.4
    assert metrics["after"]["crps"] < metrics["before"]["crps"]


def test_outputs_that_depend_on_prediction_and_prompt_in_another_way_are_learned() -> None:
    calibration = Correction()
    feed(calibration, 1500, steeper)
    corrected = calibration.correct(context("m", 1000), LengthPrediction(7.0, 0.4, NU))
    assert corrected.mu == pytest.approx(7.6 - 0.3 * (math.log(1000) - 5), abs=0.12)
    metrics = calibration.metrics("m")
    assert metrics["after"]["tau"] > metrics["before"]["tau"]
    assert metrics["after"]["crps"] < 0.9 * metrics["before"]["crps"]


def test_50_outputs_of_right_predictions_do_little_harm() -> None:
    rng = np.random.default_rng(9)
    for seed in range(10):
        calibration = Correction()
        feed(calibration, 50, as_predicted, seed=seed)
        for _ in range(20):
            prediction = drawn(rng)
            corrected = calibration.correct(context("m", 150), prediction)
            assert abs(corrected.mu - prediction.mu) < prediction.sigma
            assert 0.5 < corrected.sigma / prediction.sigma < 2.0


def test_a_location_that_is_still_wrong_hardly_widens_the_scale() -> None:
    """After 50 outputs of 2.7 times the predicted lengths; 17 % wider if errors of mu' counted in full."""

    widths = []
    for seed in range(20):
        calibration = Correction()
        feed(calibration, 50, lambda *arguments: 1.0 + as_predicted(*arguments), seed=seed)
        widths.append(math.log(calibration.correct(context("m", 150), TYPICAL).sigma / TYPICAL.sigma))
    assert np.mean(widths) == pytest.approx(0.0, abs=0.08)


def test_aborted_outputs_are_lower_bounds() -> None:
    """Aborted at a random time: shorter than they would have been, and no part of the coverage."""
    rng = np.random.default_rng(3)
    calibration = Correction(CorrectionConfig(memory=100_000))
    for _ in range(4000):
        prediction = LengthPrediction(float(rng.normal(6, 1)), 0.4, NU)
        tokens = max(1, round(math.exp(longer_and_wider(prediction, 1, rng))))
        cut = max(1, round(math.exp(prediction.mu + 0.5 + float(rng.normal()))))
        calibration.observe(context("m"), outcome(prediction, None, min(tokens, cut), finished=tokens <= cut))
    corrected = calibration.correct(context("m"), TYPICAL)
    assert corrected.mu == pytest.approx(6.5, abs=0.12)
    assert corrected.sigma == pytest.approx(0.72, rel=0.15)
    assert calibration.metrics("m")["num_censored"] > 1000
    calibration = Correction()
    calibration.observe(context("m"), outcome(TYPICAL, 10, 20, finished=False, max_tokens=50))
    assert calibration.metrics("m")["num_window"] == 0


def test_a_replaced_model_raises_an_alarm_and_is_learned() -> None:
    calibration = Correction()
    assert not feed(calibration, 2000, longer_and_wider)
    alarms = feed(
        calibration, 1500, lambda one, _, rng: one.mu - 1.0 + 0.6 * one.sigma * float(rng.standard_t(NU)),
        seed=1,
    )  # fmt: skip
    assert alarms
    assert alarms[0].num_outputs > 1500
    assert alarms[0].reason in ("shorter", "wider")
    assert alarms[0].statistic >= 100_000
    corrected = calibration.correct(context("m", 150), TYPICAL)
    assert corrected.mu == pytest.approx(5.0, abs=0.1)
    assert corrected.sigma == pytest.approx(0.24, rel=0.25)
    assert calibration.metrics("m")["num_alarms"] == len(alarms)


def test_old_outputs_are_forgotten_without_an_alarm_too() -> None:
    calibration = Correction(CorrectionConfig(memory=200, arl=1e300))
    feed(calibration, 1000, longer_and_wider)
    assert not feed(calibration, 1500, as_predicted, seed=1)
    corrected = calibration.correct(context("m", 150), TYPICAL)
    assert corrected.mu == pytest.approx(6.0, abs=0.15)
    assert corrected.sigma == pytest.approx(0.4, rel=0.25)


def test_a_correction_that_is_worse_than_none_is_not_used() -> None:
    calibration = Correction(CorrectionConfig(window=100, arl=1e300))
    feed(calibration, 3000, longer_and_wider)
    feed(calibration, 100, as_predicted, seed=1)
    metrics = calibration.metrics("m")
    assert metrics["after"]["crps"] > metrics["before"]["crps"]
    assert metrics["is_used"] is False
    assert calibration.correct(context("m", 150), TYPICAL) is TYPICAL


def test_the_number_of_served_models_and_the_window_are_bounded() -> None:
    calibration = Correction(CorrectionConfig(max_models=3, window=60))
    for model in ("a", "b", "c", "a", "d"):
        feed(calibration, 70, as_predicted, model=model)
    assert calibration.served_models == ("c", "a", "d")
    metrics = calibration.metrics("a")
    assert (metrics["num_outputs"], metrics["num_window"]) == (140, 60)
    with pytest.raises(InputError, match="served_model"):
        calibration.metrics("b")


@pytest.mark.mend  # one client with 64 new names dropped the calibration of every other model
def test_invented_names_displace_no_model() -> None:
    calibration = Correction(CorrectionConfig(max_models=3))
    feed(calibration, 60, longer_and_wider, model="served")
    for number in range(500):
        feed(calibration, 2, as_predicted, model=f"invented {number}")
    assert "served" in calibration.served_models
    assert calibration.metrics("served")["num_outputs"] == 60
    feed(calibration, ADMITTED_OUTPUTS, as_predicted, model="new")
    assert {"served", "new"} < set(calibration.served_models)


def test_a_model_that_is_no_longer_used_is_replaced() -> None:
    calibration = Correction(CorrectionConfig(max_models=2, memory=100))
    feed(calibration, 300, as_predicted, model="old")
    feed(calibration, 500, as_predicted, model="used")
    feed(calibration, 2 * ADMITTED_OUTPUTS, as_predicted, model="new")
    assert calibration.served_models == ("used", "new")


def test_a_state_goes_through_json_and_gives_the_same_corrections() -> None:
    calibration = Correction()
    feed(calibration, 300, steeper, model="a")
    feed(calibration, 30, longer_and_wider, model="b")
    state = json.loads(json.dumps(calibration.state(), allow_nan=False))
    restored = Correction()
    restored.restore(state)
    assert restored.state() == state
    prediction = LengthPrediction(5.0, 0.4, NU)
    for model in ("a", "b"):
        assert restored.correct(context(model, 70), prediction) == calibration.correct(
            context(model, 70), prediction
        )
        assert restored.metrics(model)["num_window"] == 0
    small = Correction(CorrectionConfig(max_models=1))
    small.restore(state)
    assert small.served_models == ("b",)


def broken(**changes: object) -> dict[str, object]:
    calibration = Correction()
    feed(calibration, 30, steeper)
    state = calibration.state()
    [[_, _, content]] = state["pairs"]
    for name, value in changes.items():
        (content if name in content else content["calibrated"])[name] = value
    return state


# An asymmetric matrix, which no observation makes, was accepted and gave wrong corrections.
@pytest.mark.mend
@pytest.mark.parametrize(
    "state",
    [
        [], {}, {"format": "tailcast-online-calibration/1"}, {"format": "tailcast-online-calibration/2"},
        broken() | {"format": "tailcast-online-calibration/9"}, broken(information=[[1.0]]),
        broken(information=(-np.eye(4)[None].repeat(2, 0)).tolist()), broken(response=[[math.nan] * 4] * 2),
        broken(response="x"), broken(num_outputs=None),
        broken(num_outputs=-1), broken(num_censored="1_0"), broken(num_alarms=True), broken(num_outputs=2.5),
        broken(information=[[[math.inf] * 4] * 4] * 2), broken(gain_sums=[math.nan, 0.0]), broken(gain_sums=[1.0]), broken(median_shift=1.5), broken(prior=[[0.0]]),
        broken(information=(np.eye(4) + np.eye(4, k=1) * 0.1)[None].repeat(2, 0).tolist()),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_used_changes_nothing(state: object) -> None:
    calibration = Correction()
    feed(calibration, 30, longer_and_wider, model="own")
    before = calibration.state()
    with pytest.raises(InputError):
        calibration.restore(state)  # type: ignore[arg-type]
    assert calibration.state() == before


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"output_tokens": 0}, "output_tokens"), ({"output_tokens": 2.5}, "output_tokens"),
        ({"output_tokens": math.nan}, "output_tokens"), ({"output_tokens": True}, "output_tokens"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
    ],
)  # fmt: skip
def test_impossible_observations_are_refused(values: dict[str, object], field: str) -> None:
    calibration = Correction()
    arguments = {"prompt_tokens": 5, "output_tokens": 10, "max_tokens": 10, **values}
    with pytest.raises(InputError, match=field):
        calibration.observe(context("m"), outcome(LengthPrediction(5.0, 0.4, NU), **arguments))  # type: ignore[arg-type]
    assert calibration.served_models == ()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*PARAMETERS, *TOKENS, st.booleans()), min_size=1, max_size=80))
def test_any_stream_leaves_all_in_range(stream: list[tuple[float, float, float, int, int, bool]]) -> None:
    """`LengthPrediction` raises outside of it."""
    calibration = Correction()
    for mu, sigma, nu, prompt_tokens, output_tokens, finished in stream:
        prediction = LengthPrediction(mu, sigma, nu)
        calibration.observe(
            context("m"), outcome(prediction, prompt_tokens, output_tokens, finished=finished)
        )
        assert math.isfinite(calibration.correct(context("m", prompt_tokens), prediction).mu)
    json.dumps([calibration.metrics("m"), calibration.state()], allow_nan=False)


def test_crps_and_tau_are_those_of_their_definitions() -> None:
    calibration = Correction()
    rng = np.random.default_rng(5)
    rows = []
    for _ in range(60):
        prediction = LengthPrediction(float(rng.normal(5, 1)), 0.5, NU)
        tokens = max(1, round(math.exp(as_predicted(prediction, 1, rng))))
        calibration.observe(
            context("m"), outcome(prediction, 9, min(tokens, 400), finished=tokens < 400, max_tokens=400)
        )
        rows.append((prediction.mu, math.log(min(tokens, 400))))
    mu, log_length = np.array(rows).T

    def crps(center: float, y: float) -> float:
        def below(at: float) -> float:
            return student_t_cdf((at - center) / 0.5, NU)

        left = integrate.quad(lambda at: below(at) ** 2, center - 60, y, points=[center], limit=200)[0]
        return left + integrate.quad(lambda at: (1 - below(at)) ** 2, y, math.log(400))[0]

    before = calibration.metrics("m")["before"]
    expected = np.mean([crps(center, y) for center, y in zip(mu, log_length, strict=True)])
    assert before["crps"] == pytest.approx(expected, rel=0.03)
    assert before["tau"] == pytest.approx(stats.kendalltau(mu, log_length).statistic, abs=1e-12)


def outcomes_of(
    count: int, lengths: Lengths, *, model: str = "m", seed: int = 0, cap: int | None = None
) -> list[Outcome]:
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        prediction = drawn(rng)
        prompt_tokens = int(np.exp(rng.normal(5, 1))) + 1
        tokens = max(1, round(math.exp(min(lengths(prediction, prompt_tokens, rng), 25.0))))
        finished = cap is None or tokens < cap
        length = tokens if finished else cap
        result.append(
            outcome(prediction, prompt_tokens, length, finished=finished, max_tokens=cap, served_model=model)  # type: ignore[arg-type]
        )
    return result


@pytest.mark.parametrize("cap", [None, 500], ids=["complete", "a third truncated"])
@pytest.mark.parametrize("lengths", [as_predicted, longer_and_wider, steeper])
def test_the_batch_fit_is_the_limit_of_the_online_update(lengths: Lengths, cap: int | None) -> None:
    rows = outcomes_of(3000, lengths, cap=cap)
    fitted = fit(rows)
    online = Correction(CorrectionConfig(memory=1_000_000))
    for row in rows:
        online.observe(context("m"), row)
    learned = online._pairs["", "m"].calibrated.estimate.coefficients
    assert fitted.distance(learned) < 0.05
    prediction = fitted.corrected(TYPICAL, features_of(TYPICAL, 150))
    expected = (6.5, 0.72) if lengths is longer_and_wider else (6.0, 0.4)
    assert prediction.mu == pytest.approx(expected[0], abs=0.08)
    assert prediction.sigma == pytest.approx(expected[1], rel=0.12)


def test_a_served_model_with_few_outputs_is_fitted_like_all_of_them() -> None:
    many, few = outcomes_of(2000, longer_and_wider), outcomes_of(3, longer_and_wider, model="few", seed=1)
    other = outcomes_of(2000, as_predicted, model="other", seed=2)
    fitted = fit_each([*many, *few])
    assert fitted["few"].distance(fitted[""]) < 0.2 < fitted["few"].distance(Coefficients())
    apart = fit_each([*many, *other])
    assert apart["m"].location[0] == pytest.approx(0.5, abs=0.1)
    assert apart["other"].location[0] == pytest.approx(0.0, abs=0.1)
    assert fit([]) == Coefficients()


# Of a log whose outputs were nearly all truncated, the coefficients went to and fro by 0.6 until the last step.
@pytest.mark.mend
def test_the_fit_to_truncated_outputs_converges(monkeypatch: pytest.MonkeyPatch) -> None:
    def much_longer(prediction: LengthPrediction, prompt_tokens: int, rng: np.random.Generator) -> float:
        return 8.0 + 0.5 * float(rng.standard_t(NU))

    rows = outcomes_of(300, much_longer, cap=500)
    fitted = fit(rows)
    monkeypatch.setattr(linear_correction, "MAX_STEPS", linear_correction.MAX_STEPS - 1)
    assert fitted.distance(fit(rows)) < 1e-3
    assert fitted.corrected(TYPICAL, features_of(TYPICAL, 150)).mu > 7.0
