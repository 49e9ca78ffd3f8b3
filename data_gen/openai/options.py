"""Options of the OpenAI backend: addresses, limits, waits."""

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
    """The engine is unavailable or refuses all requests; the run stops and can be resumed later."""


@dataclass(frozen=True, kw_only=True)
class OpenAIOptions:
    """One or more identical servers with the OpenAI API.

    Engines have their own sampling defaults (vLLM: the model's generation_config.json, e.g. top_k or a repetition
    penalty). Use `body` to override them, e.g. {"top_k": -1}, if outputs should depend on temperature and top_p only.
    """

    base_urls: tuple[str, ...] = ("http://localhost:8000/v1",)
    """Base URLs, including /v1; requests are distributed over several servers of the same model."""
    model: str = ""
    """Name of the model on the server; empty: the only served model."""
    api: Literal["chat", "completions"] = "chat"
    """chat sends messages, and the server applies the chat template; completions sends the plain text of the prompt."""
    concurrency: int = 256
    """Maximum number of requests in flight per server; reduced while the server responds with 429 or 5xx, or times out."""
    send_seed: bool = True
    """Send a seed derived from the run's seed, the prompt id and the sample index."""
    max_tokens_field: str = "max_tokens"
    """Field of the request for the maximum number of output tokens; some hosted models need max_completion_tokens."""
    timeout_s: float = 600.0
    """Timeout of a request."""
    max_attempts: int = 10
    """Maximum number of attempts per request; an unreachable server does not count as an attempt."""
    backoff_s: float = 0.5
    """Maximum of the random wait before the second attempt; doubled for every further attempt."""
    max_backoff_s: float = 60.0
    """Upper bound of this wait, unless the server requests a longer one with Retry-After."""
    start_wait_s: float = 10.0
    """Maximum time to wait for a server to respond at the start."""
    server_wait_s: float = 900.0
    """Maximum time to wait while all servers are unavailable; then the run stops, and can be resumed."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key; if it is not set, no key is sent."""
    headers: dict[str, str] = field(default_factory=dict)
    """Additional headers; a value env:NAME is read from the environment. Only the names of headers are recorded."""
    body: dict[str, Any] = field(default_factory=dict)
    """Additional fields of the request, e.g. {"priority": 1} or {"chat_template_kwargs": {"enable_thinking": false}}."""
    trust_env: bool = False
    """Use the proxies configured in the environment."""

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
        counts = ("concurrency", "max_attempts")
        times = ("timeout_s", "backoff_s", "max_backoff_s")
        check_ranges(self, **dict.fromkeys(counts, (1, INTEGERS)), **dict.fromkeys(times, (POSITIVE, FINITE)))
        check_ranges(self, start_wait_s=(0.0, FINITE), server_wait_s=(0.0, FINITE))
        taken = sorted({*_OURS, self.max_tokens_field} & set(self.body))
        if taken:
            raise InputError("body", taken, "fields that are not set by other options")
        try:
            json.dumps(self.body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError("body", self.body, "JSON values") from error

    @property
    def look_ahead(self) -> int:
        """Number of samples that are consumed ahead of results: 1.25 times the maximum number in flight.

        A factor of 2 increased the CPU time per request by half with 10,000 requests in flight.
        """
        in_flight = self.concurrency * len(self.base_urls)
        return in_flight + max(8, in_flight // 4)

    def secrets(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Headers to send, including values from the environment; these must not be logged or stored. InputError if a
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
