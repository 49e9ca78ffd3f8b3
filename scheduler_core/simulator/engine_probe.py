"""Requests to a live engine through OpenAI's completions API, open loop, with the time of every token."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from scheduler_core.errors import InputError, TailcastError

#: Short words, so that a prompt of n of them has about n tokens with any tokenizer.
WORDS = ("the", "of", "and", "to", "in", "is", "it", "for", "on", "was", "as", "with", "be", "at", "by", "or")


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """A request to send, `arrival_s` seconds after the start."""

    request_id: str
    arrival_s: float
    prompt: str
    max_tokens: int


@dataclass(slots=True)
class ProbeResponse:
    """The response; times in seconds from the start of the measurement.

    Attributes:
        prompt_tokens: Tokens of the prompt, as the engine counts; output_tokens likewise.
        token_s: Time of each token; of a chunk with several tokens only once.
        error: The reason of a failure; None: it succeeded.
    """

    request_id: str
    sent_s: float = 0.0
    prompt_tokens: int = 0
    max_tokens: int = 0
    token_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A live engine.

    Attributes:
        url: Base, such as http://127.0.0.1:8000/v1.
        model: Name of the served model.
        api_key: Sent as a bearer token; None: none.
        timeout_s: A silence as long as this is a failure.
        extra_body: Further fields of every request, such as {"ignore_eos": true} for vLLM.

    Raises:
        InputError: The address is not one of http or https.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 60.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError("url", self.url, "http://HOST:PORT/v1 or https://...")
        if self.timeout_s <= 0:
            raise InputError("timeout_s", self.timeout_s, "seconds > 0")


def random_prompt(num_words: int, rng: np.random.Generator) -> str:
    """A prompt of so many words, new to every prefix cache."""
    return " ".join(rng.choice(WORDS, size=num_words))


def probe(
    endpoint: Endpoint,
    requests: Sequence[ProbeRequest],
    *,
    progress: Callable[[int], None] | None = None,
) -> list[ProbeResponse]:
    """Sends every request at its time, whatever has become of the others, and waits for all responses.

    Args:
        endpoint: The engine.
        requests: The requests.
        progress: Called with 1 after each response, from several threads.

    Raises:
        TailcastError: All requests failed; contains the error of the first one.
    """
    start = time.perf_counter()
    responses = {item.request_id: ProbeResponse(item.request_id) for item in requests}

    def send(item: ProbeRequest) -> None:
        _send(endpoint, item, responses[item.request_id], start)
        if progress is not None:
            progress(1)

    threads = []
    for item in sorted(requests, key=lambda one: one.arrival_s):
        time.sleep(max(0.0, start + item.arrival_s - time.perf_counter()))
        thread = threading.Thread(target=send, args=(item,), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    ordered = [responses[item.request_id] for item in requests]
    if ordered and all(response.error is not None for response in ordered):
        raise TailcastError(f"engine {endpoint.url}: all requests failed: {ordered[0].error}")
    return ordered


def _send(endpoint: Endpoint, item: ProbeRequest, response: ProbeResponse, start: float) -> None:
    """One request; fills `response`, also with errors."""
    parts = urlsplit(endpoint.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=endpoint.timeout_s)
    body = {
        "model": endpoint.model,
        "prompt": item.prompt,
        "max_tokens": item.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.extra_body,
    }
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    response.max_tokens = item.max_tokens
    response.sent_s = time.perf_counter() - start
    try:
        connection.request("POST", f"{parts.path.rstrip('/')}/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != 200:
            response.error = f"HTTP {reply.status}: {reply.read(300).decode(errors='replace')}"
            return
        _read_stream(reply, response, start)
        if not response.token_s:
            response.error = "the output has no token"
        elif not response.output_tokens or not response.prompt_tokens:
            response.error = "the response has no usage: stream_options.include_usage is not supported"
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        response.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def _read_stream(stream: http.client.HTTPResponse, response: ProbeResponse, start: float) -> None:
    """Server-sent events: a chunk per token, the usage at the end."""
    for line in stream:
        if not line.startswith(b"data:"):
            continue
        content = line[5:].strip()
        if content == b"[DONE]":
            return
        event = json.loads(content)
        if "error" in event:
            raise ValueError(str(event["error"]))
        if event.get("choices") and (event["choices"][0].get("text") or not event.get("usage")):
            response.token_s.append(time.perf_counter() - start)
        if event.get("usage"):
            response.prompt_tokens = int(event["usage"]["prompt_tokens"])
            response.output_tokens = int(event["usage"]["completion_tokens"])
