"""Records of the feedback log: predicted and actual length of each finished request."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import asdict, dataclass
from typing import Any

from predictors.proxy.config import ProxyConfig
from predictors.proxy.feedback_log import FeedbackLog
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.parsing import ParsedRequest
from predictors.proxy.prediction import Forecast, Forecaster
from predictors.proxy.responses import ResponseStats, output_length
from scheduler_core.adapters.live_calibration import LiveCalibration
from scheduler_core.predictions import Prediction
from scheduler_core.predictor import PredictionRequest
from scheduler_core.request import Request

FORMAT = "tailcast-feedback/1"
#: Finish reasons of complete and of censored outputs.
COMPLETE = frozenset({"stop", "tool_calls", "function_call", "eos", "stop_sequence", "end_turn"})
CENSORED = frozenset({"length", "max_tokens", "abort"})
#: Maximum number of queries to the shadow predictor in flight; further queries are skipped.
MAX_SHADOWS = 64
#: Timeout of the shadow predictor in seconds.
SHADOW_DEADLINE_S = 10.0


@dataclass(slots=True, kw_only=True)
class Exchange:
    """State of one completion request in the proxy."""

    parsed: ParsedRequest
    request: Request
    query: PredictionRequest
    started_s: float  # arrival time, on `time.perf_counter`
    waited_s: float = 0.0  # time spent on the prediction or in the queue of the proxy
    forecast: Forecast | None = None  # before online calibration
    prompt_tokens: int | None = None  # if the predictor counted them
    shadow: asyncio.Task[Forecast] | None = None
    stats: ResponseStats | None = None
    end: str = ""  # complete, error, engine_lost or client_gone


class Recorder:
    """Updates calibration and feedback log with finished completions; never delays or fails a request."""

    def __init__(self, config: ProxyConfig, metrics: ProxyMetrics) -> None:
        self.shadow = Forecaster(config.shadow_predictor, "shadow_predictor", SHADOW_DEADLINE_S)
        self._config, self._metrics = config, metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._shadows: set[asyncio.Task[Forecast]] = set()
        self.calibration: LiveCalibration | None = None
        if config.online_calibration and config.predictor is not None:
            self.calibration = LiveCalibration(config.calibration_file, metrics.calibration)
        self._log: FeedbackLog | None = None
        if config.feedback is not None:
            self._log = FeedbackLog(
                config.feedback,
                segment_bytes=config.feedback_segment_mib * 2**20,
                on_outcome=lambda outcome: metrics.records.labels(outcome).inc(),
            )

    @property
    def is_on(self) -> bool:
        """Whether output lengths are used for calibration or the log."""
        return self._log is not None or self.calibration is not None

    def requests_usage(self, parsed: ParsedRequest) -> bool:
        """Whether the proxy should request the token counts of a stream because the client did not."""
        is_needed = self.is_on and self._config.feedback_usage and not parsed.body.include_usage
        is_single_stream = parsed.is_completion and parsed.body.is_stream and parsed.body.num_outputs == 1
        options = parsed.content.get("stream_options")
        return is_needed and is_single_stream and isinstance(options, dict | None)

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
        """Handles the end of a completion; its record is written when the shadow prediction is available."""
        is_output = exchange.end in ("complete", "client_gone") and exchange.parsed.body.num_outputs == 1
        stats = exchange.stats
        if not is_output or stats is None:
            return
        if self.calibration is not None:
            self._calibrate(self.calibration, exchange, stats)
        if self._log is not None:
            task = asyncio.create_task(self._write(exchange, stats, time.perf_counter()))
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
        await self.shadow.close()

    def _calibrate(self, calibration: LiveCalibration, exchange: Exchange, stats: ResponseStats) -> None:
        """Updates the calibration with an output length. A stream that the client aborted counts as censored,
        but only if complete streams have token counts too; otherwise only aborted streams would count."""
        parsed = exchange.parsed
        length, reason = output_length(stats), stats.finish_reason
        if exchange.end == "client_gone":
            counts = parsed.body.is_stream and (parsed.body.include_usage or self.requests_usage(parsed))
            reason = "abort" if counts else ""
        elif stats.output_tokens is None:
            return
        if length is None or exchange.forecast is None or reason not in COMPLETE | CENSORED:
            return
        calibration.observe(
            parsed.body.model,
            exchange.forecast.prediction,
            exchange.prompt_tokens,
            length[0],
            finished=reason in COMPLETE,
            max_tokens=parsed.body.max_tokens,
        )

    async def _write(self, exchange: Exchange, stats: ResponseStats, ended_s: float) -> None:
        shadow = None if exchange.shadow is None else await exchange.shadow
        if shadow is not None:
            self._metrics.shadows.labels(shadow.outcome).inc()
        length = output_length(stats)
        if length is None:
            return
        output_tokens, counted_by = length
        self._metrics.counts.labels(counted_by).inc()
        parsed, request, text = exchange.parsed, exchange.request, exchange.parsed.prompt
        reason = stats.finish_reason if exchange.end == "complete" else "abort"
        record: dict[str, Any] = {
            "format": FORMAT,
            "time": time.time() - (time.perf_counter() - exchange.started_s),
            "request_id": request.request_id,
            "tenant": request.tenant,
            "tier": request.tier,
            "served_model": parsed.body.model or None,
            "max_tokens": parsed.body.max_tokens,
            "temperature": parsed.body.temperature,
            "top_p": parsed.body.top_p,
            "output_tokens": output_tokens,
            "counted_by": counted_by,
            "finish_reason": reason,
            "finished": True if reason in COMPLETE else False if reason in CENSORED else None,
            "prompt_tokens": stats.prompt_tokens,
            "waited_s": exchange.waited_s,
            "ttft_s": None if stats.first_s is None else stats.first_s - exchange.started_s,
            "total_s": ended_s - exchange.started_s,
            "prompt_sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        }
        if self._config.feedback_prompts == "stored":
            record["prompt"] = text
            if parsed.body.messages:
                record["messages"] = [{"role": role, "content": text} for role, text in parsed.body.messages]
        record |= _length_fields(None if exchange.forecast is None else exchange.forecast.prediction)
        if shadow is not None:
            record["shadow"] = _length_fields(shadow.prediction) or None
        assert self._log is not None
        self._log.put(record)


def _length_fields(prediction: Prediction | None) -> dict[str, Any]:
    """Fields of the predicted length, the input of `evaluate-stream`; empty without a length."""
    if prediction is None or prediction.length is None:
        return {}
    # Empty quantiles are left out, so that records of log-t predictions keep their format.
    return {name: value for name, value in asdict(prediction.length).items() if name != "quantiles" or value}
