"""How long an answer is, by whoever counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_gen.openai.options import OpenAIOptions
from scheduler_core.errors import InputError
from tests.data_gen.fake_script import Fault, Script, first, length_of
from tests.data_gen.fake_server import running
from tests.data_gen.openai_helpers import PROMPTS, SETTINGS, WORK, assert_complete, backend, gathered, sampled


@pytest.mark.parametrize("count_by", ["token_ids", "logprobs", "server_tokenizer"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("lists_end", [True, False])
def test_several_answers_per_request_are_counted_one_by_one(
    count_by: str, stream: bool, api: str, lists_end: bool
) -> None:
    with (
        running(Script(lists_end=lists_end)) as (server,),
        backend(server.url, samples_per_request=3, count_by=count_by, stream=stream, api=api) as engine,
    ):
        assert not engine.seeded
        answers, failures = gathered(engine.sample(WORK, SETTINGS))
        assert not failures
        assert len(server.bodies) == 2 * len(WORK)
        assert "seed" not in server.bodies[0]
        for (prompt_id, index), answer in answers.items():
            text = PROMPTS[int(prompt_id[1:])].text
            assert answer.output_tokens == min(40, length_of(text, None, index % 3))


def test_a_busy_tokenizer_of_the_server_is_asked_again() -> None:
    changed = {"samples_per_request": 2, "count_by": "server_tokenizer", "concurrency": 1}
    answers, failures, counters = sampled(Script(busy_tokenizer=3), WORK[:2], **changed)
    assert (len(answers), failures) == (8, {})
    assert counters == {"http_503": 3, "retries": 3}


def test_usage_cannot_count_several_answers() -> None:
    with pytest.raises(InputError, match="count_by"):
        OpenAIOptions(samples_per_request=2)


def test_a_llama_cpp_server_counts_the_tokens_of_a_text() -> None:
    changed = {"samples_per_request": 2, "count_by": "server_tokenizer"}
    answers, failures, _ = sampled(Script(owner="llamacpp"), WORK[:1], **changed)
    assert len(answers) == 4
    assert not failures


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A tokenizer.json that splits words, as the fake server does."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_texts_are_counted_by_a_local_tokenizer_only_if_usage_agrees(tokenizer_file: Path) -> None:
    changed = {"samples_per_request": 4, "count_by": "tokenizer", "tokenizer": str(tokenizer_file)}
    answers, failures, _ = sampled(Script(), **changed)
    assert not failures
    assert all(
        a.output_tokens == min(40, length_of(PROMPTS[int(p[1:])].text, None, i))
        for (p, i), a in answers.items()
    )

    def more(answer: dict[str, Any]) -> None:
        answer["usage"]["completion_tokens"] += 1

    answers, failures, counters = sampled(
        Script(behave=first(1, Fault(change=more))), concurrency=1, **changed
    )
    assert {failure.kind for failure in failures.values()} == {"tokenizer_mismatch"}
    assert (len(answers), len(failures)) == (16, 4)
    assert counters["tokenizer_mismatch"] >= 1


def test_lengths_are_only_estimated_when_that_is_allowed_and_then_it_is_counted(tokenizer_file: Path) -> None:
    silent = Script(usage=False, lists_tokens=False)
    _, failures, _ = sampled(silent, WORK[:4], tokenizer=str(tokenizer_file))
    assert {failure.kind for failure in failures.values()} == {"no_token_count"}
    answers, failures, counters = sampled(silent, tokenizer=str(tokenizer_file), approximate_counts=True)
    assert_complete(answers)
    assert counters == {"approximate_counts": 20}
    assert OpenAIOptions(tokenizer="x", approximate_counts=True).recorded()["approximate_counts"] is True


def test_an_answer_cut_before_the_cap_is_counted() -> None:
    def shorter(answer: dict[str, Any]) -> None:
        answer["choices"][0]["finish_reason"] = "length"
        answer["usage"]["completion_tokens"] = 7

    answers, _, counters = sampled(Script(behave=first(1, Fault(change=shorter))), WORK[:1])
    assert [a.finish_reason for a in answers.values() if a.output_tokens == 7] == ["length"]
    assert counters == {"truncated_early": 1}
