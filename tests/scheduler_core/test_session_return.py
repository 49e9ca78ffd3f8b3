"""Return of sessions: the predicted pause, turns and tokens, what is learned from streams, censoring, bounds, state."""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.agents import returns as benchmark
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.prediction.session import RecursiveRegression
from scheduler_core.prediction.session_return import (
    ENDED_S,
    MAX_GROUPS,
    MAX_KINDS,
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    NUM_BINS,
    PRIOR_PAUSES,
    ReturnPredictor,
    SessionReturn,
)

HAZARDS = st.lists(st.floats(0.0, 3.0), min_size=NUM_BINS, max_size=NUM_BINS).map(np.array)
TIMES_S = st.floats(0.0, 1e6)


def forecast_of(hazards: np.ndarray, end_probability: float = 0.1) -> SessionReturn:
    tokens = LengthPrediction(5.0, 1.0, 3.5)
    return SessionReturn(hazards, ended_s=0.0, end_probability=end_probability, new_tokens=tokens)


@given(HAZARDS, TIMES_S, TIMES_S)
def test_probabilities_are_those_of_the_survival_function(
    hazards: np.ndarray, idle_s: float, horizon_s: float
) -> None:
    forecast = forecast_of(hazards)
    survival, later = forecast.survival(idle_s), forecast.survival(idle_s + horizon_s)
    assert forecast.survival(0.0) == 1.0
    assert 0.0 < later <= survival <= 1.0
    assert forecast.probability_of_return(idle_s, horizon_s) == pytest.approx(1 - later / survival, abs=1e-9)
    assert forecast.survival(1e9) == pytest.approx(math.exp(-hazards.sum()), rel=1e-9)


@given(HAZARDS, st.floats(0.0, 1e5), st.floats(1e-3, 1e5))
def test_expected_pause_is_the_integral_of_survival(
    hazards: np.ndarray, idle_s: float, horizon_s: float
) -> None:
    forecast = forecast_of(hazards)
    edges = MIN_PAUSE_S * np.exp(0.25 * np.arange(NUM_BINS + 1))
    inner = edges[(edges > idle_s) & (edges < idle_s + horizon_s)]
    total = 0.0
    nodes, weights = np.polynomial.legendre.leggauss(30)
    bounds = [idle_s, *inner, idle_s + horizon_s]
    for low, high in pairwise(bounds):
        times = low + (high - low) * (nodes + 1.0) / 2.0
        total += (
            (high - low)
            / 2.0
            * sum(weight * forecast.survival(time) for time, weight in zip(times, weights, strict=True))
        )
    expected = forecast.expected_pause_s(idle_s, horizon_s)
    assert expected == pytest.approx(total / forecast.survival(idle_s), rel=1e-5)
    assert expected <= horizon_s * (1 + 1e-7)


@given(HAZARDS, st.floats(1e-4, 10.0))
def test_contexts_kept_while_their_rate_exceeds_a_price_are_kept_for_the_best_time(
    hazards: np.ndarray, price: float
) -> None:
    """The best time to keep a context is that at which its rate first falls to the price of a second."""
    forecast = forecast_of(hazards)
    edges = MIN_PAUSE_S * np.exp(0.25 * np.arange(NUM_BINS + 1))

    def value(keep_s: float) -> float:
        return (
            1.0
            - forecast.survival(keep_s)
            - price * forecast.expected_pause_s(MIN_PAUSE_S, keep_s - MIN_PAUSE_S)
        )

    below = [time_s for time_s in edges if forecast.return_rate(time_s) <= price]
    values = [value(time_s) for time_s in edges]
    assert value(below[0]) == pytest.approx(max(values), abs=1e-6 * (1 + price))


def test_rate_of_a_constant_hazard_is_this_hazard() -> None:
    edges = MIN_PAUSE_S * np.exp(0.25 * np.arange(NUM_BINS + 1))
    forecast = forecast_of(np.diff(edges) / 1000.0)
    for idle_s in (0.0, 1.0, 300.0, 5000.0):
        assert forecast.return_rate(idle_s) == pytest.approx(1 / 1000.0, rel=0.15)
    assert forecast.return_rate(2 * MAX_PAUSE_S) == 0.0


