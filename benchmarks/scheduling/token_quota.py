"""Quota of tokens per minute in LiteLLM, reserved by different estimates of the output.

    python -m benchmarks.scheduling.token_quota DATA [--quota 10000] [--loads 0.6 0.8 0.95] [--seeds 5]

Runs LiteLLM's own limiter (`pip install 'litellm[proxy]'`, version 1.109) in this process, in virtual time, without Redis:
it reserves input and estimated output when a request arrives, and settles the difference when it ends. One key with a quota,
Poisson arrivals of chats without max_tokens at `--loads` of the quota; a request takes 0.3 s and 20 ms for each output token.
DATA is the folder of the public data sets; requests are the last `--requests` of a stream of many applications that no
predictor was trained on (`benchmarks.lengths.streams`), outputs up to 4,096 tokens.

Estimates: LiteLLM's, max(input, 1024); nothing; max_tokens = 4,096, sent by every client; the mean length of the earlier
requests, which an operator can set for a key; the mean and the P90 predicted by `tailcast-minilm` as shipped and with the
memory of past requests; the true length. `scheduler_core.adapters.litellm` passes the mean with memory to LiteLLM.

The tokens of an admitted request count in the minute in which it arrived. False 429: refused although it would have fitted, in
percent of the requests. Overshoot: tokens above the quota, in percent of the quota. Means over seeds with 95 % intervals.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lengths.features import Features, held_out_streams, remembered
from benchmarks.lengths.streams import Stream
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell
from scheduler_core.adapters.litellm import ESTIMATES
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.report.page import markdown_table

MAX_TOKENS = 4096
#: Seconds of a request, and of each output token.
FIRST_S, TOKEN_S = 0.3, 0.02
#: Requests in flight, whose lengths the memory does not know yet.
IN_FLIGHT = 16
HEADER = ("estimate", "false 429, %", "all 429, %", "overshoot, %", "minutes above, %", "quota used, %")


class Ask(NamedTuple):
    """A request: characters and tokens of its prompt, output tokens, and the estimate that is reserved for these (None:
    LiteLLM's own). `has_limit`: the estimate is the max_tokens of the client."""

    chars: int
    prompt_tokens: int
    output_tokens: int
    estimate: int | None
    has_limit: bool = False

    @property
    def total_tokens(self) -> int:
        """Tokens that the quota is charged for."""
        return self.prompt_tokens + self.output_tokens


class Ledger:
    """The quota as it would be with known lengths: tokens by the minute of the arrival."""

    def __init__(self, quota: int) -> None:
        self._quota, self._used, self._num = quota, Counter[int](), Counter[str]()

    def add(self, ask: Ask, window: int, *, admitted: bool) -> None:
        """Adds a request, and what the limiter decided."""
        self._num["all"] += 1
        if admitted:
            self._used[window] += ask.total_tokens
            return
        self._num["refused"] += 1
        self._num["false"] += self._used[window] + ask.total_tokens <= self._quota

    def row(self) -> list[float]:
        """[5] percentages, as in `HEADER`."""
        used = np.array(list(self._used.values())) / self._quota
        shares = (self._num["false"], self._num["refused"])
        values = [share / self._num["all"] for share in shares]
        return [
            100 * float(value)
            for value in (*values, (used - 1).clip(0).mean(), (used > 1).mean(), used.mean())
        ]


async def run(asks: Sequence[Ask], arrivals_s: Sequence[float], quota: int) -> Ledger:
    """Sends the requests through a new limiter."""
    import litellm
    from litellm.caching.caching import DualCache
    from litellm.proxy._types import UserAPIKeyAuth
    from litellm.proxy.hooks.parallel_request_limiter_v3 import (
        _PROXY_MaxParallelRequestsHandler_v3 as Limiter,
    )
    from litellm.proxy.utils import InternalUsageCache

    now_s = 0.0
    cache = InternalUsageCache(DualCache())
    limiter = Limiter(cache, time_provider=lambda: datetime.fromtimestamp(1.7e9 + now_s, UTC))
    ledger, loop = Ledger(quota), asyncio.get_running_loop()
    events = [(at_s, 0, number) for number, at_s in enumerate(arrivals_s)]
    contexts: dict[int, contextvars.Context] = {}  # LiteLLM keeps the reservation of a request in its context
    while events:
        now_s, is_end, number = heapq.heappop(events)
        ask, call = asks[number], {"litellm_call_id": str(number)}
        if is_end:
            usage = litellm.Usage(ask.prompt_tokens, ask.output_tokens, ask.total_tokens)
            of_key = {
                "standard_logging_object": {"metadata": {"user_api_key_hash": "key"}},
                "litellm_params": {},
            }
            ended = limiter.async_log_success_event(
                call | of_key, litellm.ModelResponse(usage=usage), None, None
            )
            await loop.create_task(ended, context=contexts.pop(number))
            continue
        messages = [{"role": "user", "content": ask.chars * "x"}]
        body: dict[str, Any] = {"model": "m", "messages": messages, "metadata": {}, **call}
        declared = {}
        if ask.has_limit:
            body["max_tokens"] = ask.estimate
        elif ask.estimate is not None:
            declared = {ESTIMATES: {"m": ask.estimate}}
        key = UserAPIKeyAuth(api_key="key", tpm_limit=quota, metadata=declared)
        context = contextvars.copy_context()
        try:
            hook = limiter.async_pre_call_hook(key, cache.dual_cache, body, "acompletion")
            await loop.create_task(hook, context=context)
        except Exception as error:
            if getattr(error, "status_code", None) != 429:
                raise
        else:
            contexts[number] = context
            heapq.heappush(events, (now_s + FIRST_S + TOKEN_S * ask.output_tokens, 1, number))
        window = await cache.async_get_cache(
            "{api_key:key}:window", litellm_parent_otel_span=None, local_only=True
        )
        ledger.add(ask, int(window), admitted=number in contexts)
    return ledger


def estimates(stream: Stream, features: Features, num: int) -> dict[str, list[Ask]]:
    """The last `num` requests of a stream, by estimate."""
    raw, corrected = remembered(stream, features, IN_FLIGHT)
    earlier = round(float(np.mean([tokens for _, tokens in stream[:-num]])))

    def mean(length: LengthPrediction) -> int:
        return round(length.expected_and_cvar(MAX_TOKENS)[0])

    def p90(length: LengthPrediction) -> int:
        return round(min(float(length.distribution().ppf(0.9)), MAX_TOKENS))

    kinds: dict[str, Callable[[int], int | None]] = {
        "LiteLLM: max(input, 1024)": lambda row: None,
        "none: input alone": lambda row: 1,
        "max_tokens": lambda row: MAX_TOKENS,
        "mean of earlier requests": lambda row: earlier,
        "predicted mean, as shipped": lambda row: mean(raw[row]),
        "predicted P90, as shipped": lambda row: p90(raw[row]),
        "predicted mean, memory": lambda row: mean(corrected[row]),
        "predicted P90, memory": lambda row: p90(corrected[row]),
        "true length": lambda row: stream[row][1],
    }
    rows = range(len(stream) - num, len(stream))
    asks: dict[str, list[Ask]] = {}
    for kind, estimate in kinds.items():
        asks[kind] = []
        for row in rows:
            (request, tokens), value = stream[row], estimate(row)
            value = None if value is None else max(1, value)
            num_tokens = max(1, features.num_tokens(request.prompt))
            asks[kind].append(Ask(len(request.prompt), num_tokens, tokens, value, kind == "max_tokens"))
    return asks


def main() -> None:
    """Prints a table for each load."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--quota", type=int, default=10_000, help="tokens per minute")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.8, 0.95])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--cache", type=Path, default=Path("out/lengths"), help="folder of slow features")
    options = parser.parse_args()
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    logging.disable(logging.ERROR)  # LiteLLM logs every refused request
    mixed, features = held_out_streams(options.data, options.cache, options.seeds, MAX_TOKENS)
    asks = [estimates(stream, features, options.requests) for stream in mixed]
    for load in options.loads:
        rows: dict[str, list[list[float]]] = {}
        for seed, by_kind in enumerate(asks):
            mean = np.mean([ask.total_tokens for ask in next(iter(by_kind.values()))])
            gaps = np.random.default_rng(seed).exponential(
                60 * mean / (load * options.quota), options.requests
            )
            for kind, requests in by_kind.items():
                ledger = asyncio.run(run(requests, np.cumsum(gaps).tolist(), options.quota))
                rows.setdefault(kind, []).append(ledger.row())
        cells = [
            (kind, *(mean_cell(list(column), 1) for column in zip(*values, strict=True)))
            for kind, values in rows.items()
        ]
        title = f"{options.quota:,} tokens per minute, load {load:g}, {options.requests:,} requests, {options.seeds} seeds"
        print(f"{title}:\n\n{markdown_table(HEADER, cells)}\n", flush=True)


if __name__ == "__main__":
    main()
