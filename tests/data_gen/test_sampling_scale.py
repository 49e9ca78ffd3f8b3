"""Many requests, many servers, many processes."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest

from data_gen.backend import Answer, SamplingSettings, Work, WorkResult
from data_gen.draws import answer_seed
from data_gen.openai import EngineError, OpenAIBackend, OpenAIOptions
from data_gen.processes import ProcessesBackend, openai_backend, split_servers
from data_gen.prompts import Prompt
from scheduler_core.errors import InputError
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
        for answer in result.answers:
            key = (result.prompt.prompt_id, answer.sample_index)
            assert key not in found
            found[key] = answer.output_tokens
    return found


def expected(count: int) -> dict[tuple[str, int], int]:
    return {
        (f"p{i}", j): min(40, length_of(f"prompt {i}", answer_seed(3, f"p{i}", j)))
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
                    num_given += len(result.answers)
                    assert 4 * taken - num_given <= backend_room(8)
                gc.collect()
                held.append(len(gc.get_objects()))
            assert held[2] - held[1] < 200


def backend_room(concurrency: int) -> int:
    """Samples on their way, at most; a whole prompt more than the look-ahead."""
    return OpenAIOptions(concurrency=concurrency).look_ahead + 4


@pytest.mark.parametrize(("num_servers", "processes"), [(3, 2), (1, 2)])
def test_processes_share_the_work(num_servers: int, processes: int) -> None:
    with running(*(Script(delay_s=0.001) for _ in range(num_servers))) as servers:
        options = OpenAIOptions(
            base_urls=tuple(one.url for one in servers), concurrency=8, processes=processes
        )
        backend = openai_backend(options)
        try:
            assert (backend.name, backend.version, backend.served_model) == ("vllm", "9.9", "fake-model")
            assert backend.seeded
            assert lengths(backend.sample(works(60), SETTINGS)) == expected(60)
            assert all(server.bodies for server in servers)
            assert sum(len(server.bodies) for server in servers) == 240
            assert lengths(backend.sample(works(20), SETTINGS)) == expected(20), "a second run"
            assert lengths(backend.sample(works(0), SETTINGS)) == {}
            results = backend.sample(works(60), SETTINGS)
            first = list(islice(results, 5))
            results.close()  # type: ignore[attr-defined]
            assert len(first) == 5
            assert lengths(backend.sample(works(5), SETTINGS)) == expected(5), "after one that was closed"
        finally:
            backend.close()


def test_servers_are_split_among_processes() -> None:
    urls = tuple(f"http://h{i}/v1" for i in range(3))
    options = OpenAIOptions(base_urls=urls, concurrency=10, processes=2)
    assert [one.base_urls for one in split_servers(options)] == [(urls[0], urls[2]), (urls[1],)]
    shares = split_servers(replace(options, processes=7))
    assert len(shares) == 7
    totals: Counter[str] = Counter()
    for share in shares:
        assert share.processes == 1
        totals[share.base_urls[0]] += share.concurrency
    assert totals == dict.fromkeys(urls, 10)
    with pytest.raises(InputError, match="processes"):
        OpenAIOptions(processes=0)
    with pytest.raises(InputError, match="processes"):
        split_servers(OpenAIOptions(concurrency=1, processes=2))


class Odd:
    """A backend that fails in a way of its own; its prompts say how."""

    name, version, served_model, seeded = "odd", "1", "m", True

    def __init__(self, kind: str) -> None:
        if kind == "refuse":
            raise InputError("kind", kind, "another one")
        self.version = kind
        self.counters = {"asked": 0}

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Iterator[WorkResult]:
        for item in work:
            self.counters["asked"] += 1
            if item.prompt.text == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if item.prompt.text == "fail":
                raise EngineError("told to fail")
            yield WorkResult(item.prompt, 1, tuple(Answer(i, 1, "stop") for i in item.indices))

    def close(self) -> None:
        pass


def odd(*kinds: str) -> ProcessesBackend:
    makers: list[Callable[[], Odd]] = [partial(Odd, kind) for kind in kinds]
    return ProcessesBackend(makers, 8)


def test_trouble_in_a_process_reaches_the_caller() -> None:
    backend = odd("1", "1")
    good, die, fail = (Work(Prompt(text, text), (0, 1)) for text in ("good", "die", "fail"))
    try:
        assert len(lengths(backend.sample([good], SETTINGS))) == 2
        assert backend.counters == {"asked": 1}
        with pytest.raises(EngineError, match="died .*-9"):
            list(backend.sample([die], SETTINGS))
        with pytest.raises(EngineError, match="told to fail"):
            list(backend.sample([fail], SETTINGS))
        assert len(lengths(backend.sample([good], SETTINGS))) == 2
    finally:
        backend.close()


@pytest.mark.parametrize(("kinds", "named"), [(("refuse",), "kind"), (("1", "2"), "processes")])
def test_unequal_or_refusing_backends_are_named(kinds: tuple[str, ...], named: str) -> None:
    backend = odd(*kinds)
    with pytest.raises(InputError) as raised:
        _ = backend.name
    assert raised.value.field == named
