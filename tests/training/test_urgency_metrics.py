"""Metrics, reliability, abstention and the adversarial check of urgency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom
from sklearn.metrics import cohen_kappa_score, f1_score

from data_gen.urgency.seed_set import read_pairs
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS
from training.urgency.abstention import ClaimRows, choose_threshold, failures
from training.urgency.claims import check_claims
from training.urgency.metrics import (
    Rate,
    reliability,
    top_level,
    upper_bound,
    urgency_metrics,
    write_reliability_figure,
)

K = len(LEVELS)
levels = st.lists(st.tuples(st.integers(0, K - 1), st.integers(0, K - 1)), min_size=1, max_size=60)


@given(pairs=levels)
def test_metrics_agree_with_scikit_learn_and_with_each_other(pairs: list[tuple[int, int]]) -> None:
    true, predicted = np.array(pairs).T
    found = urgency_metrics(true, predicted)
    assert found.accuracy.value == pytest.approx(np.mean(true == predicted))
    if found.kappa is not None:
        reference = cohen_kappa_score(true, predicted, weights="quadratic", labels=range(K))
        assert found.kappa == pytest.approx(reference)
    there = sorted(set(true.tolist()))
    assert found.macro_f1 == pytest.approx(
        f1_score(true, predicted, labels=there, average="macro", zero_division=0)
    )
    shares = [found.accuracy.value, found.under_triage.value, found.over_triage.value]
    assert sum(share for share in shares if share is not None) == pytest.approx(1)
    assert sum(sum(row) for row in found.confusion) == len(pairs)


def test_triage_rates_by_hand() -> None:
    true = [0, 0, 0, 1, 1, 2, 3, 4, 4, 4]
    predicted = [0, 1, 4, 1, 2, 1, 3, 4, 0, 3]
    found = urgency_metrics(true, predicted)
    assert found.recalls[0] == Rate(1, 3)
    assert found.recalls[1] == Rate(1, 2)
    assert found.critical_recall == Rate(3, 5)
    assert found.under_triage == Rate(3, 10)
    assert found.over_triage == Rate(3, 10)
    assert found.critical_under_triage == Rate(3, 5)
    assert found.emergency_under_triage == Rate(2, 3)
    assert found.critical_over_triage == Rate(2, 5)
    assert found.within_one == Rate(8, 10)


def test_checkpoints_are_selected_by_under_triage_of_critical_levels_first() -> None:
    true = [0, 1, 2, 3, 4, 4, 4, 4]
    careful = urgency_metrics(true, [0, 1, 1, 2, 3, 3, 3, 3])
    accurate = urgency_metrics(true, [0, 2, 2, 3, 4, 4, 4, 4])
    assert (accurate.accuracy.value or 0) > (careful.accuracy.value or 0)
    assert careful.selection_key < accurate.selection_key


def test_a_constant_has_kappa_zero_and_one_level_none() -> None:
    assert urgency_metrics([0, 1, 4], [2, 2, 2]).kappa == pytest.approx(0)
    assert urgency_metrics([2, 2], [2, 2]).kappa is None
    assert urgency_metrics([2, 2], [2, 2]).critical_recall.to_json()["value"] is None


@pytest.mark.parametrize(("true", "predicted"), [([], []), ([0], [0, 1]), ([5], [0]), ([0.5], [0])])
def test_what_is_no_level_is_refused(true: list[float], predicted: list[float]) -> None:
    with pytest.raises(InputError):
        urgency_metrics(true, predicted)


@given(num_cases=st.integers(1, 200), data=st.data(), delta=st.floats(0.001, 0.5))
def test_clopper_pearson_bounds_are_where_the_tail_is_delta(
    num_cases: int, data: st.DataObject, delta: float
) -> None:
    hits = data.draw(st.integers(0, num_cases))
    high, low = upper_bound(hits, num_cases, delta), 1 - upper_bound(num_cases - hits, num_cases, delta)
    assert low <= hits / num_cases <= high or delta > 0.4
    if hits < num_cases:
        assert binom.cdf(hits, num_cases, high) == pytest.approx(delta, rel=1e-6)
    if hits > 0:
        assert binom.sf(hits - 1, num_cases, low) == pytest.approx(delta, rel=1e-6)
    assert upper_bound(0, 0, delta) == 1.0


def test_reliability_counts_and_error_by_hand() -> None:
    said = np.array([0.05, 0.05, 0.95, 1.0])
    happened = np.array([False, True, True, True])
    found = reliability(said, happened)
    assert [entry.count for entry in found.bins] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert found.bins[0].frequency == pytest.approx(0.5)
    assert found.bins[1].mean_probability is None
    assert found.ece == pytest.approx(0.5 * 0.45 + 0.5 * 0.025)


def test_probabilities_that_come_true_have_little_calibration_error() -> None:
    random = np.random.default_rng(0)
    rows = random.dirichlet(np.full(K, 0.5), size=20_000)
    true = np.array([random.choice(K, p=row) for row in rows])
    assert top_level(rows, true).ece < 0.02
    assert top_level(rows, (true + 1) % K).ece > 0.2


def test_the_figure_is_a_png(tmp_path: Path) -> None:
    rows = np.array([[0.6, 0.4, 0, 0, 0], [0.1, 0.2, 0.3, 0.4, 0]])
    path = tmp_path / "figure.png"
    write_reliability_figure(path, {"most likely level": top_level(rows, np.array([0, 2]))})
    assert path.read_bytes().startswith(b"\x89PNG")


def predictions(random: np.random.Generator, num: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities whose failures get rarer the surer they are, but not as rare as they say."""
    sureness = random.uniform(0.25, 0.99, size=num)
    guess = random.integers(0, K, size=num)
    rows = np.repeat(((1 - sureness) / (K - 1))[:, None], K, axis=1)
    rows[np.arange(num), guess] = sureness
    wrong = random.random(num) > sureness**0.5
    true = np.where(wrong, random.integers(0, K, size=num), guess)
    return rows, true


