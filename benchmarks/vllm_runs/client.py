"""Sends requests to an OpenAI server at given times, whether it is behind or not, and notes when answers come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True)
class Ask:
    """What to send.

    Attributes:
        request_id: Its name here.
        prompt: Of the only message, a user's.
        at_s: When it is due, in seconds from the run's begin.
        seed: Of the sampling.
        max_tokens: Cap of the answer.
        ignore_eos: Go on to the cap, whatever the model says.
    """

    request_id: str
    prompt: str
    at_s: float
    seed: int
    max_tokens: int
    ignore_eos: bool = False


@dataclass(slots=True)
class Answer:
    """What came; times in seconds from the run's begin.

    Attributes:
        request_id: Of which request.
        arrival_s: When it was due: latencies count from here, so that a client that is late hides nothing.
        sent_s: When it was sent.
        first_token_s: First piece of the answer.
        finish_s: Its last one.
        prompt_tokens, output_tokens: As the engine counts.
        finish_reason: The engine's.
    """

    request_id: str
    arrival_s: float
    sent_s: float
    first_token_s: float = 0.0
    finish_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""


def send_all(url: str, model: str, asks: Sequence[Ask], temperature: float) -> dict[str, Any]:
    """One run: begin and end on the monotonic clock, and a row for each request.

    Raises:
        RuntimeError: A request was refused, or its answer broke off.
    """
    return asyncio.run(_send_all(url, model, asks, temperature))


async def _send_all(url: str, model: str, asks: Sequence[Ask], temperature: float) -> dict[str, Any]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as client:
        begin = time.monotonic() + 0.1

        async def send(ask: Ask) -> Answer:
            body = {
                "model": model, "messages": [{"role": "user", "content": ask.prompt}], "max_tokens": ask.max_tokens,
                "temperature": temperature, "seed": ask.seed, "stream": True, "stream_options": {"include_usage": True},
                "ignore_eos": ask.ignore_eos,
            }  # fmt: skip
            await asyncio.sleep(max(begin + ask.at_s - time.monotonic(), 0))
            answer = Answer(ask.request_id, ask.at_s, time.monotonic() - begin)
            async with client.post(f"{url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise RuntimeError(f"{ask.request_id}: HTTP {response.status}: {await response.text()}")
                async for line in response.content:
                    read_event(line, answer, time.monotonic() - begin)
            if not answer.output_tokens or not answer.finish_reason:
                raise RuntimeError(f"{ask.request_id}: its answer broke off")
            return answer

        answers = await asyncio.gather(*map(send, asks))
        return {"begin": begin, "end": time.monotonic(), "requests": [asdict(answer) for answer in answers]}


def read_event(line: bytes, answer: Answer, now_s: float) -> None:
    """One line of a stream of events."""
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line[6:])
    for choice in event.get("choices", ()):
        if choice["delta"].get("content") or choice["finish_reason"]:
            answer.first_token_s = answer.first_token_s or now_s
            answer.finish_s = now_s
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    if event.get("usage"):
        answer.prompt_tokens = event["usage"]["prompt_tokens"]
        answer.output_tokens = event["usage"]["completion_tokens"]
