"""What came of a request, as a record of the feedback log."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from predictors.proxy.answers import Seen
from predictors.proxy.asked import Asked
from predictors.proxy.feedback_log import FeedbackLog
from predictors.proxy.forecast import Forecast, Forecaster
from predictors.proxy.lengths import LengthCounter
from predictors.proxy.metrics import ProxyMetrics
from scheduler_core.predictions import Prediction
from scheduler_core.predictor import PredictionRequest
from scheduler_core.request import RequestState

Prompts = Literal["stored", "hashed"]
FORMAT = "tailcast-feedback/1"
#: Ends of an answer that say how long it wanted to be.
FINISHED = frozenset({"stop", "tool_calls", "function_call", "eos", "stop_sequence", "end_turn"})
CUT = frozenset({"length", "max_tokens", "abort"})


@dataclass(slots=True, kw_only=True)
class Visit:
    """One completion on its way through the proxy.

    Attributes:
        asked, state: What it asks for.
        started_s: On `time.perf_counter`.
        waited_s: Spent on prediction, or in the proxy's own queue.
        forecast: Its prediction, once it is there.
        shadow: The second predictor's, on its way.
        seen: What its answer says.
        end: complete, error, engine_lost or client_gone.
    """

    asked: Asked
    state: RequestState
    started_s: float
    waited_s: float = 0.0
    forecast: Forecast | None = None
    shadow: asyncio.Task[Forecast] | None = None
    seen: Seen | None = None
    end: str = ""


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Writes records of finished completions; never waits, never fails a request.

    Attributes:
        log: Where they go.
        counter: Counts tokens.
        metrics: Counts records.
        prompts: Texts are stored, or only their SHA-256.
        usage: Whether engines are asked for token counts of streams.
        rival: The second predictor, asked beside the first; None: there is none.
        max_shadows: Questions to it under way at a time; what comes on top is not asked.
    """

    log: FeedbackLog
    counter: LengthCounter
    metrics: ProxyMetrics
    prompts: Prompts = "hashed"
    usage: bool = False
    rival: Forecaster | None = None
    max_shadows: int = 64
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _shadows: set[asyncio.Task[Forecast]] = field(default_factory=set)

    def asks_usage(self, asked: Asked) -> bool:
        """Whether the proxy should ask for the token counts that the client has not asked for."""
        options = asked.content.get("stream_options")
        readable = options is None or isinstance(options, dict)
        return self.usage and asked.stream and not asked.include_usage and readable and asked.num_answers == 1

    def shadow(self, visit: Visit, question: PredictionRequest) -> None:
        """Asks the second predictor, beside the request's way."""
        if self.rival is None:
            return
        if len(self._shadows) >= self.max_shadows:
            self.metrics.shadows.labels("skipped").inc()
            return
        visit.shadow = asyncio.create_task(self.rival.ask(question))
        self._shadows.add(visit.shadow)
        visit.shadow.add_done_callback(self._shadows.discard)

    def finish(self, visit: Visit) -> None:
        """A completion has left; its record is written as soon as all of it is known."""
        seen = visit.seen
        if seen is None or visit.asked.num_answers != 1 or visit.end not in ("complete", "client_gone"):
            return
        task = asyncio.create_task(self._write(visit, seen, time.perf_counter()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Writes what is under way and ends the log."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._shadows:
            task.cancel()
        await asyncio.to_thread(self.log.close)

    async def _write(self, visit: Visit, seen: Seen, ended_s: float) -> None:
        other = None
        if visit.shadow is not None:
            other = await visit.shadow
            self.metrics.shadows.labels(other.outcome).inc()
        if self.counter.needs_text and seen.output_tokens is None:
            counted = await asyncio.to_thread(self.counter.count, seen)
        else:
            counted = self.counter.count(seen)
        if counted is None:
            return
        self.metrics.counts.labels(counted.by).inc()
        asked = visit.asked
        reason = seen.finish_reason if visit.end == "complete" else "abort"
        record: dict[str, Any] = {
            "format": FORMAT,
            "time": time.time() - (time.perf_counter() - visit.started_s),
            "request_id": visit.state.request_id,
            "tenant": visit.state.request.tenant,
            "tier": visit.state.request.tier,
            "served_model": asked.model or None,
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "output_tokens": counted.output_tokens,
            "counted_by": counted.by,
            "finish_reason": reason,
            "finished": finished(reason),
            "prompt_tokens": seen.prompt_tokens,
            "waited_s": visit.waited_s,
            "ttft_s": None if seen.first_s is None else seen.first_s - visit.started_s,
            "total_s": ended_s - visit.started_s,
        }
        record |= self._prompt(asked)
        record |= _numbers(None if visit.forecast is None else visit.forecast.prediction)
        if other is not None:
            record["shadow"] = _numbers(other.prediction) or None
        self.log.put(record)

    def _prompt(self, asked: Asked) -> dict[str, Any]:
        """The prompt, or its hash; the hash tells repeated prompts apart from others."""
        text = asked.prompt or ""
        found: dict[str, Any] = {
            "prompt_sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        }
        if self.prompts == "stored":
            found["prompt"] = text
            if asked.messages is not None:
                found["messages"] = [{"role": role, "content": content} for role, content in asked.messages]
        return found


def finished(reason: str) -> bool | None:
    """Whether an answer ended by itself; None where its finish reason does not say."""
    return True if reason in FINISHED else False if reason in CUT else None


def _numbers(prediction: Prediction | None) -> dict[str, Any]:
    """The predicted length as `evaluate --stream` reads it; empty without one."""
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