def test_a_chosen_threshold_keeps_its_rate_as_often_as_promised() -> None:
    random = np.random.default_rng(3)
    rows, true = predictions(random, 200_000)
    confidence, failed = rows.max(axis=1), failures(rows, true, "wrong")
    rate, delta, runs, broken, certified = 0.15, 0.1, 300, 0, 0
    for _ in range(runs):
        sample = random.integers(0, len(true), size=300)
        found = choose_threshold(rows[sample], true[sample], allowed_rate=rate, delta=delta, risk="wrong")
        if found.threshold is not None:
            certified += 1
            broken += bool(failed[confidence >= found.threshold].mean() > rate)
    assert certified > runs / 2
    # Three standard errors above delta.
    assert broken / runs <= delta + 3 * (delta * (1 - delta) / runs) ** 0.5


def test_perfect_predictions_never_abstain_and_hopeless_ones_always() -> None:
    true = np.tile(np.arange(K), 40)
    perfect = choose_threshold(np.eye(K)[true], true)
    assert perfect.threshold == 0
    assert (perfect.num_answered, perfect.num_failures) == (len(true), 0)
    hopeless = choose_threshold(np.eye(K)[np.full(len(true), 4)], true)
    assert (hopeless.threshold, hopeless.num_answered, hopeless.bound) == (None, 0, None)


def sure(levels: NDArray[np.int64], sureness: float) -> NDArray[np.float64]:
    """Probabilities of `sureness` for the levels, the rest shared."""
    rows = np.full((len(levels), K), (1 - sureness) / (K - 1))
    rows[np.arange(len(levels)), levels] = sureness
    return rows


def test_claims_that_are_half_believed_raise_the_threshold() -> None:
    true = np.tile(np.arange(K), 60)
    tiers = np.tile(np.arange(1, K), 30)
    claims = ClaimRows(plain=sure(tiers, 0.95), claimed=sure(np.zeros_like(tiers), 0.6), tiers=tiers)
    assert choose_threshold(sure(true, 0.95), true).threshold == 0
    found = choose_threshold(sure(true, 0.95), true, claims=claims)
    assert found.threshold == 0.61
    assert found.jumps is not None
    assert (found.jumps.num_jumps, found.jumps.num_pairs) == (0, len(tiers))
    assert 0 < found.jumps.bound <= found.jumps.allowed_rate
    believed = ClaimRows(plain=claims.plain, claimed=sure(np.zeros_like(tiers), 0.95), tiers=tiers)
    assert choose_threshold(sure(true, 0.95), true, claims=believed).threshold is None


