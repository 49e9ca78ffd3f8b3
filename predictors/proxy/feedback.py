"""Records of the feedback log: predicted and true length of each finished request."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass
from typing import Any

from predictors.proxy.config import ProxyConfig
from predictors.proxy.feedback_log import FeedbackLog
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.parsing import ParsedRequest
from predictors.proxy.prediction import Forecast, Forecaster
from predictors.proxy.responses import OutputCounter, ResponseStats
from scheduler_core.predictions import Prediction
from scheduler_core.predictor import PredictionRequest
from scheduler_core.request import Request

FORMAT = "tailcast-feedback/1"
#: Finish reasons of complete and of censored outputs.
COMPLETE = frozenset({"stop", "tool_calls", "function_call", "eos", "stop_sequence", "end_turn"})
CENSORED = frozenset({"length", "max_tokens", "abort"})
#: Queries to the shadow predictor in flight; further ones are skipped.
MAX_SHADOWS = 64


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One completion on its way through the proxy.

    Attributes:
        started_s: Time of its arrival, on `time.perf_counter`.
        waited_s: Time spent on the prediction, or in the proxy's own queue.
        end: complete, error, engine_lost or client_gone.
    """

    parsed: ParsedRequest
    request: Request
    started_s: float
    waited_s: float = 0.0
    forecast: Forecast | None = None
    shadow: asyncio.Task[Forecast] | None = None
    stats: ResponseStats | None = None
    end: str = ""


class Recorder:
    """Writes records of finished completions; never waits, never fails a request.

    Raises:
        InputError: The folder cannot be written to, or `served_tokenizer` is not a tokenizer.
    """

    def __init__(self, config: ProxyConfig, metrics: ProxyMetrics, shadow: Forecaster | None) -> None:
        assert config.feedback is not None
        self.counter = OutputCounter(config.served_tokenizer)
        self._requests_usage = config.feedback_usage
        self._stores_prompts = config.feedback_prompts == "stored"
        self._metrics, self._shadow = metrics, shadow
        self._tasks: set[asyncio.Task[None]] = set()
        self._shadows: set[asyncio.Task[Forecast]] = set()
        self._log = FeedbackLog(
            config.feedback,
            segment_bytes=config.feedback_segment_mib * 2**20,
            on_outcome=lambda outcome: metrics.records.labels(outcome).inc(),
        )

    def requests_usage(self, parsed: ParsedRequest) -> bool:
        """Whether the proxy should request the token counts of a stream that the client has not requested."""
        options = parsed.content.get("stream_options")
        needs_usage = parsed.is_completion and parsed.stream and not parsed.include_usage
        return (
            self._requests_usage
            and needs_usage
            and isinstance(options, dict | None)
            and parsed.num_choices == 1
        )

    def start_shadow(self, exchange: Exchange, query: PredictionRequest) -> None:
        """Queries the shadow predictor without delaying the request."""
        if self._shadow is None:
            return
        if len(self._shadows) >= MAX_SHADOWS:
            self._metrics.shadows.labels("skipped").inc()
            return
        exchange.shadow = asyncio.create_task(self._shadow.forecast(query))
        self._shadows.add(exchange.shadow)
        exchange.shadow.add_done_callback(self._shadows.discard)

    def finish(self, exchange: Exchange) -> None:
        """A completion has ended; its record is written as soon as all of it is known."""
        stats = exchange.stats
        if stats is None or exchange.parsed.num_choices != 1:
            return
        if exchange.end in ("complete", "client_gone"):
            task = asyncio.create_task(self._write(exchange, stats, time.perf_counter()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Writes what is pending and ends the log."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._shadows:
            task.cancel()
        await asyncio.to_thread(self._log.close)

    async def _write(self, exchange: Exchange, stats: ResponseStats, ended_s: float) -> None:
        shadow = None if exchange.shadow is None else await exchange.shadow
        if shadow is not None:
            self._metrics.shadows.labels(shadow.outcome).inc()
        if self.counter.needs_text and stats.output_tokens is None:
            length = await asyncio.to_thread(self.counter.count, stats)
        else:
            length = self.counter.count(stats)
        if length is None:
            return
        self._metrics.counts.labels(length.counted_by).inc()
        parsed, request = exchange.parsed, exchange.request
        reason = stats.finish_reason if exchange.end == "complete" else "abort"
        record: dict[str, Any] = {
            "format": FORMAT,
            "time": time.time() - (time.perf_counter() - exchange.started_s),
            "request_id": request.request_id,
            "tenant": request.tenant,
            "tier": request.tier,
            "served_model": parsed.model or None,
            "max_tokens": parsed.max_tokens,
            "temperature": parsed.temperature,
            "top_p": parsed.top_p,
            "output_tokens": length.output_tokens,
            "counted_by": length.counted_by,
            "finish_reason": reason,
            "finished": finished(reason),
            "prompt_tokens": stats.prompt_tokens,
            "waited_s": exchange.waited_s,
            "ttft_s": None if stats.first_s is None else stats.first_s - exchange.started_s,
            "total_s": ended_s - exchange.started_s,
        }
        record |= self._prompt(parsed)
        record |= _length_fields(None if exchange.forecast is None else exchange.forecast.prediction)
        if shadow is not None:
            record["shadow"] = _length_fields(shadow.prediction) or None
        self._log.put(record)

    def _prompt(self, parsed: ParsedRequest) -> dict[str, Any]:
        """The prompt, or its hash, by which repeated prompts are found."""
        text = parsed.prompt or ""
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        fields: dict[str, Any] = {"prompt_sha256": digest}
        if self._stores_prompts:
            fields["prompt"] = text
            if parsed.messages is not None:
                fields["messages"] = [{"role": role, "content": text} for role, text in parsed.messages]
        return fields


def finished(reason: str) -> bool | None:
    """Whether an output ended by itself; None where its finish reason does not tell."""
    return True if reason in COMPLETE else False if reason in CENSORED else None


def _length_fields(prediction: Prediction | None) -> dict[str, Any]:
    """The predicted length as `evaluate-stream` reads it; empty without one."""
    length = None if prediction is None else prediction.length
    if length is None:
        return {}
    return {
        "mu": length.mu,
        "sigma": length.sigma,
        "nu": length.nu,
        "artifact_id": length.artifact_id,
        "artifact_version": length.artifact_version,
    }
