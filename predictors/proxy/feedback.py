"""Records of the feedback log: predicted and actual length of each finished request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from predictors.hosting.live_page import MAX_ENDED, EndedRequest
from predictors.proxy.config import ProxyConfig
from predictors.proxy.feedback_log import FeedbackLog
from predictors.proxy.forecast import Forecast, Forecaster
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.parsing import ParsedRequest
from predictors.proxy.responses import ResponseStats, output_length
from predictors.proxy.session_context import Turn
from predictors.proxy.shared_calibration import ObservingClient, SharedCalibration
from scheduler_core.adapters.live_calibration import FORCED_LENGTH, LiveCalibration
from scheduler_core.prediction.correction import RequestContext
from scheduler_core.prediction.outcome import Outcome, is_finished
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.prediction.session import request_embedding
from scheduler_core.request import Request

if TYPE_CHECKING:
    from predictors.proxy.replicas import Engine

#: Kinds of engines whose streams have token counts if `stream_options` requests them.
USAGE_ENGINES = frozenset({"vllm", "sglang", "dynamo", "llm-d"})
#: Reasons why an ended request is not recorded -> explanation; the last ones only concern online calibration.
PROBLEMS = {
    "error": "the engine responded with an error",
    "engine_lost": "the engine disconnected during the response",
    "no_response": "the request ended before a response began",
    "client_gone": "the client disconnected before the first token",
    "other_endpoint": "responses of this endpoint cannot be read",
    "unread": "the response is compressed, or neither JSON nor a stream of events",
    "several_outputs": "engines report one number of tokens for all outputs of a request (n, best_of, prompts)",
    "malformed_n": "the number of outputs (n, best_of) is malformed",
    "no_tokens": "the response has neither a number of tokens nor events with output",
    "unpredicted": "the request had no prediction",
    "finish_reason": "the finish reason is missing, or neither complete nor truncated",
    "forced_length": FORCED_LENGTH,
}
_EXPECTED = frozenset({"error", "engine_lost", "no_response", "client_gone", "other_endpoint"})
#: Maximum number of queries to the shadow predictor in flight; further queries are skipped.
MAX_SHADOWS = 64
#: Timeout of the shadow predictor in seconds.
SHADOW_DEADLINE_S = 10.0
#: Minimum number of streams to estimate the tokens per event, and number of streams over which its weights decay.
MIN_STREAMS, STREAMS_MEMORY = 10, 256
#: Members of bodies with token ids.
_TOKEN_IDS = ("prompt", "input_ids", "token_ids", "prompt_token_ids")

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Exchange:
    """State of one completion request in the proxy."""

    parsed: ParsedRequest
    request: Request
    query: PredictionRequest
    started_s: float  # arrival time, on `time.perf_counter`
    waited_s: float = 0.0  # time spent on the prediction or in the queue of the proxy
    forecast: Forecast | None = None  # before online calibration
    context: RequestContext = field(default_factory=RequestContext)  # what online calibration uses of it
    used: Prediction | None = None  # after online calibration
    forecasting: asyncio.Task[Forecast] | None = None
    prompt_tokens: int | None = None  # if the predictor counted them
    turn: Turn | None = None  # if sessions are followed
    engine: Engine | None = None  # the chosen one
    shadow: asyncio.Task[Forecast] | None = None
    stats: ResponseStats | None = None
    span: Any = None  # if requests are traced
    end: str = ""  # complete, error, engine_lost or client_gone


class TokensPerEvent:
    """The engine's ratio of tokens to events with output, from streams with both numbers.

    It is 1 until there are `MIN_STREAMS` of them: engines send an event per token by default, and several tokens per event
    with speculative decoding or a larger stream interval.
    """

    def __init__(self) -> None:
        self.num_streams = 0
        self._tokens = self._events = 0.0

    def observe(self, stats: ResponseStats) -> None:
        """Updates the ratio with a complete stream; other responses are ignored."""
        if stats.output_tokens and stats.num_deltas:
            self.num_streams += 1
            decay = 1.0 - 1.0 / STREAMS_MEMORY
            self._tokens = decay * self._tokens + stats.output_tokens
            self._events = decay * self._events + stats.num_deltas

    def tokens(self, num_events: int) -> int:
        """The estimated number of tokens, at least 1."""
        ratio = self._tokens / self._events if self.num_streams >= MIN_STREAMS else 1.0
        return max(1, round(num_events * ratio))


class Recorder:
    """Updates calibration and feedback log with finished completions; never delays or fails a request.

    `client` returns the predictor in use, for a shared calibration."""

    def __init__(
        self, config: ProxyConfig, metrics: ProxyMetrics, client: Callable[[], ObservingClient | None]
    ) -> None:
        self.shadow = Forecaster(config.shadow_predictor, "shadow_predictor", SHADOW_DEADLINE_S, config)
        self._config, self._metrics = config, metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._shadows: set[asyncio.Task[Forecast]] = set()
        self.calibration: LiveCalibration | None = None
        self.shared: SharedCalibration | None = None
        if config.online_calibration == "shared":
            self.shared = SharedCalibration(
                client, lambda reason, count: metrics.calibration.skipped.labels(reason).inc(count)
            )
        elif config.online_calibration:
            self.calibration = LiveCalibration(config.calibration_file, metrics.calibration)
        usage = config.feedback_usage
        self._may_request_usage = usage is True or (usage == "auto" and config.engine in USAGE_ENGINES)
        #: Whether tokens are needed without calibration and log.
        self._counts_tokens = False
        self._tokens_per_event = TokensPerEvent()
        #: The latest ended requests with their predictions, for the live page.
        self.ended: deque[EndedRequest] = deque(maxlen=MAX_ENDED)
        self._log: FeedbackLog | None = None
        if config.feedback is not None:
            self._log = FeedbackLog(
                config.feedback,
                on_outcome=lambda outcome: metrics.records.labels(outcome).inc(),
            )

    def reload(self, config: ProxyConfig, shadow: Forecaster) -> None:
        """Applies new options (see `config.RELOADED`) and a new shadow predictor."""
        self._config, self.shadow = config, shadow

    @property
    def is_on(self) -> bool:
        """Whether output lengths are used for calibration or the log."""
        return self._log is not None or self._learner is not None

    @property
    def _learner(self) -> LiveCalibration | SharedCalibration | None:
        """The calibration; None without a predictor."""
        return None if self._config.predictor == "none" else self.calibration or self.shared

    def requests_usage(self, parsed: ParsedRequest) -> bool:
        """Whether the proxy should request the token counts of a stream because the client did not."""
        body, options = parsed.body, parsed.content.get("stream_options")
        is_single_stream = parsed.is_completion and body.is_stream and body.num_outputs == 1
        is_used = self.is_on or self._counts_tokens
        is_needed = is_used and self._may_request_usage and not body.include_usage
        return is_needed and is_single_stream and isinstance(options, dict | None)

    def count_tokens(self) -> None:
        """Requests the token counts of streams also without calibration and log, from an engine that is known to have them."""
        self._counts_tokens = True
        self._may_request_usage = self._may_request_usage or self._config.feedback_usage == "auto"

    def stop_requesting_usage(self) -> None:
        """Handles a request that the engine accepts only without `stream_options`."""
        if self._may_request_usage:
            self._may_request_usage = False
            logger.warning(
                "the engine refuses stream_options: events of streams are counted instead of tokens"
            )

    def start_shadow(self, exchange: Exchange) -> None:
        """Queries the shadow predictor, if any, without delaying the request."""
        if self._config.shadow_predictor is None:
            return
        if len(self._shadows) >= MAX_SHADOWS:
            self._metrics.shadows.labels("skipped").inc()
            return
        exchange.shadow = asyncio.create_task(self.shadow.forecast(exchange.query))
        self._shadows.add(exchange.shadow)
        exchange.shadow.add_done_callback(self._shadows.discard)

    def finish(self, exchange: Exchange) -> None:
        """Handles the end of a request; it is recorded when its predictions are available."""
        if not self.is_on:
            return
        stats, problem = exchange.stats, _problem(exchange)
        length = None if stats is None else output_length(stats)
        if problem is not None or stats is None or length is None:
            problem = problem or ("client_gone" if exchange.end == "client_gone" else "no_tokens")
            self._metrics.unrecorded.labels(problem).inc()
            if self._learner is not None and problem not in _EXPECTED:
                self._learner.skip(problem, PROBLEMS[problem])
            return
        output_tokens, counted_by = length
        if counted_by == "deltas":
            output_tokens = self._tokens_per_event.tokens(output_tokens)
        elif exchange.end == "complete":
            self._tokens_per_event.observe(stats)
        ended_s = time.perf_counter()
        task = asyncio.create_task(self._record(exchange, stats, output_tokens, counted_by, ended_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Writes pending records and closes the log, the calibration and the shadow predictor."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._shadows:
            task.cancel()
        if self._log is not None:
            await asyncio.to_thread(self._log.close)
        if self.calibration is not None:
            await asyncio.to_thread(self.calibration.close)
        if self.shared is not None:
            await self.shared.close()
        await self.shadow.close()

    def _calibrate(
        self, calibration: LiveCalibration | SharedCalibration, exchange: Exchange, outcome: Outcome
    ) -> None:
        """Updates the calibration with an output length."""
        problem = None
        if outcome.forced_length:
            problem = "forced_length"
        elif outcome.prediction is None:
            problem = "unpredicted"
        elif outcome.finished is None:
            problem = "finish_reason"
        if problem is not None:
            calibration.skip(problem, PROBLEMS[problem])
            return
        calibration.observe(exchange.context, replace(outcome, prompt_tokens=exchange.prompt_tokens))

    async def _record(
        self,
        exchange: Exchange,
        stats: ResponseStats,
        output_tokens: int,
        counted_by: Literal["usage", "deltas"],
        ended_s: float,
    ) -> None:
        if exchange.forecasting is not None and not exchange.forecasting.done():
            await asyncio.wait({exchange.forecasting})
        outcome = self._outcome(exchange, stats, output_tokens, counted_by, ended_s)
        used = None if exchange.used is None else exchange.used.length
        if (ended := EndedRequest.of(exchange.parsed.body.model, used, outcome)) is not None:
            self.ended.append(ended)
        if self._learner is not None:
            self._calibrate(self._learner, exchange, outcome)
        if self._log is None:
            return
        if exchange.shadow is not None:
            shadow = await exchange.shadow
            self._metrics.shadows.labels(shadow.outcome).inc()
            outcome = replace(outcome, shadow=_length(shadow))
        self._metrics.counts.labels(counted_by).inc()
        self._log.put(outcome.to_json())

    def _outcome(
        self,
        exchange: Exchange,
        stats: ResponseStats,
        output_tokens: int,
        counted_by: Literal["usage", "deltas"],
        ended_s: float,
    ) -> Outcome:
        parsed, request, body = exchange.parsed, exchange.request, exchange.parsed.body
        reason = _finish_reason(exchange, stats)
        is_stored = self._config.feedback_prompts == "stored"
        return Outcome(
            time=time.time() - (time.perf_counter() - exchange.started_s),
            request_id=request.request_id,
            tenant=request.tenant,
            tier=request.tier,
            endpoint=parsed.endpoint,
            replica=exchange.engine.url if exchange.engine is not None and self._config.replicas else None,
            served_model=body.model or None,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            output_tokens=output_tokens,
            counted_by=counted_by,
            num_events=stats.num_deltas or None,
            finish_reason=reason,
            finished=is_finished(reason),
            forced_length=body.forces_length,
            prompt_tokens=stats.prompt_tokens,
            waited_s=exchange.waited_s,
            ttft_s=None if stats.first_s is None else stats.first_s - exchange.started_s,
            total_s=ended_s - exchange.started_s,
            prompt_sha256=hashlib.sha256(_prompt_bytes(parsed)).hexdigest(),
            prompt=parsed.prompt if is_stored else None,
            messages=tuple(message for message in body.conversation if message.text) if is_stored else (),
            prediction=_length(exchange.forecast),
        )


def context_of(exchange: Exchange) -> RequestContext:
    """What online calibration uses of a request."""
    prediction = None if exchange.forecast is None else exchange.forecast.prediction
    body = exchange.parsed.body
    return RequestContext(
        served_model=body.model,
        tenant=exchange.request.tenant,
        prompt_tokens=exchange.prompt_tokens,
        system_prompt=exchange.query.system_prompt,
        embedding=None if prediction is None else request_embedding(prediction.embedding, body.messages),
    )


def _problem(exchange: Exchange) -> str | None:
    """The reason, one of `PROBLEMS`, why the response to a request has no length of one output; None if it may have."""
    num_outputs = exchange.parsed.body.num_outputs
    if exchange.end not in ("complete", "client_gone"):
        return exchange.end or "no_response"
    if num_outputs is None:
        return "malformed_n"
    if exchange.stats is None:
        return "other_endpoint" if exchange.parsed.endpoint == "other" else "unread"
    return "several_outputs" if max(num_outputs, exchange.stats.num_outputs) > 1 else None


def _finish_reason(exchange: Exchange, stats: ResponseStats) -> str:
    """The engine's finish reason; "abort" if the client disconnected before it."""
    return stats.finish_reason or ("abort" if exchange.end == "client_gone" else "")


def _prompt_bytes(parsed: ParsedRequest) -> bytes:
    """What identifies a prompt: its text, or its token ids."""
    if parsed.prompt:
        return parsed.prompt.encode("utf-8", "surrogatepass")
    return json.dumps([parsed.content.get(name) for name in _TOKEN_IDS]).encode()


def _length(forecast: Forecast | None) -> LengthPrediction | None:
    return None if forecast is None or forecast.prediction is None else forecast.prediction.length