@given(HAZARDS, st.floats(0.01, 0.99), st.floats(0.0, 1e4))
def test_quantile_is_the_inverse_of_survival(hazards: np.ndarray, level: float, idle_s: float) -> None:
    forecast = forecast_of(hazards)
    quantile = forecast.quantile(level, idle_s)
    if math.isinf(quantile):
        assert forecast.probability_of_return(idle_s, 1e9) < level + 1e-9
    else:
        assert forecast.probability_of_return(idle_s, quantile - idle_s) == pytest.approx(level, abs=1e-6)


def test_turns_that_remain_are_geometric() -> None:
    forecast = forecast_of(np.ones(NUM_BINS), 0.25)
    assert forecast.remaining_turns == pytest.approx(3.0)
    assert 0.75 ** forecast.turns_quantile(0.9) == pytest.approx(0.1)


def test_prior_is_log_t_by_the_end_of_the_turn() -> None:
    predictor = ReturnPredictor()
    for ended_by, (mu, _) in PRIOR_PAUSES.items():
        forecast = predictor.ended(ended_by, 0.0, ended_by=ended_by)
        assert forecast.quantile(0.5) == pytest.approx(math.exp(mu), rel=0.03)


def stream(
    predictor: ReturnPredictor, pauses: Iterator[float], num: int, *, start_s: float = 0.0, **end: object
) -> float:
    """A new session for each pause, one a second; infinite pauses have no return. Returns the last time."""
    rows = [(start_s + number, False, f"{start_s}-{number}") for number in range(num)]
    rows += [(now + pause_s, True, name) for (now, _, name), pause_s in zip(rows, pauses, strict=False)]
    rows = sorted(row for row in rows if row[0] < math.inf)
    for now, is_return, name in rows:
        if is_return:
            predictor.returned(name, now)
        else:
            predictor.ended(name, now, **end)  # type: ignore[arg-type]
    return rows[-1][0]


def lognormal(median_s: float, sigma: float, never: float = 0.0, seed: int = 0) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        pause_s = median_s * math.exp(sigma * rng.standard_normal())
        yield math.inf if rng.random() < never else pause_s


def test_learned_distribution_has_the_quantiles_of_the_pauses() -> None:
    predictor = ReturnPredictor()
    now = stream(predictor, lognormal(20.0, 1.0), 2000, ended_by="tool_use")
    forecast = predictor.ended("new", now, ended_by="tool_use")
    pauses = lognormal(20.0, 1.0, seed=1)
    values = np.array([next(pauses) for _ in range(4000)])
    for level in (0.1, 0.5, 0.9):
        assert abs((values <= forecast.quantile(level)).mean() - level) < 0.03
    for idle_s in (10.0, 60.0):
        rest = values[values > idle_s]
        assert forecast.probability_of_return(idle_s, 30.0) == pytest.approx(
            (rest <= idle_s + 30).mean(), abs=0.08
        )
        expected_s = np.minimum(rest - idle_s, 30.0).mean()
        assert forecast.expected_pause_s(idle_s, 30.0) == pytest.approx(expected_s, rel=0.08)


@pytest.mark.parametrize("never", [0.3, 0.7])
def test_sessions_that_never_return_do_not_bias_those_that_do(never: float) -> None:
    predictor = ReturnPredictor()
    stream(predictor, lognormal(10.0, 0.8, never), 2000, ended_by="x")
    forecast = predictor.ended("new", 2.0 * MAX_PAUSE_S, ended_by="x")
    assert forecast.survival(MAX_PAUSE_S) == pytest.approx(never, abs=0.04)
    returning = (1.0 - forecast.survival(10.0)) / (1.0 - forecast.survival(MAX_PAUSE_S))
    assert returning == pytest.approx(0.5, abs=0.05)
    assert forecast.probability_of_return(1000.0, 600.0) < 0.02
    assert math.isinf(forecast.quantile(0.9))


def test_pauses_that_have_not_ended_yet_count_as_longer() -> None:
    """Half of the sessions return after 5 s; a minute later the others are still idle."""
    predictor = ReturnPredictor()
    for number in range(400):
        predictor.ended(str(number), 0.0, ended_by="x")
    for number in range(0, 400, 2):
        predictor.returned(str(number), 5.0)
    forecast = predictor.ended("new", 60.0, ended_by="x")
    assert forecast.survival(30.0) == pytest.approx(0.5, abs=0.05)


