from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_gen.backend import SampledOutput, SamplingSettings, Work
from data_gen.local_models import resolve_model
from data_gen.prompts import Message, Prompt
from data_gen.transformers_backend import TransformersBackend, TransformersOptions
from scheduler_core.errors import InputError

PROMPTS = [
    Prompt("a", "w1"),
    Prompt("b", "w2 w3 w4 w5 w6 w7"),
    Prompt("c", "w8 w9 w10"),
    Prompt("d", "w11 w12 w13 w14"),
]


def backend(model: Path, max_rows: int = 8) -> TransformersBackend:
    return TransformersBackend(str(model), options=TransformersOptions(max_rows=max_rows, device="cpu"))


def sampled(
    model: Path,
    settings: SamplingSettings,
    max_rows: int,
    prompts: list[Prompt] = PROMPTS,
    indices: tuple[int, ...] | None = None,
) -> dict[str, list[SampledOutput]]:
    """Answers of each prompt in the order of their index, without timings."""
    found: dict[str, list[SampledOutput]] = {prompt.prompt_id: [] for prompt in prompts}
    work = [Work(prompt, indices or tuple(range(settings.num_samples))) for prompt in prompts]
    for result in backend(model, max_rows).sample(work, settings):
        assert result.failures == ()
        found[result.prompt.prompt_id] += [
            SampledOutput(a.sample_index, a.output_tokens, a.finish_reason, a.text) for a in result.outputs
        ]
    return {key: sorted(answers, key=lambda answer: answer.sample_index) for key, answers in found.items()}


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
        for sample in results[prompt.prompt_id]:
            assert sample.output_tokens == len(answer)
            assert sample.text == tokenizer.decode(answer, skip_special_tokens=True)
            assert sample.finish_reason == ("stop" if int(answer[-1]) == 1 else "length")


def test_an_answer_does_not_depend_on_its_batch(tiny_model: Path) -> None:
    settings = SamplingSettings(6, 32, temperature=1.0, top_p=1.0, seed=3)
    wide, narrow = sampled(tiny_model, settings, 64), sampled(tiny_model, settings, 6)
    alone = sampled(tiny_model, settings, 6, [PROMPTS[2]])
    assert wide == narrow
    assert alone["c"] == wide["c"]
    assert wide["c"] != sampled(tiny_model, SamplingSettings(6, 32, 1.0, 1.0, seed=4), 64)["c"]


def test_only_the_missing_answers_are_drawn_and_they_are_the_same(tiny_model: Path) -> None:
    settings = SamplingSettings(6, 32, temperature=1.0, top_p=1.0, seed=3)
    everything = sampled(tiny_model, settings, 64)
    missing = sampled(tiny_model, settings, 4, PROMPTS[1:3], (1, 4, 5))
    assert missing == {key: [everything[key][i] for i in (1, 4, 5)] for key in ("b", "c")}


def test_answers_come_one_by_one_with_their_timings(tiny_model: Path) -> None:
    settings = SamplingSettings(5, 24, temperature=1.0, top_p=1.0, seed=3)
    results = list(backend(tiny_model).sample([Work(PROMPTS[1], (0, 1, 2, 3, 4))], settings))
    assert [len(result.outputs) for result in results] == [1] * 5
    assert {result.prompt_tokens for result in results} == {8}
    for result in results:
        (answer,) = result.outputs
        assert answer.queue_s is None
        assert answer.ttft_s is not None
        assert answer.total_s is not None
        assert 0 < answer.ttft_s <= answer.total_s
        assert (answer.ttft_s == answer.total_s) == (answer.output_tokens == 1)


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
    again = engine.sample(
        [Work(first.prompt, (first.outputs[0].sample_index,))], SamplingSettings(2, 8, 1.0, 1.0, 1)
    )
    assert next(again).outputs[0].text == first.outputs[0].text
    engine.close()


def test_conversations_go_through_the_chat_template(tiny_model: Path) -> None:
    chat = (Message("user", "w1"), Message("assistant", "w2"), Message("user", "w3 w4"))
    work = [Work(Prompt("chat", "w3 w4", messages=chat), (0,))]
    (result,) = backend(tiny_model).sample(work, SamplingSettings(1, 4, 0.0, 1.0, seed=1))
    assert result.prompt_tokens == 8


def test_a_template_that_refuses_a_conversation_fails_that_prompt_alone(tiny_model: Path) -> None:
    engine = backend(tiny_model)
    _, tokenizer = engine.load()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    refused = Prompt("r", "w1", messages=(Message("system", "w2"), Message("user", "w1")))
    results = list(
        engine.sample([Work(refused, (0, 1)), Work(PROMPTS[0], (0,))], SamplingSettings(2, 4, 1.0, 1.0, 0))
    )
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    with torch.inference_mode():
        ids = tokenizer("user w1 assistant", return_tensors="pt")["input_ids"]
        probabilities = model(ids).logits[0, -1].softmax(-1).double().numpy()
    answers = sampled(tiny_model, SamplingSettings(2000, 1, 1.0, 1.0, seed=9), 2000, PROMPTS[:1])["a"]
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
        assert {answer.text for answer in result} == {greedy[key][0].text}


def test_a_prompt_beyond_the_context_is_refused_and_the_rest_goes_on(tiny_model: Path) -> None:
    long = Prompt("long", " ".join(["w1"] * 90))
    work = [Work(long, (0, 1)), Work(PROMPTS[0], (0, 1))]
    results = list(backend(tiny_model).sample(work, SamplingSettings(2, 16, 1.0, 1.0, seed=1)))
    (refused,) = [result for result in results if result.failures]
    assert (refused.prompt.prompt_id, refused.outputs) == ("long", ())
    assert [(f.sample_index, f.kind) for f in refused.failures] == [(0, "too_long"), (1, "too_long")]
    assert "exceed the context of 96" in refused.failures[0].reason
    assert [r.prompt.prompt_id for r in results if r.outputs] == ["a", "a"]


@pytest.mark.parametrize("model", ["package:no_such_package/x", "package:numpy/no-such-file", "package:../x"])
def test_unknown_packaged_models_are_named(model: str) -> None:
    with pytest.raises(InputError, match="package"):
        resolve_model(model)


def test_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="local model folder"):
        list(
            backend(tmp_path / "nothing").sample(
                [Work(PROMPTS[0], (0,))], SamplingSettings(1, 4, 1.0, 1.0, 0)
            )
        )


@pytest.mark.parametrize("field", ["max_rows", "threads"])
def test_bad_options_are_named(field: str) -> None:
    with pytest.raises(InputError, match=field):
        TransformersOptions(**{field: 0})  # type: ignore[arg-type]
