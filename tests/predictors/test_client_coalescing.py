"""Which requests share a call and an answer, and that nobody gets another one's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from predictors.client import ClientSettings, PredictorError
from predictors.client.coalescing import Coalescer
from predictors.client.retrying import Result
from predictors.proto import predictor_v1_pb2 as pb
from tests.predictors.fakes import settle
from tests.predictors.scripted import answer


class Calls:
    """Records what is delivered; answers when its gate is open."""

    def __init__(self, *, is_open: bool = True, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self.prompts: list[str] = []
        self.deadlines: list[float] = []
        self.num_cancelled = 0
        self.gate = asyncio.Event()
        self.error = error
        if is_open:
            self.gate.set()

    async def __call__(self, messages: Sequence[pb.PredictRequest], deadline: float) -> Sequence[Result]:
        self.sizes.append(len(messages))
        self.prompts += [message.prompt for message in messages]
        self.deadlines.append(deadline)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [
            PredictorError(
                f"predictor a: request {message.request_id!r}: INVALID_ARGUMENT: bad",
                "INVALID_ARGUMENT",
                message.request_id,
            )
            if message.prompt == "bad"
            else answer(message)
            for message in messages
        ]


def coalescer(
    calls: Calls, *, max_calls: int | None = 4, small_batch: int = 8, max_batch_requests: int = 64
) -> Coalescer:
    settings = ClientSettings(max_batch_requests=max_batch_requests)
    return Coalescer(calls, settings, "a", max_calls=max_calls, small_batch=small_batch)


def ask(
    one: Coalescer, prompt: str, request_id: str = "r", *, seconds: float = 20.0, served_model: str = ""
) -> asyncio.Task[Result]:
    message = pb.PredictRequest(request_id=request_id, prompt=prompt, served_model=served_model)
    return asyncio.ensure_future(one.submit(message, asyncio.get_running_loop().time() + seconds))


async def test_identical_requests_share_one_answer_under_their_own_ids() -> None:
    calls = Calls()
    one = coalescer(calls)
    results = await asyncio.gather(
        *(ask(one, "sea", f"r{index}") for index in range(5)), ask(one, "river", "x")
    )
    assert calls.sizes == [2]
    assert [result.request_id for result in results] == ["r0", "r1", "r2", "r3", "r4", "x"]
    assert [result.mu for result in results if isinstance(result, pb.PredictResponse)] == [3.0] * 5 + [5.0]


async def test_requests_that_differ_in_anything_but_the_id_do_not_share() -> None:
    calls = Calls()
    one = coalescer(calls)
    await asyncio.gather(ask(one, "sea"), ask(one, "sea", served_model="tiny-llm"), ask(one, "sea "))
    assert calls.prompts == ["sea", "sea", "sea "]


async def test_a_shared_error_names_each_callers_own_request() -> None:
    one = coalescer(Calls())
    results = await asyncio.gather(ask(one, "bad", "r1"), ask(one, "bad", "r2"))
    assert [result.request_id for result in results] == ["r1", "r2"]
    assert "request 'r2': INVALID_ARGUMENT" in str(results[1])


async def test_an_answer_is_not_kept_once_it_was_given() -> None:
    calls = Calls()
    one = coalescer(calls)
    await ask(one, "sea")
    await ask(one, "sea")
    assert calls.prompts == ["sea", "sea"]


async def test_what_comes_while_all_calls_are_busy_goes_together() -> None:
    calls = Calls(is_open=False)
    one = coalescer(calls, max_calls=2, small_batch=1, max_batch_requests=6)
    first = [ask(one, f"first {index}") for index in range(2)]
    await settle()
    rest = [ask(one, f"rest {index}") for index in range(20)]
    await settle()
    assert calls.sizes == [1, 1]
    calls.gate.set()
    await asyncio.gather(*first, *rest)
    assert sum(calls.sizes) == 22
    assert max(calls.sizes) == 6
    assert len(calls.sizes) <= 7


async def test_a_shared_call_ends_when_its_last_caller_is_gone() -> None:
    calls = Calls(is_open=False)
    one = coalescer(calls)
    tasks = [ask(one, "sea"), ask(one, "sea"), ask(one, "river")]
    await settle()
    for number, task in enumerate(tasks):
        assert calls.num_cancelled == 0, f"after {number} of 3"
        task.cancel()
        await settle()
    assert calls.num_cancelled == 1
    assert all(task.cancelled() for task in tasks)


async def test_a_caller_who_leaves_before_the_call_takes_the_request_back() -> None:
    calls = Calls(is_open=False)
    one = coalescer(calls, max_calls=1)
    blocker = ask(one, "blocker")
    await settle()
    task = ask(one, "sea")
    await settle()
    task.cancel()
    await settle()
    calls.gate.set()
    await blocker
    assert calls.prompts == ["blocker"]


async def test_each_caller_waits_no_longer_than_its_own_deadline() -> None:
    calls = Calls(is_open=False)
    one = coalescer(calls)
    patient = ask(one, "sea", "patient", seconds=20)
    result = await ask(one, "sea", "hasty", seconds=0.01)
    assert isinstance(result, PredictorError)
    assert (result.code, result.request_id) == ("DEADLINE_EXCEEDED", "hasty")
    calls.gate.set()
    assert (await patient).request_id == "patient"
    assert calls.sizes == [1]


async def test_a_shared_call_gets_the_longest_deadline() -> None:
    calls = Calls()
    one = coalescer(calls)
    now = asyncio.get_running_loop().time()
    await asyncio.gather(ask(one, "sea", seconds=1), ask(one, "sea", seconds=9))
    assert calls.deadlines == [pytest.approx(now + 9, abs=0.9)]


async def test_an_unexpected_error_reaches_every_caller_and_the_next_call_works() -> None:
    calls = Calls(error=RuntimeError("broken"))
    one = coalescer(calls)
    results = await asyncio.gather(ask(one, "sea"), ask(one, "sea"), ask(one, "a"), return_exceptions=True)
    assert [str(result) for result in results] == ["broken"] * 3
    calls.error = None
    assert isinstance(await ask(one, "sea"), pb.PredictResponse)


async def test_close_ends_every_wait() -> None:
    calls = Calls(is_open=False)
    one = coalescer(calls, max_calls=1, small_batch=1)
    tasks = [ask(one, "sea"), ask(one, "river")]
    await settle()
    await one.close()
    results = await asyncio.gather(*tasks)
    assert [result.code for result in results if isinstance(result, PredictorError)] == ["CANCELLED"] * 2