def test_dropped_sessions_do_not_count_as_never_returned() -> None:
    """Sessions that are displaced after a second, before most of them return, leave the distribution as it is."""
    predictor = ReturnPredictor(max_sessions=50)
    now = stream(predictor, lognormal(5.0, 0.5), 50, ended_by="x")
    before = predictor.ended("before", now, ended_by="x").survival(60.0)
    for number in range(5000):
        now += 0.02
        predictor.ended(f"other {number}", now, ended_by="x")
    assert len(predictor) == 50
    assert predictor.ended("after", now, ended_by="x").survival(60.0) == pytest.approx(before, abs=0.1)
    predictor.returned("other 0", now + 2e6)
    assert predictor.forecast("other 0") is None


def test_a_return_after_days_is_no_return_of_the_distribution() -> None:
    predictor = ReturnPredictor()
    before = predictor.ended("a", 0.0, ended_by="x").survival(MAX_PAUSE_S)
    predictor.returned("a", 10 * MAX_PAUSE_S)
    after = predictor.ended("b", 10 * MAX_PAUSE_S, ended_by="x")
    assert after.survival(MAX_PAUSE_S) > before
    assert predictor.forecast("a") is None
    # One that comes a moment before the end of the last bin is counted in it.
    predictor.returned("b", 11 * MAX_PAUSE_S * (1 - 1e-12))
    later = predictor.ended("c", 12 * MAX_PAUSE_S, ended_by="x")
    soon, late = (each.probability_of_return(0.8 * MAX_PAUSE_S, 0.2 * MAX_PAUSE_S) for each in (after, later))
    assert late > soon


def test_coverage_is_that_of_the_quantiles() -> None:
    predictor = ReturnPredictor()
    assert predictor.coverage() == {"p50": None, "p90": None, "p99": None}
    stream(predictor, lognormal(9.0, 1.0, 0.05), 6000, ended_by="tool_use")
    coverage = predictor.coverage()
    assert coverage["p50"] == pytest.approx(0.5, abs=0.05)
    assert coverage["p90"] == pytest.approx(0.9, abs=0.03)
    # 5 % never return: the 99 % quantile is infinite.
    assert coverage["p99"] is None


def test_a_session_with_pauses_of_its_own_differs_from_the_others() -> None:
    predictor = ReturnPredictor()
    now = stream(predictor, lognormal(60.0, 0.5), 300, ended_by="tool_use")
    for _ in range(12):
        predictor.ended("fast", now, ended_by="tool_use")
        now += 2.0
        predictor.returned("fast", now)
    fast = predictor.ended("fast", now, ended_by="tool_use")
    other = predictor.ended("other", now, ended_by="tool_use")
    assert fast.probability_of_return(0.0, 5.0) > 0.7
    assert other.probability_of_return(0.0, 5.0) < 0.1
    # The end of another kind is not predicted from the pauses after tools.
    assert predictor.ended("fast", now, ended_by="end_turn").survival(5.0) > 0.6


@pytest.mark.parametrize(
    "end", [{"tool": "build"}, {"tenant": "slow"}, {"day_s": 3600.0 * 30}, {"ended_by": "end_turn"}]
)
def test_pauses_are_learned_by_tool_tenant_time_of_day_and_end(end: dict[str, object]) -> None:
    predictor = ReturnPredictor()
    common: dict[str, object] = {"ended_by": "tool_use", "day_s": 0.0}
    slow = {**common, **end}
    for number in range(30):
        stream(predictor, lognormal(3.0, 0.3, seed=number), 10, start_s=1e4 * number, **common)
        stream(predictor, lognormal(300.0, 0.3, seed=number), 10, start_s=1e4 * number + 5e3, **slow)
    now = 1e6
    fast_s, slow_s = (
        predictor.ended(f"new {number}", now, **kind).quantile(0.5)  # type: ignore[arg-type]
        for number, kind in enumerate((common, slow))
    )
    # Without a tool or tenant of its own, a pause is one of the group of all.
    assert slow_s > 200.0
    assert slow_s > 2.0 * fast_s


def run_session(predictor: ReturnPredictor, name: str, now: float, num_turns: int, **end: object) -> float:
    for turn in range(num_turns):
        predictor.ended(name, now, **end)  # type: ignore[arg-type]
        if turn + 1 < num_turns:
            now += 3.0
            predictor.returned(name, now)
    return now


