"""Predicted quantiles as a distribution, against integrals over its quantile function, and all that orders requests by it."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.lengths import LogQuantiles, LogT
from scheduler_core.lengths import quantiles as by_quantiles
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.lengths.standard import FloatArray
from scheduler_core.policies import make_policy
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.replay import replay
from scheduler_core.request import RequestState
from scheduler_core.routing.predicted_work import PredictedWork
from tests.properties import examples
from tests.scheduler_core.helpers import request, scheduler
from tests.scheduler_core.routing.helpers import item, replica, running

NU = 3.5
CAPS = st.floats(0.0, 11.0).map(math.exp)
#: Most of the gaps some tenths wide, some of them 0.
QUANTILES = st.builds(
    lambda start, gaps: tuple(np.cumsum([start, *gaps]).tolist()),
    st.floats(0.0, 6.0),
    st.lists(st.floats(1e-3, 0.5) | st.just(0.0), min_size=22, max_size=22).filter(lambda gaps: gaps[-1] > 0),
)
#: Steps: many quantiles are equal.
EQUAL = tuple(np.repeat([0.0, 0.1, 0.6, 0.9, 1.4, 2.0, 2.5], [1, 3, 6, 4, 4, 4, 1]).tolist())
#: Shorter, and with a longer tail, than the log-t that stands beside them.
SKEWED = tuple((5.0 + np.array([-0.5, *np.linspace(-0.4, 0.2, 19), 1.5, 2.5, 3.2])).tolist())


def levels(start: float, end: float) -> FloatArray:
    """Nodes between two levels, dense where the quantile function bends and in its tail."""
    inner = [level for level in LEVELS if start < level < end]
    tail = [1 - (1 - LEVELS[-1]) * 0.9**power for power in range(1, 250)]
    edges = np.unique([start, *inner, *(level for level in tail if start < level < end), end])
    return np.concatenate([np.linspace(*pair, 200) for pair in pairwise(edges)])


def integral(length: LogQuantiles, start: float, cap: float) -> float:
    """Mean of min(X, cap) where X is beyond its quantile of that level."""
    nodes = levels(start, 1.0)
    return float(np.trapezoid(np.minimum(length.ppf(nodes), cap), nodes)) / (1 - start)


@example(EQUAL, math.e, 0.5, 0.0)
@given(QUANTILES, CAPS, st.floats(0.005, 0.995), st.floats(0.0, 1.0))
@examples(60)
def test_all_numbers_follow_from_the_quantile_function(
    quantiles: tuple[float, ...], cap: float, level: float, fraction: float
) -> None:
    length = LogQuantiles(quantiles)
    np.testing.assert_allclose(length.logppf(LEVELS), quantiles, atol=1e-12)
    x = float(length.ppf(level))
    assert float(length.cdf(x * (1 + 2e-6))) >= level - 1e-9, "a step of F is at most 1e-6 wide"
    assert float(length.cdf(x * (1 - 2e-6))) <= level + 1e-9
    assert float(length.sf(x)) == pytest.approx(1 - float(length.cdf(x)), abs=1e-12)
    assert by_quantiles.cdf(quantiles, x * (1 + 2e-6)) >= level - 1e-9
    assert by_quantiles.cdf(quantiles, x * (1 - 2e-6)) <= level + 1e-9
    if level >= 0.5:
        one = by_quantiles.expected_and_cvar(quantiles, cap, level)
        assert one == pytest.approx(length.expected_and_cvar(level, cap), rel=1e-5)
    mean, tail_mean = map(float, length.expected_and_cvar(level, cap))
    assert 0 < mean <= tail_mean <= cap
    assert mean == pytest.approx(integral(length, 0.0, cap), rel=2e-3)
    assert tail_mean == pytest.approx(integral(length, level, cap), rel=5e-3)
    assert float(length.cvar(0.0, cap)) == pytest.approx(mean, rel=1e-9)
    done = fraction * min(cap, math.exp(quantiles[-1]))
    rest = float(length.expected(cap, done))
    assert 0 <= rest <= cap - done
    outlived = float(length.cdf(done))
    assert rest == pytest.approx(integral(length, outlived, cap) - done, rel=5e-3, abs=1e-3 * cap)
    table = LengthPrediction(quantiles[11], 0.5, NU, quantiles=quantiles).table(max(1, round(cap)))
    in_whole_tokens = float(length.expected(max(1, round(cap))))
    assert table.expected_remaining() == pytest.approx(in_whole_tokens, rel=0.02, abs=1.0)


def test_quantiles_of_a_log_t_are_that_log_t_between_them() -> None:
    exact = LogT(5.0, 0.6, NU)
    length = LogQuantiles(exact.logppf(LEVELS))
    x = np.exp(np.linspace(3.5, 6.5, 50))
    np.testing.assert_allclose(length.cdf(x), exact.cdf(x), atol=0.01)
    assert length.expected(4000) == pytest.approx(float(exact.expected(4000)), rel=0.02)
    mass = float(length.cdf(x[-1]) - length.cdf(x[0]))
    assert np.trapezoid(np.exp(length.logpdf(x)) * x, np.log(x)) == pytest.approx(mass, abs=0.01)
    assert length.ppf([0.0, 1.0]).tolist() == [0.0, math.inf]
    assert length.pdf([0.0, -1.0]).tolist() == [0.0, 0.0]


def test_far_in_the_tail_what_is_left_is_that_of_a_power_law() -> None:
    rest = 1 - math.log(2.5) / (SKEWED[-1] - SKEWED[-2])
    for done in (1e5, 1e80):
        expected = done * math.expm1(rest * math.log(1.5)) / rest
        assert LogQuantiles(SKEWED).expected(done * 1.5, done) == pytest.approx(expected, rel=1e-9)


def test_rows_equal_each_alone() -> None:
    rows = [SKEWED, tuple(np.linspace(2, 9, 23))]
    both, cap = LogQuantiles(rows), np.array([100.0, 4000.0])
    for number, row in enumerate(rows):
        one = LogQuantiles(row)
        alone = float(one.expected(cap[number], 20))
        assert both.expected(cap, 20)[number] == pytest.approx(alone, rel=1e-12)
        assert both.cvar(0.9, cap)[number] == pytest.approx(float(one.cvar(0.9, cap[number])), rel=1e-12)
        for method in ("cdf", "sf", "logsf", "pdf", "logpdf"):
            np.testing.assert_allclose(getattr(both, method)(cap)[number], getattr(one, method)(cap[number]))
        np.testing.assert_allclose(both.ppf(0.3)[number], one.ppf(0.3))


@pytest.mark.parametrize(
    "quantiles", [SKEWED[:-1], SKEWED[::-1], (*SKEWED[:-1], 51.0), (*SKEWED[:-1], math.nan)]
)
def test_what_is_no_distribution_is_refused(quantiles: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match=r"^predicted quantiles: got .*; allowed: 23 non-decreasing numbers"):
        LengthPrediction(5.0, 0.5, NU, quantiles=quantiles)
    if quantiles[-1] != 51.0:
        with pytest.raises(InputError, match="^quantiles: got"):
            LogQuantiles(quantiles)
    length = LogQuantiles(SKEWED)
    for call in (lambda: length.expected(10, 11), lambda: length.cvar(1.0, 10), lambda: length.expected(0)):
        with pytest.raises(InputError):
            call()


def state(length: LengthPrediction, name: str = "r") -> RequestState:
    return RequestState(request(name, cap=1000), order=0, prediction=length)


def test_policies_and_routers_order_by_the_quantiles() -> None:
    plain = LengthPrediction(5.0, 0.4, NU)
    skewed = LengthPrediction(5.0, 0.4, NU, quantiles=SKEWED)
    exact = LogQuantiles(SKEWED)
    mean, tail_mean = map(float, exact.expected_and_cvar(0.9, 1000))
    assert skewed.expected_and_cvar(1000) == pytest.approx((mean, tail_mean))
    with pytest.raises(InputError, match="alpha in"):
        skewed.expected_and_cvar(1000, 0.4)
    for name, expected in {"tie": math.log(mean + 0.1 * tail_mean), "sept": mean, "trail": mean}.items():
        policy = make_policy(name)
        for each in (plain, skewed):
            policy.on_prediction(state(each, str(each is plain)))
        assert policy.key(state(skewed, "False"), 0.0) == pytest.approx(expected, rel=0.01), name
        assert policy.key(state(plain, "True"), 0.0) < 0.98 * expected, name
    views = [
        running(str(number), 1, done=160, cap=1000)._replace(prediction=each)
        for number, each in enumerate((plain, skewed, None))
    ]
    router, one = PredictedWork(prefill_token_s=0.0, decode_token_s=1.0), replica("a", *views)
    router.choose(item(), [one], 0.0)
    rest = [LogT(5.0, 0.4, NU).expected(1000, 160), exact.expected(1000, 160), 841 / 2]
    assert router.work_s(one) == pytest.approx(float(sum(rest)))


def test_online_calibration_moves_the_quantiles_with_mu_and_sigma() -> None:
    rng = np.random.default_rng(0)
    calibration = Correction()
    prediction = LengthPrediction(SKEWED[11], 0.4, NU, "a", "1", SKEWED)
    for _ in range(300):
        tokens = max(1, round(math.exp(prediction.mu + 0.5 + 0.8 * rng.standard_normal())))
        calibration.observe(
            RequestContext(served_model="m"),
            Outcome(prediction=prediction, prompt_tokens=100, output_tokens=tokens),
        )
    corrected = calibration.correct(RequestContext(served_model="m", prompt_tokens=100), prediction)
    assert corrected.mu == pytest.approx(prediction.mu + 0.5, abs=0.2)
    standard = [(np.array(each.quantiles) - each.mu) / each.sigma for each in (prediction, corrected)]
    np.testing.assert_allclose(*standard, atol=1e-9)
    assert corrected.distribution().ppf(0.5) == pytest.approx(math.exp(corrected.mu))
    assert max(prediction.moved(49.0, 9.0).quantiles) == 50.0


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_online_calibration_keeps_correct_quantiles_and_corrects_others(shift: float) -> None:
    prediction = LengthPrediction(SKEWED[11], 0.4, NU, quantiles=SKEWED)
    calibration = Correction()
    for level in np.random.default_rng(0).random(1000).tolist():
        tokens = max(1, round(math.exp(shift) * float(LogQuantiles(SKEWED).ppf(level))))
        calibration.observe(
            RequestContext(served_model="m"),
            Outcome(prediction=prediction, prompt_tokens=100, output_tokens=tokens),
        )
    found = calibration.metrics("m")
    assert found["after"]["coverage"] == pytest.approx({"p50": 0.5, "p90": 0.9, "p99": 0.99}, abs=0.06)
    assert found["before"]["coverage"]["p90"] == pytest.approx(
        0.9 if shift == 0 else 0.2, abs=0.05 + shift / 3
    )
    assert found["num_alarms"] == 0
    assert calibration.correct(
        RequestContext(served_model="m", prompt_tokens=100), prediction
    ).mu == pytest.approx(prediction.mu + shift, abs=0.15)


def test_a_decision_log_keeps_quantiles_and_one_without_is_as_before() -> None:
    for quantiles in ((), SKEWED):
        log = DecisionLog()
        core = scheduler("tie", log=log)
        core.add(request("r"), 0.0)
        core.update("r", Prediction(length=LengthPrediction(5.0, 0.4, NU, quantiles=quantiles)), 0.0)
        entries = json.loads(json.dumps(log.entries))
        assert ("quantiles" in entries[-1]["prediction"]["length"]) is bool(quantiles)
        assert replay(entries).counters == core.counters
