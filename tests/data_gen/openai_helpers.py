"""Prompts, a hasty backend, and what a run against a fake engine gives; shared by the tests of the OpenAI backend."""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from data_gen.backend import SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult, sample_seed
from data_gen.openai.backend import OpenAIBackend
from data_gen.openai.options import OpenAIOptions
from data_gen.prompts import Prompt
from tests.fake_openai import Completions, FakeEngine, length_of, running

PROMPTS = [Prompt(f"p{i}", f"prompt number {i}") for i in range(5)]
SETTINGS = SamplingSettings(num_samples=4, max_tokens=40, temperature=0.7, top_p=0.9, seed=3)
WORK = [Work(prompt, (0, 1, 2, 3)) for prompt in PROMPTS]

Key = tuple[str, int]


def works(count: int) -> list[Work]:
    """Prompts with four samples each."""
    return [Work(Prompt(f"q{i}", f"prompt {i}"), (0, 1, 2, 3)) for i in range(count)]


#: More than can be served before a test that halts the engine gets to it, however busy the machine.
LONG_WORK = works(1000)


@contextmanager
def backend(
    *engines: FakeEngine, environment: dict[str, str] | None = None, **changes: Any
) -> Iterator[OpenAIBackend]:
    """A backend that does not wait long for anything."""
    hasty = {"backoff_s": 0.002, "max_backoff_s": 0.02, "start_wait_s": 0.0, "timeout_s": 20.0}
    urls = tuple(f"{engine.url}/v1" for engine in engines)
    options = OpenAIOptions(base_urls=urls, **{**hasty, **changes})
    with closing(OpenAIBackend(options, environment or {})) as client:
        yield client


def gathered(results: Iterable[WorkResult]) -> tuple[dict[Key, SampledOutput], dict[Key, SampleFailure]]:
    """Outputs and failures by (prompt id, sample index); each may come once only."""
    outputs: dict[Key, SampledOutput] = {}
    failures: dict[Key, SampleFailure] = {}
    for result in results:
        assert result.outputs or result.failures
        for output in result.outputs:
            assert outputs.setdefault((result.prompt.prompt_id, output.sample_index), output) is output
        for failure in result.failures:
            assert failures.setdefault((result.prompt.prompt_id, failure.sample_index), failure) is failure
    assert not outputs.keys() & failures.keys()
    return outputs, failures


def sampled(
    script: Completions, work: Iterable[Work] = WORK, **changes: Any
) -> tuple[dict[Key, SampledOutput], dict[Key, SampleFailure], dict[str, int]]:
    """Outputs, failures and counters of one run against one engine."""
    with running(script) as (engine,), backend(engine, **changes) as client:
        outputs, failures = gathered(client.sample(work, SETTINGS))
        return outputs, failures, client.counters


def assert_complete(outputs: dict[Key, SampledOutput], work: Iterable[Work] = WORK) -> None:
    """Every output is there and has the length and end that its seed gives."""
    expected = {
        (item.prompt.prompt_id, i): length_of(item.prompt.text, sample_seed(3, item.prompt.prompt_id, i))
        for item in work
        for i in item.indices
    }
    assert {key: output.output_tokens for key, output in outputs.items()} == {
        key: min(length, 40) for key, length in expected.items()
    }
    for key, output in outputs.items():
        assert output.finish_reason == ("length" if expected[key] > 40 else "stop")
