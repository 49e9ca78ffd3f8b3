from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_gen.backend import PromptResult, SamplingSettings
from data_gen.prompts import Prompt
from data_gen.transformers_backend import TransformersBackend, resolve_model, uniforms
from scheduler_core.errors import InputError

PROMPTS = [
    Prompt("a", "w1"),
    Prompt("b", "w2 w3 w4 w5 w6 w7"),
    Prompt("c", "w8 w9 w10"),
    Prompt("d", "w11 w12 w13 w14"),
]


def sampled(
    model: Path, settings: SamplingSettings, max_rows: int, prompts: list[Prompt] = PROMPTS
) -> dict[str, PromptResult]:
    backend = TransformersBackend(str(model), max_rows=max_rows, device="cpu")
    return {result.prompt.prompt_id: result for result in backend.sample(prompts, settings)}


@pytest.mark.parametrize("max_rows", [1, 5, 64])
def test_greedy_answers_equal_those_of_generate(tiny_model: Path, max_rows: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    results = sampled(tiny_model, SamplingSettings(2, 24, temperature=0.0, top_p=1.0, seed=0), max_rows)
    for prompt in PROMPTS:
        ids = tokenizer(f"user {prompt.text} assistant", return_tensors="pt")
        whole = model.generate(
            input_ids=ids["input_ids"],
            attention_mask=ids["attention_mask"],
            max_new_tokens=24,
            do_sample=False,
        )
        answer = whole[0, ids["input_ids"].shape[1] :]
        result = results[prompt.prompt_id]
        assert result.prompt_tokens == ids["input_ids"].shape[1]
        for sample in result.answers:
            assert sample.output_tokens == len(answer)
            assert sample.text == tokenizer.decode(answer, skip_special_tokens=True)
            assert sample.finish_reason == ("stop" if int(answer[-1]) == 1 else "length")


def test_an_answer_does_not_depend_on_its_batch(tiny_model: Path) -> None:
    settings = SamplingSettings(6, 32, temperature=1.0, top_p=1.0, seed=3)
    wide, narrow = sampled(tiny_model, settings, 64), sampled(tiny_model, settings, 6)
    alone = sampled(tiny_model, settings, 6, [PROMPTS[2]])
    assert {key: result.answers for key, result in wide.items()} == {
        key: result.answers for key, result in narrow.items()
    }
    assert alone["c"].answers == wide["c"].answers
    assert (
        wide["c"].answers != sampled(tiny_model, SamplingSettings(6, 32, 1.0, 1.0, seed=4), 64)["c"].answers
    )


def test_first_tokens_follow_the_model_distribution(tiny_model: Path) -> None:
    """2,000 first tokens against the model's own probabilities: chi-square below its 99.9 % point."""
    import torch
    from scipy.stats import chi2
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    with torch.inference_mode():
        ids = tokenizer("user w1 assistant", return_tensors="pt")["input_ids"]
        probabilities = model(ids).logits[0, -1].softmax(-1).double().numpy()
    answers = sampled(tiny_model, SamplingSettings(2000, 1, 1.0, 1.0, seed=9), 2000, PROMPTS[:1])["a"].answers
    ends = sum(answer.finish_reason == "stop" for answer in answers)
    words = tokenizer.convert_tokens_to_ids([answer.text for answer in answers if answer.text])
    counts = np.bincount(words, minlength=len(probabilities)).astype(float)
    counts[1] = ends
    expected = 2000 * probabilities
    common = expected >= 5
    common[[0, 2]] = False  # decoding drops <pad> and <unk>, so they cannot be told apart
    statistic = float((((counts - expected) ** 2) / expected)[common].sum())
    assert common.sum() >= 5
    assert statistic < chi2.ppf(0.999, common.sum())


def test_top_p_keeps_the_likeliest_tokens_only(tiny_model: Path) -> None:
    greedy = sampled(tiny_model, SamplingSettings(1, 16, 0.0, 1.0, seed=1), 8)
    nucleus = sampled(tiny_model, SamplingSettings(3, 16, 1.0, 1e-6, seed=1), 8)
    for key, result in nucleus.items():
        assert {answer.text for answer in result.answers} == {greedy[key].answers[0].text}


def test_a_prompt_beyond_the_context_is_refused_and_the_rest_goes_on(tiny_model: Path) -> None:
    long = Prompt("long", " ".join(["w1"] * 90))
    results = sampled(tiny_model, SamplingSettings(2, 16, 1.0, 1.0, seed=1), 8, [long, PROMPTS[0]])
    assert "exceed the context of 96" in results["long"].error
    assert results["long"].answers == ()
    assert len(results["a"].answers) == 2


def test_uniforms_are_independent_streams() -> None:
    assert np.array_equal(uniforms(1, "p", 0, 8), uniforms(1, "p", 0, 16)[:8])
    streams = {
        tuple(uniforms(seed, prompt, index, 4))
        for seed in (1, 2)
        for prompt in ("p", "q")
        for index in (0, 1)
    }
    assert len(streams) == 8
    values = uniforms(0, "p", 0, 20_000)
    assert values.min() >= 0
    assert values.max() < 1
    assert values.mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("model", ["package:no_such_package/x", "package:numpy/no-such-file", "package:../x"])
def test_unknown_packaged_models_are_named(model: str) -> None:
    with pytest.raises(InputError, match="package"):
        resolve_model(model)


def test_unknown_model_is_named(tmp_path: Path) -> None:
    backend = TransformersBackend(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match="local model folder"):
        list(backend.sample(PROMPTS, SamplingSettings(1, 4, 1.0, 1.0, 0)))
