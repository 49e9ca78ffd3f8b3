"""Backends in the process: a model by transformers, and drawn lengths."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import beta, betainc

from data_gen.backend import SampledOutput, SamplingSettings, Work, sample_seed, uniforms
from data_gen.prompts import Message, Prompt
from data_gen.synthetic_backend import ALPHA, TYPICAL_TOKENS, SyntheticBackend, TerminationMixture
from data_gen.transformers_backend import TransformersBackend, TransformersOptions
from scheduler_core.errors import InputError

TEXTS = {"a": "w1", "b": "w2 w3 w4 w5 w6 w7", "c": "w8 w9 w10", "d": "w11 w12 w13 w14"}
PROMPTS = [Prompt(prompt_id, text) for prompt_id, text in TEXTS.items()]
SETTINGS = SamplingSettings(num_samples=6, max_tokens=200, temperature=1.0, top_p=1.0, seed=5)


def backend(model: Path, max_rows: int = 8) -> TransformersBackend:
    return TransformersBackend(str(model), options=TransformersOptions(max_rows=max_rows, device="cpu"))


def loaded(folder: Path) -> tuple[Any, Any]:
    """The model and its tokenizer as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def sampled(
    model: Path,
    settings: SamplingSettings,
    max_rows: int,
    prompts: list[Prompt] = PROMPTS,
    indices: tuple[int, ...] | None = None,
) -> dict[str, list[SampledOutput]]:
    """Answers of each prompt in the order of their index, without timings."""
    outputs: dict[str, list[SampledOutput]] = {prompt.prompt_id: [] for prompt in prompts}
    work = [Work(prompt, indices or tuple(range(settings.num_samples))) for prompt in prompts]
    for result in backend(model, max_rows).sample(work, settings):
        assert result.failures == ()
        outputs[result.prompt.prompt_id] += [
            SampledOutput(a.sample_index, a.output_tokens, a.finish_reason, a.text) for a in result.outputs
        ]
    return {key: sorted(outputs, key=lambda output: output.sample_index) for key, outputs in outputs.items()}


@pytest.mark.parametrize("max_rows", [1, 5, 64])
def test_greedy_outputs_equal_those_of_generate(tiny_model: Path, max_rows: int) -> None:
    model, tokenizer = loaded(tiny_model)
    results = sampled(tiny_model, SamplingSettings(2, 24, temperature=0.0, top_p=1.0, seed=0), max_rows)
    for prompt in PROMPTS:
        ids = tokenizer(f"user {prompt.text} assistant", return_tensors="pt")
        whole = model.generate(**ids, max_new_tokens=24, do_sample=False)
        output = whole[0, ids["input_ids"].shape[1] :]
        for sample in results[prompt.prompt_id]:
            assert sample.output_tokens == len(output)
            assert sample.text == tokenizer.decode(output, skip_special_tokens=True)
            assert sample.finish_reason == ("stop" if int(output[-1]) == 1 else "length")


def test_an_output_does_not_depend_on_its_batch(tiny_model: Path) -> None:
    settings = SamplingSettings(6, 32, temperature=1.0, top_p=1.0, seed=3)
    wide, narrow = sampled(tiny_model, settings, 64), sampled(tiny_model, settings, 6)
    alone = sampled(tiny_model, settings, 6, [PROMPTS[2]])
    assert wide == narrow
    assert alone["c"] == wide["c"]
    missing = sampled(tiny_model, settings, 4, PROMPTS[1:3], (1, 4, 5))
    assert missing == {key: [wide[key][i] for i in (1, 4, 5)] for key in ("b", "c")}
    assert wide["c"] != sampled(tiny_model, SamplingSettings(6, 32, 1.0, 1.0, seed=4), 64)["c"]


def test_outputs_come_one_by_one_with_their_timings(tiny_model: Path) -> None:
    settings = SamplingSettings(5, 24, temperature=1.0, top_p=1.0, seed=3)
    results = list(backend(tiny_model).sample([Work(PROMPTS[1], (0, 1, 2, 3, 4))], settings))
    assert [len(result.outputs) for result in results] == [1] * 5
    assert {result.prompt_tokens for result in results} == {8}
    for result in results:
        (output,) = result.outputs
        assert output.queue_s is None
        assert output.ttft_s is not None
        assert output.total_s is not None
        assert 0 < output.ttft_s <= output.total_s
        assert (output.ttft_s == output.total_s) == (output.output_tokens == 1)


def test_closing_the_iterator_stops_it_and_prompts_are_taken_as_they_are_needed(tiny_model: Path) -> None:
    taken: list[str] = []

    def work() -> Iterator[Work]:
        for number in range(1000):
            taken.append(f"p{number}")
            yield Work(Prompt(f"p{number}", "w1 w2"), (0, 1))

    engine = backend(tiny_model, max_rows=6)
    results = engine.sample(work(), SamplingSettings(2, 8, 1.0, 1.0, seed=1))
    first = next(results)
    assert len(taken) <= 4
    results.close()  # type: ignore[attr-defined]
    same = Work(first.prompt, (first.outputs[0].sample_index,))
    again = engine.sample([same], SamplingSettings(2, 8, 1.0, 1.0, 1))
    assert next(again).outputs[0].text == first.outputs[0].text
    engine.close()


def test_a_template_that_refuses_a_conversation_fails_that_prompt_alone(tiny_model: Path) -> None:
    engine = backend(tiny_model)
    _, tokenizer = engine.load()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    refused = Prompt("r", "w1", messages=(Message("system", "w2"), Message("user", "w1")))
    work = [Work(refused, (0, 1)), Work(PROMPTS[0], (0,))]
    results = list(engine.sample(work, SamplingSettings(2, 4, 1.0, 1.0, 0)))
    failures = [failure for result in results for failure in result.failures]
    assert [(f.sample_index, f.kind) for f in failures] == [(0, "template"), (1, "template")]
    assert "no system role" in failures[0].reason
    assert sum(len(result.outputs) for result in results) == 1
    tokenizer.chat_template = None
    (plain,) = engine.sample([Work(refused, (0,))], SamplingSettings(1, 4, 1.0, 1.0, 0))
    assert plain.prompt_tokens == 2


