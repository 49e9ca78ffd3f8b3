from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import beta, betainc

from data_gen.backend import SamplingSettings, Work, sample_seed, uniforms
from data_gen.prompts import Message, Prompt
from data_gen.synthetic_backend import SyntheticBackend, SyntheticOptions, TerminationMixture
from scheduler_core.errors import InputError

SETTINGS = SamplingSettings(num_samples=6, max_tokens=200, temperature=1.0, top_p=1.0, seed=5)


def survival(mixture: TerminationMixture, tokens: int) -> float:
    """P(N > tokens), exactly."""
    shape = (mixture.alpha, tokens + 1)
    return float(
        mixture.alpha * mixture.p_max**-mixture.alpha * beta(*shape) * betainc(*shape, mixture.p_max)
    )


def lengths(mixture: TerminationMixture, count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.Generator(np.random.PCG64(seed)).random((count, 2))
    return np.array([mixture.length(first, second) for first, second in drawn])


@given(st.floats(0.3, 6), st.floats(0.002, 1), st.integers(0, 3000))
def test_survival_is_the_mixture_of_geometrics(alpha: float, p_max: float, tokens: int) -> None:
    """Against the integral over the logarithm of the rate."""

    def density(log_rate: float) -> float:
        rate = math.exp(log_rate)
        return alpha * (rate / p_max) ** alpha * (1 - rate) ** tokens

    high = math.log(p_max)
    low = high - 40 / alpha
    peak = min(high, math.log(alpha / (alpha + tokens)))
    expected, _ = quad(
        density, low, high, points=sorted({max(low, peak - 3), max(low, peak), high}), limit=500
    )
    assert survival(TerminationMixture(alpha, p_max), tokens) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.8, 1.5, 3.0])
@pytest.mark.parametrize("p_max", [1.0, 0.02])
def test_drawn_lengths_follow_the_survival_function(alpha: float, p_max: float) -> None:
    """Shares of 20,000 lengths beyond a point, within 4 standard errors."""
    mixture = TerminationMixture(alpha, p_max)
    drawn = lengths(mixture, 20_000)
    assert drawn.min() >= 1
    for tokens in (1, int(1 / p_max), int(4 / p_max), int(20 / p_max)):
        share = survival(mixture, tokens)
        error = math.sqrt(share * (1 - share) / len(drawn))
        assert (drawn > tokens).mean() == pytest.approx(share, abs=4 * error)


@pytest.mark.parametrize("alpha", [0.8, 1.5, 2.5])
def test_the_tail_index_is_alpha(alpha: float) -> None:
    """Hill's estimator over the 400 longest of 200,000: standard error alpha / 20."""
    drawn = np.sort(lengths(TerminationMixture(alpha, 0.05), 200_000, seed=1))[::-1]
    hill = 1 / np.log(drawn[:400] / drawn[400]).mean()
    assert hill == pytest.approx(alpha, rel=0.2)
    # Theorem 3.2: n^alpha P(N > n) tends to Gamma(alpha + 1) p_max^-alpha.
    limit = math.gamma(alpha + 1) * 0.05**-alpha
    assert survival(TerminationMixture(alpha, 0.05), 100_000) * 100_000**alpha == pytest.approx(
        limit, rel=1e-3
    )


def answers(
    prompts: list[Prompt], settings: SamplingSettings, indices: tuple[int, ...]
) -> dict[tuple[str, int], object]:
    results = SyntheticBackend().sample((Work(prompt, indices) for prompt in prompts), settings)
    return {(r.prompt.prompt_id, answer.sample_index): answer for r in results for answer in r.outputs}


def test_an_answer_depends_on_seed_prompt_and_index_alone() -> None:
    prompts = [Prompt(f"p{i}", "one two") for i in range(20)]
    everything = answers(prompts, SETTINGS, (0, 1, 2, 3, 4, 5))
    assert len(everything) == 120
    part = answers(prompts[7:3:-1], SETTINGS, (4, 2))
    assert part == {key: everything[key] for key in part}
    other = answers(prompts, SamplingSettings(6, 200, 1.0, 1.0, seed=6), (0, 1, 2, 3, 4, 5))
    assert sum(other[key] != everything[key] for key in everything) > 60


def test_long_answers_are_cut_and_prompts_differ() -> None:
    prompts = [
        Prompt(f"p{i}", "one two", messages=(Message("system", "be"), Message("user", "a b")))
        for i in range(200)
    ]
    backend = SyntheticBackend()
    results = list(backend.sample([Work(prompt, (0, 1)) for prompt in prompts], SETTINGS))
    found = [answer for result in results for answer in result.outputs]
    for answer in found:
        assert 1 <= answer.output_tokens <= 200
        assert answer.finish_reason == "stop" or answer.output_tokens == 200
    assert {result.prompt_tokens for result in results} == {3}
    assert 0 < sum(answer.finish_reason == "length" for answer in found) < 200
    options = SyntheticOptions()
    mixtures = [TerminationMixture.of(prompt.prompt_id, options) for prompt in prompts]
    assert all(options.min_alpha <= mixture.alpha <= options.max_alpha for mixture in mixtures)
    assert all(
        options.min_typical_tokens <= 1 / m.p_max <= options.max_typical_tokens * 1.001 for m in mixtures
    )
    assert len({mixture.alpha for mixture in mixtures}) == 200
    assert (backend.name, backend.served_model) == ("synthetic", "synthetic")


@given(
    st.floats(0.1, 10),
    st.floats(0.001, 1),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
)
def test_any_uniform_numbers_give_a_length(alpha: float, p_max: float, first: float, second: float) -> None:
    length = TerminationMixture(alpha, p_max).length(first, second)
    assert length >= 1
    assert math.isinf(length) or length == int(length)


@pytest.mark.parametrize(
    "options",
    [
        {"min_alpha": 0.0},
        {"min_alpha": 5.0},
        {"min_typical_tokens": 0.5},
        {"min_typical_tokens": 301.0},
        {"samples_per_s": 0.0},
    ],
)
def test_bad_options_are_named(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        SyntheticOptions(**options)


def test_streams_of_answers_are_independent() -> None:
    assert np.array_equal(uniforms(1, "p", 0, 8), uniforms(1, "p", 0, 16)[:8])
    keys = [(seed, prompt, index) for seed in (1, 2) for prompt in ("p", "q") for index in (0, 1)]
    assert len({tuple(uniforms(*key, 4)) for key in keys}) == len({sample_seed(*key) for key in keys}) == 8
    assert all(0 <= sample_seed(*key) < 2**31 for key in keys)
    values = uniforms(0, "p", 0, 20_000)
    assert values.min() >= 0
    assert values.max() < 1
    assert values.mean() == pytest.approx(0.5, abs=0.01)
