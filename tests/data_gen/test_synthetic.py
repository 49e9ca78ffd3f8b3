import math

import numpy as np
import pytest
from scipy.special import beta, betainc

from data_gen.backend import SampledOutput, SamplingSettings, Work, sample_seed, uniforms
from data_gen.prompts import Message, Prompt
from data_gen.synthetic_backend import SyntheticBackend, SyntheticOptions, TerminationMixture

SETTINGS = SamplingSettings(num_samples=6, max_tokens=200, temperature=1.0, top_p=1.0, seed=5)


def survival(alpha: float, p_max: float, tokens: int) -> float:
    """P(N > tokens), exactly."""
    return float(alpha * p_max**-alpha * beta(alpha, tokens + 1) * betainc(alpha, tokens + 1, p_max))


def lengths(alpha: float, p_max: float, count: int) -> np.ndarray:
    mixture = TerminationMixture(alpha, p_max)
    drawn = np.random.Generator(np.random.PCG64(0)).random((count, 2))
    return np.array([mixture.length(first, second) for first, second in drawn])


@pytest.mark.parametrize("alpha", [0.8, 1.5, 3.0])
@pytest.mark.parametrize("p_max", [1.0, 0.02])
def test_drawn_lengths_follow_the_survival_function(alpha: float, p_max: float) -> None:
    """Fractions of 20,000 lengths beyond a point, within 4 standard errors."""
    drawn = lengths(alpha, p_max, 20_000)
    assert drawn.min() >= 1
    for tokens in (1, int(1 / p_max), int(4 / p_max), int(20 / p_max)):
        fraction = survival(alpha, p_max, tokens)
        error = math.sqrt(fraction * (1 - fraction) / len(drawn))
        assert (drawn > tokens).mean() == pytest.approx(fraction, abs=4 * error)


def sampled(
    prompts: list[Prompt], indices: tuple[int, ...], settings: SamplingSettings = SETTINGS
) -> dict[tuple[str, int], SampledOutput]:
    results = list(SyntheticBackend().sample([Work(prompt, indices) for prompt in prompts], settings))
    assert {result.prompt_tokens for result in results} == {3}, "words"
    return {(r.prompt.prompt_id, output.sample_index): output for r in results for output in r.outputs}


def test_an_output_depends_on_seed_prompt_and_index_alone() -> None:
    messages = (Message("system", "be"), Message("user", "a b"))
    prompts = [Prompt(f"p{i}", "a b", messages=messages) for i in range(200)]
    outputs = sampled(prompts, (0, 1, 2, 3, 4, 5))
    part = sampled(prompts[7:3:-1], (4, 2))
    assert part == {key: outputs[key] for key in part}
    other = sampled(prompts, (0, 1), SamplingSettings(6, 200, 1.0, 1.0, seed=6))
    assert sum(other[key] != outputs[key] for key in other) > 200
    for output in outputs.values():
        assert 1 <= output.output_tokens <= 200
        assert output.finish_reason == "stop" or output.output_tokens == 200
    assert 0 < sum(output.finish_reason == "length" for output in outputs.values()) < 600
    options = SyntheticOptions()
    mixtures = [TerminationMixture.of(prompt.prompt_id, options) for prompt in prompts]
    assert len({mixture.alpha for mixture in mixtures}) == 200
    for mixture in mixtures:
        assert options.min_alpha <= mixture.alpha <= options.max_alpha
        assert options.min_typical_tokens <= 1 / mixture.p_max <= options.max_typical_tokens * 1.001


def test_streams_of_outputs_are_independent() -> None:
    assert np.array_equal(uniforms(1, "p", 0, 8), uniforms(1, "p", 0, 16)[:8])
    keys = [(seed, prompt, index) for seed in (1, 2) for prompt in ("p", "q") for index in (0, 1)]
    assert len({tuple(uniforms(*key, 4)) for key in keys}) == len({sample_seed(*key) for key in keys}) == 8
    assert all(0 <= sample_seed(*key) < 2**31 for key in keys)
    assert uniforms(0, "p", 0, 20_000).mean() == pytest.approx(0.5, abs=0.01)
