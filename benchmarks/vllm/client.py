"""Open-loop client: sends requests to an OpenAI server at given times and records when outputs arrive."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from benchmarks.vllm.clock import EngineClock
from benchmarks.vllm.plan import Ask
from benchmarks.vllm.server import StepTail

#: Polling interval of the engine's step log.
TICK_S = 0.02
#: Servers close idle connections after some seconds (uvicorn: 5); the client closes them earlier.
KEEPALIVE_S = 2.0


@dataclass(slots=True)
class Answer:
    """The output of a request; times are in seconds from the start of the run.

    Attributes:
        request_id: Id of the request.
        arrival_s: Due time; latencies count from here, so that a late client hides nothing.
        sent_s: Time at which it was sent.
        first_token_s: Time of the first chunk of the output.
        finish_s: Time of the last chunk.
        arrival_clock_s, first_token_clock_s, finish_clock_s: The same times by the run's clock.
        prompt_tokens, output_tokens: Counts of the engine.
        finish_reason: Reported by the engine.
        token_s, token_clock_s: Time of each token, if the prompt was sent as token ids.
    """

    request_id: str
    arrival_s: float
    arrival_clock_s: float
    sent_s: float
    first_token_s: float = 0.0
    finish_s: float = 0.0
    first_token_clock_s: float = 0.0
    finish_clock_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    token_s: list[float] = field(default_factory=list)
    token_clock_s: list[float] = field(default_factory=list)


def send_all(
    url: str, model: str, asks: Sequence[Ask], temperature: float, clock: EngineClock, tail: StepTail
) -> dict[str, Any]:
    """Performs one run: start and end on the monotonic clock, a row for each request, and the engine's steps.

    Args:
        url: Address of the engine, or of the proxy in front of it.
        model: Name of the served model.
        asks: Requests to send.
        temperature: Sampling temperature.
        clock: Clock of the due times.
        tail: Reader of the engine's step log.

    Raises:
        RuntimeError: A request was rejected, or its stream ended early.
    """
    return asyncio.run(_Run(url, model, asks, temperature, clock, tail).all())


@dataclass
class _Run:
    url: str
    model: str
    asks: Sequence[Ask]
    temperature: float
    clock: EngineClock
    tail: StepTail
    steps: list[list[float]] = field(default_factory=list)
    begin: float = 0.0

    async def all(self) -> dict[str, Any]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as client:
            self.begin = time.monotonic()
            work = asyncio.create_task(self._send_all(client))
            watch = asyncio.create_task(self._watch())
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                work.cancel()
                await watch
            watch.cancel()
            answers = await work
        end = time.monotonic()
        self._update()
        return {"begin": self.begin, "end": end, "requests": answers, "steps": self.steps}

    def _now(self) -> float:
        return time.monotonic() - self.begin

    def _update(self) -> None:
        new = [[row[0] - self.begin, *row[1:]] for row in self.tail.read()]
        self.clock.update(self._now(), new)
        self.steps += new

    async def _watch(self) -> None:
        while True:
            self._update()
            await asyncio.sleep(TICK_S)

    async def _send_all(self, client: aiohttp.ClientSession) -> list[dict[str, Any]]:
        tasks = []
        try:
            async with asyncio.TaskGroup() as group:  # the first failure cancels the other requests
                for ask in sorted(self.asks, key=lambda ask: ask.at_s):
                    while (wait := self.clock.when(ask.at_s) - self._now()) > 0:
                        await asyncio.sleep(min(wait, TICK_S))
                    answer = Answer(ask.request_id, self.clock.when(ask.at_s), ask.at_s, self._now())
                    tasks.append(group.create_task(self._send(client, ask, answer)))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [asdict(task.result()) for task in tasks]

    async def _send(self, client: aiohttp.ClientSession, ask: Ask, answer: Answer) -> Answer:
        body = {
            "model": self.model, "max_tokens": ask.max_tokens, "temperature": self.temperature, "seed": ask.seed,
            "stream": True, "stream_options": {"include_usage": True}, "vllm_xargs": dict(ask.hints),
        }  # fmt: skip
        if isinstance(ask.prompt, str):
            path = "/v1/chat/completions"
            body |= {"messages": [{"role": "user", "content": ask.prompt}]}
        else:
            path = "/v1/completions"
            body |= {"prompt": ask.prompt, "ignore_eos": True, "return_token_ids": True}
        async with client.post(self.url + path, json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{ask.request_id}: HTTP {response.status}: {await response.text()}")
            async for line in response.content:
                now_s = self._now()
                read_event(line, answer, now_s, self.clock.at(now_s))
        if not answer.output_tokens or not answer.finish_reason:
            raise RuntimeError(f"{ask.request_id}: the stream of its output ended early")
        return answer


def read_event(line: bytes, answer: Answer, now_s: float, clock_s: float) -> None:
    """Parses one line of an event stream."""
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line[6:])
    for choice in event.get("choices", ()):
        num_tokens = len(choice.get("token_ids") or ())
        answer.token_s += [now_s] * num_tokens
        answer.token_clock_s += [clock_s] * num_tokens
        if num_tokens or choice.get("delta", {}).get("content") or choice["finish_reason"]:
            if not answer.first_token_s:
                answer.first_token_s, answer.first_token_clock_s = now_s, clock_s
            answer.finish_s, answer.finish_clock_s = now_s, clock_s
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    if event.get("usage"):
        answer.prompt_tokens = event["usage"]["prompt_tokens"]
        answer.output_tokens = event["usage"]["completion_tokens"]
