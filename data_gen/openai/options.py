"""Options of the OpenAI backend: addresses, limits, token counting."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_ranges

ENV_SCHEME = "env:"
_OURS = ("messages", "prompt", "n", "seed", "stream", "stream_options", "model", "temperature", "top_p")


class EngineError(TailcastError):
    """The engine is gone or refuses everything; the run stops and can be resumed when it is back."""


@dataclass(frozen=True, kw_only=True)
class OpenAIOptions:
    """A server, or several equal ones, with the OpenAI API.

    Engines add their own sampling defaults (vLLM: the model's generation_config.json, e.g. top_k or a repetition
    penalty); `body` sets them where the lengths are to follow temperature and top_p alone, e.g. {"top_k": -1}.
    """

    base_urls: tuple[str, ...] = ("http://localhost:8000/v1",)
    """Addresses up to and including /v1; several serve the same model and share the requests."""
    model: str = ""
    """Name of the model as the server knows it; empty: the only one it serves."""
    api: Literal["chat", "completions"] = "chat"
    """chat sends messages, the server applies the chat template; completions sends the bare text of the prompt."""
    concurrency: int = 256
    """Requests in flight per server; fewer while it answers 429, 5xx or not in time."""
    samples_per_request: int = 1
    """Outputs per request (`n`). 1 gives exact token counts from any server and a seed for every output."""
    send_seed: bool = True
    """Send a seed derived from the run's seed, the prompt id and the sample index; only with one output per request."""
    stream: bool = False
    """Stream the outputs, to measure the time to the first token; costs client time for every token."""
    count_by: Literal["usage", "token_ids", "logprobs", "tokenizer"] = "usage"
    """Where the length of an output comes from: usage (one output per request), token_ids (vLLM), logprobs (most engines),
    or counting its text by `tokenizer`, which counts only if the sum agrees with usage."""
    tokenizer: str = ""
    """The model's tokenizer.json, or a folder with it: counts texts where the server does not list tokens."""
    max_tokens_field: str = "max_tokens"
    """Field of the request for the maximum number of output tokens; some hosted models need max_completion_tokens."""
    timeout_s: float = 600.0
    """Longest time for one request."""
    chunk_timeout_s: float = 120.0
    """Longest time without a chunk when streaming."""
    connect_timeout_s: float = 20.0
    """Longest time to connect."""
    max_attempts: int = 10
    """Attempts at one request before it counts as failed; waiting for an absent server is not an attempt."""
    backoff_s: float = 0.5
    """Upper end of the random wait before the second attempt; doubles with every further one."""
    max_backoff_s: float = 60.0
    """Longest such wait, unless the server asks for more with Retry-After."""
    start_wait_s: float = 10.0
    """How long to wait at the start until a server responds."""
    server_wait_s: float = 900.0
    """How long to wait for a server to come back before the run stops; it can then be resumed."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; none is sent if it is not set."""
    headers: dict[str, str] = field(default_factory=dict)
    """Further headers; a value env:NAME is taken from the environment. Only their names are recorded."""
    body: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request, e.g. {"priority": 1} or {"chat_template_kwargs": {"enable_thinking": false}}."""
    trust_env: bool = False
    """Use the proxies named in the environment."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_urls", tuple(url.rstrip("/") for url in self.base_urls))
        for url in self.base_urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise InputError("base_urls", url, "http://HOST:PORT/v1 or https://HOST/v1")
            if parts.username or parts.password or parts.query or parts.fragment:
                allowed = "an address without user, password or query; use `headers`"
                raise InputError("base_urls", f"{parts.scheme}://{parts.hostname}...", allowed)
        if not self.base_urls or len(set(self.base_urls)) < len(self.base_urls):
            raise InputError("base_urls", list(self.base_urls), "at least one address, each once")
        counts = ("concurrency", "samples_per_request", "max_attempts")
        times = ("timeout_s", "chunk_timeout_s", "connect_timeout_s", "backoff_s", "max_backoff_s")
        check_ranges(self, **dict.fromkeys(counts, (1, INTEGERS)), **dict.fromkeys(times, (POSITIVE, FINITE)))
        check_ranges(self, start_wait_s=(0.0, FINITE), server_wait_s=(0.0, FINITE))
        if self.samples_per_request > 1 and self.count_by == "usage":
            allowed = "token_ids, logprobs or tokenizer with samples_per_request above 1: usage holds only their sum"
            raise InputError("count_by", self.count_by, allowed)
        if self.count_by == "tokenizer" and not self.tokenizer:
            raise InputError("tokenizer", "", "the model's tokenizer, for count_by tokenizer")
        taken = sorted({*_OURS, self.max_tokens_field} & set(self.body))
        if taken:
            raise InputError("body", taken, "fields that have no option of their own")
        try:
            json.dumps(self.body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError("body", self.body, "values that JSON can hold") from error

    @property
    def look_ahead(self) -> int:
        """Samples that are taken before the first one is returned: what can be in flight and a quarter more.

        Twice as much made a request cost half as much CPU time again at 10,000 in flight.
        """
        in_flight = self.concurrency * len(self.base_urls)
        return (in_flight + max(8, in_flight // 4)) * self.samples_per_request

    def secrets(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Headers to send, with the values that come from the environment; never to be logged or stored. InputError if a
        variable is not set."""
        headers = dict(self.headers)
        for name, value in headers.items():
            if value.startswith(ENV_SCHEME):
                variable = value.removeprefix(ENV_SCHEME)
                if variable not in environment:
                    raise InputError(f"headers.{name}", value, f"a variable {variable} in the environment")
                headers[name] = environment[variable]
        key = environment.get(self.api_key_env, "")
        if key and not any(name.lower() == "authorization" for name in headers):
            headers["Authorization"] = f"Bearer {key}"
        return headers