def test_turns_that_remain_are_learned_for_each_tenant() -> None:
    predictor, now = ReturnPredictor(), 0.0
    for number in range(150):
        now = run_session(predictor, f"a{number}", now + 30.0, 5, tenant="short")
        now = run_session(predictor, f"b{number}", now + 30.0, 40, tenant="long")
    now += 2 * ENDED_S
    short = predictor.ended("new", now, tenant="short").end_probability
    long = predictor.ended("other", now, tenant="long").end_probability
    assert short == pytest.approx(1 / 5, rel=0.4)
    assert long == pytest.approx(1 / 40, rel=0.4)


def test_sessions_with_more_context_end_sooner_if_others_did() -> None:
    predictor, now = ReturnPredictor(), 0.0
    for number in range(200):
        now = run_session(predictor, f"a{number}", now + 30.0, 20, input_tokens=10_000)
        now = run_session(predictor, f"b{number}", now + 30.0, 4, input_tokens=150_000)
    now += 2 * ENDED_S
    small, large = (
        predictor.ended(str(tokens), now, input_tokens=tokens).remaining_turns for tokens in (10_000, 150_000)
    )
    assert small == pytest.approx(19.0, rel=0.4)
    assert large == pytest.approx(3.0, rel=0.4)


def test_new_tokens_are_those_of_the_session() -> None:
    predictor, now = ReturnPredictor(), 0.0
    for number in range(60):
        tokens, new = 1000, 100 if number % 2 else 3000
        for _ in range(8):
            predictor.ended(f"{number}", now, input_tokens=tokens, output_tokens=200)
            tokens, now = tokens + 200 + new, now + 5.0
            predictor.returned(f"{number}", now, input_tokens=tokens)
    medians = [
        math.exp(predictor.ended(name, now, input_tokens=tokens, output_tokens=9).new_tokens.mu)
        for name in ("58", "59")
    ]
    assert medians == [pytest.approx(3000, rel=0.2), pytest.approx(100, rel=0.2)]


def test_compacted_input_does_not_count_as_new_tokens() -> None:
    predictor = ReturnPredictor()
    before = predictor.ended("a", 0.0, input_tokens=100_000, output_tokens=100).new_tokens
    predictor.returned("a", 1.0, input_tokens=5000)
    assert predictor.ended("a", 2.0, input_tokens=5000, output_tokens=100).new_tokens == before


def test_forecast_is_that_of_the_open_pause() -> None:
    predictor = ReturnPredictor()
    assert predictor.forecast("a") is None
    predictor.returned("a", 0.0)
    forecast = predictor.ended("a", 1.0)
    assert predictor.forecast("a") is forecast
    assert forecast.ended_s == 1.0
    predictor.returned("a", 2.0)
    assert predictor.forecast("a") is None


def test_what_clients_invent_is_bounded() -> None:
    predictor = ReturnPredictor(max_sessions=10)
    for number in range(MAX_GROUPS + 200):
        predictor.ended("a", float(number), ended_by=f"e{number}", tenant=f"t{number}", tool=f"x{number}")
        predictor.returned("a", number + 0.5)
    state = predictor.state()
    assert len(state["groups"]) == MAX_GROUPS
    assert len(state["turns"]["tenants"]) == MAX_GROUPS
    assert len(predictor._sessions["a"].counts) == MAX_KINDS


