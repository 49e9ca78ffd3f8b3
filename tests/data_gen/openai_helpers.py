"""Prompts, a hasty backend, and what a run against a fake server gives; shared by the tests of the OpenAI backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from data_gen.backend import SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult, sample_seed
from data_gen.openai.backend import OpenAIBackend
from data_gen.openai.options import OpenAIOptions
from data_gen.prompts import Prompt
from tests.data_gen.fake_script import Script, length_of
from tests.data_gen.fake_server import running

PROMPTS = [Prompt(f"p{i}", f"prompt number {i}") for i in range(5)]
SETTINGS = SamplingSettings(num_samples=4, max_tokens=40, temperature=0.7, top_p=0.9, seed=3)
WORK = [Work(prompt, (0, 1, 2, 3)) for prompt in PROMPTS]
#: More than can be answered before a test that halts the server gets to it, however busy the machine.
LONG_WORK = [Work(Prompt(f"long{i}", f"long {i}"), (0, 1, 2, 3)) for i in range(1000)]


def backend(*urls: str, environment: dict[str, str] | None = None, **changed: Any) -> OpenAIBackend:
    """A backend that does not wait long for anything."""
    hasty: dict[str, Any] = {
        "backoff_s": 0.002,
        "max_backoff_s": 0.02,
        "start_wait_s": 0.0,
        "timeout_s": 20.0,
    }
    return OpenAIBackend(OpenAIOptions(base_urls=urls, **{**hasty, **changed}), environment or {})


def gathered(
    results: Iterable[WorkResult],
) -> tuple[dict[tuple[str, int], SampledOutput], dict[tuple[str, int], SampleFailure]]:
    """Answers and failures by (prompt id, sample index); each may come once only."""
    answers: dict[tuple[str, int], SampledOutput] = {}
    failures: dict[tuple[str, int], SampleFailure] = {}
    for result in results:
        assert result.outputs or result.failures
        for item in (*result.outputs, *result.failures):
            key = (result.prompt.prompt_id, item.sample_index)
            assert key not in answers
            assert key not in failures
            if isinstance(item, SampledOutput):
                answers[key] = item
            else:
                failures[key] = item
    return answers, failures


def sampled(script: Script, work: Iterable[Work] = WORK, **changed: Any) -> tuple[Any, Any, dict[str, int]]:
    """Answers, failures and counters of one run against one server."""
    with running(script) as (server,), backend(server.url, **changed) as engine:
        answers, failures = gathered(engine.sample(work, SETTINGS))
        return answers, failures, engine.counters


EXPECTED = {
    (prompt.prompt_id, index): length_of(prompt.text, sample_seed(3, prompt.prompt_id, index))
    for prompt in PROMPTS
    for index in range(4)
}


def assert_complete(answers: dict[tuple[str, int], SampledOutput]) -> None:
    """Every answer is there and has the length and end that its seed gives."""
    assert {key: answer.output_tokens for key, answer in answers.items()} == {
        key: min(length, 40) for key, length in EXPECTED.items()
    }
    for key, answer in answers.items():
        assert answer.finish_reason == ("length" if EXPECTED[key] > 40 else "stop")
