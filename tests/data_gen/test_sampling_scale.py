"""Many requests at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

from data_gen.backend import SamplingSettings, Work, WorkResult, sample_seed
from data_gen.openai.backend import OpenAIBackend
from data_gen.openai.options import OpenAIOptions
from data_gen.prompts import Prompt
from tests.data_gen.fake_script import Script, length_of
from tests.data_gen.fake_server import running

SETTINGS = SamplingSettings(num_samples=4, max_tokens=40, temperature=1.0, top_p=1.0, seed=3)


def works(count: int) -> Iterator[Work]:
    return (Work(Prompt(f"p{i}", f"prompt {i}"), (0, 1, 2, 3)) for i in range(count))


def lengths(results: Iterable[WorkResult]) -> dict[tuple[str, int], int]:
    """Lengths by (prompt id, sample index); each comes once."""
    found: dict[tuple[str, int], int] = {}
    for result in results:
        assert not result.failures
        for answer in result.outputs:
            key = (result.prompt.prompt_id, answer.sample_index)
            assert key not in found
            found[key] = answer.output_tokens
    return found


def expected(count: int) -> dict[tuple[str, int], int]:
    return {
        (f"p{i}", j): min(40, length_of(f"prompt {i}", sample_seed(3, f"p{i}", j)))
        for i in range(count)
        for j in range(4)
    }


def test_a_thousand_requests_are_in_flight_at_once() -> None:
    before = gc.get_threshold()
    with running(Script(gate=1000)) as (server,):
        server.remembers = False
        options = OpenAIOptions(base_urls=(server.url,), concurrency=1000)
        with OpenAIBackend(options) as backend:
            assert lengths(backend.sample(works(500), SETTINGS)) == expected(500)
            assert backend.counters == {}
        assert server.most_in_flight == 1000
    assert gc.get_threshold() == before


def test_what_is_held_does_not_grow_with_the_work() -> None:
    """Ten times the work leaves no more objects behind, and no more of it is taken ahead."""
    taken = 0

    def source(count: int) -> Iterator[Work]:
        nonlocal taken
        for work in works(count):
            taken += 1
            yield work

    with running() as (server,):
        server.remembers = False
        with OpenAIBackend(OpenAIOptions(base_urls=(server.url,), concurrency=8)) as backend:
            held = []
            for count in (50, 50, 500):
                num_given, taken = 0, 0
                for result in backend.sample(source(count), SETTINGS):
                    num_given += len(result.outputs)
                    assert 4 * taken - num_given <= backend_room(8)
                gc.collect()
                held.append(len(gc.get_objects()))
            assert held[2] - held[1] < 200


def backend_room(concurrency: int) -> int:
    """Samples on their way, at most; a whole prompt more than the look-ahead."""
    return OpenAIOptions(concurrency=concurrency).look_ahead + 4