def test_restored_state_predicts_the_same() -> None:
    predictor = ReturnPredictor()
    now = stream(predictor, lognormal(5.0, 1.0, 0.2), 200, ended_by="tool_use", tenant="t", input_tokens=9)
    now = run_session(predictor, "a", now + ENDED_S, 9, tenant="t", input_tokens=500, output_tokens=7)
    restored = ReturnPredictor()
    restored.restore(predictor.state())
    one, other = (
        each.ended("new", now, ended_by="tool_use", tenant="t", input_tokens=7)
        for each in (predictor, restored)
    )
    assert len(restored) == 1
    assert other.quantile(0.9) == pytest.approx(one.quantile(0.9), rel=1e-5)
    assert other.end_probability == pytest.approx(one.end_probability)
    assert other.new_tokens.mu == pytest.approx(one.new_tokens.mu)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "other/1"),
        ("groups", [["x"], ["y"]]),
        ("groups", [[]]),
        ("counts", np.full((1, 2, NUM_BINS), np.nan)),
        ("counts", np.zeros((1, 2, 3))),
        ("new_tokens", {"gram": [[1.0]], "response": [1.0]}),
        ("turns", {"gram": [[1.0, 0.0], [0.0, -1.0]], "response": [0.0, 0.0], "tenants": []}),
        ("turns", {"gram": [[1.0, 0.0], [0.0, 1.0]], "response": [0.0, 0.0], "tenants": [["a", -1.0, 1.0]]}),
    ],
)
def test_invalid_state_changes_nothing(name: str, value: object) -> None:
    predictor = ReturnPredictor()
    predictor.ended("a", 0.0, ended_by="x")
    predictor.returned("a", 5.0)
    state = predictor.state()
    with pytest.raises(InputError, match="state cannot be used"):
        predictor.restore({**state, name: value})
    assert predictor.state()["groups"] == [["x"]]


@pytest.mark.parametrize("num", [0, -3])
def test_number_of_sessions_is_checked(num: int) -> None:
    with pytest.raises(InputError, match="max_sessions"):
        ReturnPredictor(max_sessions=num)


def test_recursive_regression_is_ridge_regression() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((200, 3)), rng.standard_normal(200)
    regression = RecursiveRegression((1.0, 2.0, 3.0), 4.0, 10**12)
    for row, value in zip(x, y, strict=True):
        regression.observe(row, float(value))
    coefficients = np.linalg.solve(x.T @ x + np.diag((1.0, 2.0, 3.0)), x.T @ (y - 4.0))
    assert regression.predict(x[0]) == pytest.approx(4.0 + float(coefficients @ x[0]), rel=1e-6)


def test_true_returns_are_those_of_the_next_turn() -> None:
    returns = benchmark.TrueReturns({"a": [4.0, None]})
    first = returns.ended("a", 10.0, ended_by="tool_use", input_tokens=5, output_tokens=5)
    assert returns.forecast("a") is first
    assert [first.survival(3.9), first.survival(4.0), first.probability_of_return(1.0, 3.0)] == [
        1.0,
        0.0,
        1.0,
    ]
    assert (first.expected_pause_s(1.0, 10.0), first.return_rate(2.0), first.quantile(0.1)) == (3.0, 0.5, 4.0)
    returns.returned("a", 14.0, input_tokens=20)
    assert returns.forecast("a") is None
    last = returns.ended("a", 15.0)
    assert (last.probability_of_return(0.0, 1e9), last.return_rate(0.0)) == (0.0, 0.0)
    assert last.expected_pause_s(5.0, 60.0) == 60.0


def test_benchmark_of_recorded_sessions(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    rng, rows = np.random.default_rng(0), []
    for number in range(12):
        time_s, tokens = 0.0, 1000
        for turn in range(10):
            pause_s = float(round(3.0 + 10.0 * number * rng.random()))
            rows.append(
                {
                    "session": f"trace_{number}", "agent": "main", "time_s": time_s, "input_tokens": tokens,
                    "output_tokens": 50, "stop": "tool_use" if turn % 3 else "end_turn",
                    "think_time_s": pause_s if turn else 0.0, "api_time_s": 4.0,
                }
            )  # fmt: skip
            time_s, tokens = time_s + 4.0 + pause_s, tokens + 150
    file = str(tmp_path / "sessions.parquet")
    pq.write_table(pa.Table.from_pylist(rows), file)
    turns = benchmark.read_turns(file, sessions="all")
    first, *_, last = turns["trace_0 main"]
    assert (first.pause_s, first.growth_tokens, first.remaining_turns) == (3.0, 150, 9)
    assert (last.pause_s, last.growth_tokens, last.remaining_turns) == (None, None, 0)
    assert benchmark.main([file, "--sessions", "all"]) == 0
    output = capsys.readouterr().out
    assert "120 turns of 12 sessions" in output
    table = [line.split("|") for line in output.splitlines() if line.startswith("| true returns")]
    assert table[0][4].strip() == "0.000"
    assert table[0][6].strip() == "1.000 / 1.000 / 1.000"
