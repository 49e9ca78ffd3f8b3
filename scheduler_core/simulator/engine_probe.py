"""Open-loop requests to a live engine with OpenAI's completions API, with the time of every token."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from scheduler_core.errors import InputError, TailcastError

#: Short words: a prompt of n words has about n tokens with any tokenizer.
WORDS = ("the", "of", "and", "to", "in", "is", "it", "for", "on", "was", "as", "with", "be", "at", "by", "or")


@dataclass(slots=True, kw_only=True)
class Probe:
    """A request and its response. `arrival_s` is when to send it, in seconds from the call of `send`; `sent_s` when it was sent
    and `token_s` the time of each token (of a chunk with several tokens only once) are in seconds from the start of the
    measurement. Token counts are those reported by the engine."""

    request_id: str
    arrival_s: float = 0.0
    prompt: str = ""
    max_tokens: int = 0
    sent_s: float = 0.0
    prompt_tokens: int = 0
    token_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A live engine with an OpenAI-compatible API."""

    url: str
    """Base address of the engine, such as http://127.0.0.1:8000/v1."""
    served_model: str
    """Name of the served model."""
    timeout_s: float = 60.0
    """Seconds without data after which a response has failed."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request; {ignore_eos: true} makes vLLM generate max_tokens tokens."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError("url", self.url, "http://HOST:PORT/v1 or https://...")
        if parts.username is not None or parts.password is not None:  # the log and the result have the URL
            raise InputError("url", self.url, "an address without user or password")


def random_prompt(num_words: int, rng: np.random.Generator) -> str:
    """A prompt of `num_words` random words, to avoid hits in prefix caches."""
    return " ".join(rng.choice(WORDS, size=num_words))


def send(
    endpoint: Endpoint,
    probes: Sequence[Probe],
    start_s: float,
    *,
    api_key: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Sends every request at its time, independently of the others, and fills in all responses.
    `TailcastError` with the error of the first one if all requests failed.

    `start_s` is the start of the measurement on `time.perf_counter`. `progress` is called with 1 after each response, from several threads.
    """
    now_s = time.perf_counter()

    def send_one(probe: Probe) -> None:
        _send(endpoint, api_key, probe, start_s)
        progress(1)

    threads = []
    for probe in sorted(probes, key=lambda probe: probe.arrival_s):
        time.sleep(max(0.0, now_s + probe.arrival_s - time.perf_counter()))
        threads.append(threading.Thread(target=send_one, args=(probe,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if all(probe.error is not None for probe in probes):
        raise TailcastError(f"engine {endpoint.url}: all requests failed: {probes[0].error}")


def _send(endpoint: Endpoint, api_key: str | None, probe: Probe, start_s: float) -> None:
    """Sends one request and fills in its response or error."""
    body = {
        "model": endpoint.served_model,
        "prompt": probe.prompt,
        "max_tokens": probe.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.extra_body,
    }
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    url = f"{endpoint.url.rstrip('/')}/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    probe.sent_s = time.perf_counter() - start_s
    try:
        with direct.open(request, timeout=endpoint.timeout_s) as reply:
            _read_stream(reply, probe, start_s)
        if not probe.token_s:
            probe.error = "the output has no token"
        elif not probe.output_tokens or not probe.prompt_tokens:
            probe.error = "the response has no usage: stream_options.include_usage is not supported"
    except urllib.error.HTTPError as error:
        with error:
            probe.error = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        probe.error = f"{type(error).__name__}: {error}"


def _read_stream(stream: Iterable[bytes], probe: Probe, start_s: float) -> None:
    """Parses server-sent events: one chunk per token, and the usage at the end."""
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
            probe.token_s.append(time.perf_counter() - start_s)
        if event.get("usage"):
            probe.prompt_tokens = int(event["usage"]["prompt_tokens"])
            probe.output_tokens = int(event["usage"]["completion_tokens"])