def test_a_threshold_certified_for_claims_keeps_their_rate_as_often_as_promised() -> None:
    random = np.random.default_rng(4)
    num = 20_000
    rows, true = predictions(random, num)
    tiers = np.full(num, 2)
    # The surer a claimed text looks, the less often a claim did it.
    sureness = random.uniform(0.25, 0.99, size=num)
    level = np.where(random.random(num) > 2.2 * (1 - sureness) * 0.3, 2, 0)
    claimed = sure(level, 0.0)
    claimed[:] = ((1 - sureness) / (K - 1))[:, None]
    claimed[np.arange(num), level] = sureness
    plain = sure(tiers, 0.99)
    whole = ClaimRows(plain=plain, claimed=claimed, tiers=tiers)
    rate, delta, runs, broken, certified = 0.1, 0.1, 100, 0, 0
    for _ in range(runs):
        some = random.integers(0, num, size=300)
        claims = ClaimRows(plain=plain[some], claimed=claimed[some], tiers=tiers[some])
        found = choose_threshold(
            rows[some], true[some], allowed_rate=0.9, delta=delta, risk="wrong", claims=claims, jump_rate=rate
        )
        if found.threshold is not None:
            certified += 1
            before, after = whole.scheduled(found.threshold)
            broken += bool(np.mean(after < before) > rate)
    assert certified > runs / 2
    assert broken / runs <= delta + 3 * (delta * (1 - delta) / runs) ** 0.5


def test_too_few_texts_certify_nothing() -> None:
    true = np.array([0, 1, 2, 3, 4])
    assert choose_threshold(np.eye(K)[true], true, allowed_rate=0.1, delta=0.1).threshold is None


@pytest.mark.parametrize(
    "options",
    [{"allowed_rate": 0.0}, {"allowed_rate": 1.0}, {"delta": 0.0}, {"risk": "bad"}, {"jump_rate": 0.0}],
)
def test_a_threshold_needs_sensible_options(options: dict[str, float]) -> None:
    with pytest.raises(InputError):
        choose_threshold(np.eye(K), np.arange(K), **options)  # type: ignore[arg-type]


def loud(texts: Sequence[str]) -> NDArray[np.float64]:
    """Takes an exclamation mark or a word in capitals for an emergency."""
    shouts = [any(word.isupper() and len(word) > 3 for word in text.split()) or "!" in text for text in texts]
    return np.array([np.eye(K)[0 if shout else 3] for shout in shouts])


def deaf(texts: Sequence[str]) -> NDArray[np.float64]:
    """Finds everything ordinary."""
    return np.tile(np.eye(K)[2], (len(texts), 1))


def test_a_predictor_that_listens_to_shouting_fails_and_is_described() -> None:
    pairs = read_pairs()
    found = check_claims(loud, pairs, threshold=0.0, max_promotion=1)
    assert not found.passed
    assert (found.predicted.jumped.value or 0) > 0.4
    assert found.decided.levels.keys() == {3}
    assert found.neutral.jumped.value == 0
    assert found.scheduled_max_levels == 1, "promotion is limited"
    assert set(found.by_position) == {"before", "middle", "after"}
    assert len(found.examples) == 20
    assert found.to_json()["passed"] is False


def test_a_predictor_that_does_not_listen_passes() -> None:
    found = check_claims(deaf, read_pairs("test"))
    assert found.passed
    assert found.passed_unguarded
    assert found.decided.jumped.num_hits == found.decided.fell.num_hits == 0
    assert found.examples == ()


def test_a_predictor_for_which_everything_is_an_emergency_cannot_pass() -> None:
    found = check_claims(lambda texts: np.tile(np.eye(K)[0], (len(texts), 1)), read_pairs())
    assert found.decided.jumped.value is None
    assert not found.passed_unguarded
    assert found.passed, "it abstains always: nobody gains in the queue"


def test_the_check_needs_pairs_and_a_rate() -> None:
    with pytest.raises(InputError, match="pairs"):
        check_claims(deaf, [])
    with pytest.raises(InputError, match="allowed_rate"):
        check_claims(deaf, read_pairs(), allowed_rate=2.0)
