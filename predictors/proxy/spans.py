"""OpenTelemetry spans of the requests of a proxy, by the semantic conventions for generative AI and HTTP.

Each request has a span of kind SERVER, a child of the client's, with the children `predict` (kind CLIENT if a service predicts,
which gets its context), `queue` (if the proxy holds the queue) and `engine` (kind CLIENT), whose context the engine gets. Attributes are numbers and names, never texts of prompts
and outputs. Names that the conventions do not have begin with `tailcast.`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from aiohttp import web
from yarl import URL

from predictors.hosting.tracing import Tracing, trace_headers
from predictors.proxy.config import ProxyConfig
from predictors.proxy.feedback import Exchange
from predictors.proxy.parsing import CHAT, MESSAGES, OLLAMA_CHAT, RESPONSES
from scheduler_core.prediction.predictions import Prediction

#: Endpoints of chats; the other ones that are known complete texts.
CHATS = frozenset({CHAT, MESSAGES, OLLAMA_CHAT, RESPONSES, "/v1/chat/completions/batch"})
#: Predicted quantiles that a span has.
QUANTILES = (0.1, 0.5, 0.9)
#: A request behind so many others in the queue has no position.
MAX_POSITION = 128


class ProxySpans:
    """Makes the spans; MissingExtraError without OpenTelemetry."""

    def __init__(self, config: ProxyConfig) -> None:
        self._tracing = Tracing()
        self._engine_kind = config.engine

    def request(self, request: web.Request) -> AbstractContextManager[Any]:
        """The span of a request, until the end of the block."""
        return self._tracing.span(request.method, "SERVER", caller=request.headers)

    def part(self, name: str) -> AbstractContextManager[Any]:
        """A span of a part of the request of the running task."""
        return self._tracing.span(name)

    @contextmanager
    def predict(self, exchange: Exchange, *, is_remote: bool) -> Iterator[None]:
        """The span of the prediction of a request, by a service or in this process."""
        with self._tracing.span("predict", "CLIENT" if is_remote else "INTERNAL") as span:
            yield
            outcome = None if exchange.forecast is None else exchange.forecast.outcome
            if outcome in ("late", "failed", "refused"):
                span.set_attribute("error.type", outcome)
                self._tracing.fail(span, outcome)

    @contextmanager
    def engine(self, url: str) -> Iterator[tuple[Any, Mapping[str, str]]]:
        """The span of a request to the engine at `url`, and the headers with its context."""
        with self._tracing.span("engine", "CLIENT") as span:
            parsed = URL(url)
            span.set_attributes({"server.address": parsed.host, "server.port": parsed.port})
            yield span, trace_headers()

    def begin(self, exchange: Exchange) -> None:
        """Names the span of a request, and adds the attributes of its body."""
        fields, span = exchange.parsed.body, exchange.span
        attributes: dict[str, Any] = {
            "gen_ai.request.max_tokens": exchange.query.max_tokens,
            "gen_ai.request.stream": exchange.parsed.content.get("stream") is True,
            "gen_ai.request.choice.count": exchange.parsed.num_outputs,
            "gen_ai.request.model": fields.model,
            "gen_ai.request.temperature": exchange.query.temperature,
            "gen_ai.conversation.id": exchange.request.session,
            "tailcast.tenant": exchange.request.tenant,
            "tailcast.tier": exchange.request.tier,
        }
        if exchange.parsed.endpoint != "other":
            operation = "chat" if exchange.parsed.endpoint in CHATS else "text_completion"
            attributes["gen_ai.operation.name"] = operation
            span.update_name(f"{operation} {fields.model or ''}".rstrip())
        if self._engine_kind != "none":
            attributes["gen_ai.provider.name"] = self._engine_kind
        span.set_attributes(_valid(attributes))

    def predicted(self, exchange: Exchange) -> None:
        """Adds the outcome of the prediction, its quantiles as they are used, and the request's level and position."""
        span, forecast, engine = exchange.span, exchange.forecast, exchange.engine
        if not span.is_recording() or forecast is None:  # the output was quicker
            return
        span.set_attribute("tailcast.prediction.outcome", forecast.outcome)
        span.set_attributes(_quantiles(exchange.used))
        rank = None if engine is None else engine.order.rank(exchange.request.request_id, MAX_POSITION)
        if rank is not None:
            level, position = rank
            span.set_attribute("tailcast.level", level)
            if position is not None:
                span.set_attribute("tailcast.queue.position", position)

    def end(self, exchange: Exchange) -> None:
        """Adds what is known at the end of a request."""
        stats, span = exchange.stats, exchange.span
        span.set_attribute("tailcast.waited_s", exchange.waited_s)
        if exchange.end:
            span.set_attribute("tailcast.end", exchange.end)
        if stats is None:
            return
        attributes: dict[str, Any] = {
            "gen_ai.usage.input_tokens": stats.prompt_tokens,
            "gen_ai.usage.output_tokens": stats.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": stats.cached_tokens,
            "gen_ai.response.finish_reasons": [stats.finish_reason] if stats.finish_reason else None,
            "gen_ai.response.time_to_first_chunk": stats.first_s and stats.first_s - exchange.started_s,
        }
        span.set_attributes(_valid(attributes))

    def respond(self, span: Any, request: web.Request, code: str) -> None:
        """Adds the response to a span: `code` is the status, or a word if there is none."""
        span.set_attributes({"http.request.method": request.method, "url.path": request.path})
        if code.isdigit():
            span.set_attribute("http.response.status_code", int(code))
        if not code.isdigit() or int(code) >= 500:
            span.set_attribute("error.type", code)
            self._tracing.fail(span, code)


def _valid(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes with a value, without integers that OTLP cannot encode: each would log a traceback."""
    return {
        name: value
        for name, value in attributes.items()
        if value not in (None, "") and not (type(value) is int and abs(value) >= 2**63)
    }


def _quantiles(prediction: Prediction | None) -> dict[str, float]:
    if prediction is None or prediction.length is None:
        return {}
    values = prediction.length.distribution().ppf(QUANTILES)
    return {
        f"tailcast.predicted_tokens.p{round(100 * level)}": float(value)
        for level, value in zip(QUANTILES, values, strict=True)
    }