def test_first_tokens_follow_the_model_distribution(tiny_model: Path) -> None:
    """2,000 first tokens against the model's own probabilities: chi-square below its 99.9 % point."""
    import torch
    from scipy.stats import chi2

    model, tokenizer = loaded(tiny_model)
    with torch.inference_mode():
        ids = tokenizer("user w1 assistant", return_tensors="pt")["input_ids"]
        probabilities = model(ids).logits[0, -1].softmax(-1).double().numpy()
    outputs = sampled(tiny_model, SamplingSettings(2000, 1, 1.0, 1.0, seed=9), 2000, PROMPTS[:1])["a"]
    ends = sum(output.finish_reason == "stop" for output in outputs)
    words = tokenizer.convert_tokens_to_ids([output.text for output in outputs if output.text])
    counts = np.bincount(words, minlength=len(probabilities)).astype(float)
    counts[1] = ends
    expected = 2000 * probabilities
    common = expected >= 5
    common[[0, 2]] = False  # decoding drops <pad> and <unk>, so they cannot be told apart
    assert common.sum() >= 5
    assert float((((counts - expected) ** 2) / expected)[common].sum()) < chi2.ppf(0.999, common.sum())


def test_top_p_keeps_the_likeliest_tokens_only(tiny_model: Path) -> None:
    greedy = sampled(tiny_model, SamplingSettings(1, 16, 0.0, 1.0, seed=1), 8)
    for key, result in sampled(tiny_model, SamplingSettings(3, 16, 1.0, 1e-6, seed=1), 8).items():
        assert {output.text for output in result} == {greedy[key][0].text}


def test_a_prompt_beyond_the_context_is_refused_and_the_rest_goes_on(tiny_model: Path) -> None:
    work = [Work(Prompt("long", " ".join(["w1"] * 90)), (0, 1)), Work(PROMPTS[0], (0, 1))]
    results = list(backend(tiny_model).sample(work, SamplingSettings(2, 16, 1.0, 1.0, seed=1)))
    (refused,) = [result for result in results if result.failures]
    assert (refused.prompt.prompt_id, refused.outputs) == ("long", ())
    assert [(f.sample_index, f.kind) for f in refused.failures] == [(0, "too_long"), (1, "too_long")]
    assert "exceed the context of 96" in refused.failures[0].reason
    assert [r.prompt.prompt_id for r in results if r.outputs] == ["a", "a"]


@pytest.mark.parametrize(
    ("model", "message"), [("package:numpy/no-such-file", "package"), ("nothing/there", "local model folder")]
)
def test_unknown_models_are_named(model: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        backend(Path(model)).load()


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
        # P(N > tokens), exactly.
        fraction = alpha * p_max**-alpha * beta(alpha, tokens + 1) * betainc(alpha, tokens + 1, p_max)
        error = math.sqrt(fraction * (1 - fraction) / len(drawn))
        assert (drawn > tokens).mean() == pytest.approx(fraction, abs=4 * error)


def drawn_outputs(
    prompts: list[Prompt], indices: tuple[int, ...], settings: SamplingSettings = SETTINGS
) -> dict[tuple[str, int], SampledOutput]:
    results = list(SyntheticBackend().sample([Work(prompt, indices) for prompt in prompts], settings))
    assert {result.prompt_tokens for result in results} == {3}, "words"
    return {(r.prompt.prompt_id, output.sample_index): output for r in results for output in r.outputs}


def test_an_output_depends_on_seed_prompt_and_index_alone() -> None:
    messages = (Message("system", "be"), Message("user", "a b"))
    prompts = [Prompt(f"p{i}", "a b", messages=messages) for i in range(200)]
    outputs = drawn_outputs(prompts, (0, 1, 2, 3, 4, 5))
    part = drawn_outputs(prompts[7:3:-1], (4, 2))
    assert part == {key: outputs[key] for key in part}
    other = drawn_outputs(prompts, (0, 1), SamplingSettings(6, 200, 1.0, 1.0, seed=6))
    assert sum(other[key] != outputs[key] for key in other) > 200
    for output in outputs.values():
        assert 1 <= output.output_tokens <= 200
        assert output.finish_reason == "stop" or output.output_tokens == 200
    assert 0 < sum(output.finish_reason == "length" for output in outputs.values()) < 600
    mixtures = [TerminationMixture.of(prompt.prompt_id) for prompt in prompts]
    assert len({mixture.alpha for mixture in mixtures}) == 200
    for mixture in mixtures:
        assert ALPHA[0] <= mixture.alpha <= ALPHA[1]
        assert TYPICAL_TOKENS[0] <= 1 / mixture.p_max <= TYPICAL_TOKENS[1] * 1.001


def test_streams_of_outputs_are_independent() -> None:
    assert np.array_equal(uniforms(1, "p", 0, 8), uniforms(1, "p", 0, 16)[:8])
    keys = [(seed, prompt, index) for seed in (1, 2) for prompt in ("p", "q") for index in (0, 1)]
    assert len({tuple(uniforms(*key, 4)) for key in keys}) == len({sample_seed(*key) for key in keys}) == 8
    assert all(0 <= sample_seed(*key) < 2**31 for key in keys)
    assert uniforms(0, "p", 0, 20_000).mean() == pytest.approx(0.5, abs=0.01)
