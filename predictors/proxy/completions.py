"""One completion from end to end: parsed, predicted, ordered, relayed, recorded."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
from aiohttp import web

from predictors.proxy.client_rules import ClientRules
from predictors.proxy.config import ProxyConfig
from predictors.proxy.engines import CLIENT_HEADERS, Hint, make_engine
from predictors.proxy.errors import EngineLostError, Refusal
from predictors.proxy.feedback import Exchange, Recorder
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.order import HoldQueue, SentOrder, aging_policy
from predictors.proxy.parsing import CHAT, TEXT, JsonBody, json_body, may_be_json_object, parse_request
from predictors.proxy.prediction import Forecast, Forecaster
from predictors.proxy.relay import Relay
from predictors.proxy.responses import EventStreamReader, JsonReader, Reader
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest
from scheduler_core.request import Request, RequestState

logger = logging.getLogger(__name__)


class Completions:
    """Handles chat and text completions, and whatever else may make an engine generate.

    The clock gives seconds since a fixed moment, the same for all proxies, that never step back. `queue` has the held
    requests; it is None where the engine orders them.

    Raises:
        InputError: The policy or its parameters are not allowed.
    """

    def __init__(
        self,
        config: ProxyConfig,
        *,
        relay: Relay,
        forecaster: Forecaster,
        recorder: Recorder | None,
        metrics: ProxyMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._relay, self._forecaster = config, relay, forecaster
        self._recorder, self._metrics, self._clock = recorder, metrics, clock
        self.rules = ClientRules(config)
        self.queue: HoldQueue | None = None
        policy = aging_policy(config.policy, config.policy_parameters, config.aging_per_s)
        engine = make_engine(config)
        if engine is None:
            self.queue = HoldQueue(
                policy, max_running=config.release, max_waiting=config.max_waiting, clock=clock
            )
        else:
            self._engine = engine
            self._order = SentOrder(config.policy, policy, config.max_num_seqs)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The engine's response.

        Raises:
            Refusal: The request is refused, or the engine does not respond.
            EngineLostError: The response broke off.
        """
        start = time.perf_counter()
        data = await self._relay.read(request)
        try:
            body = self._body(request, data)
            exchange = self._exchange(request, body, start)
        except InputError as error:
            raise Refusal.of(error) from error
        query = self._query(exchange)
        if self._recorder is not None:
            self._recorder.start_shadow(exchange, query)
        ordered = self._held if self.queue is not None else self._sent
        try:
            async with ordered(exchange, query) as hint:
                hint = self._with_usage(exchange, hint)
                data = data if body is None else body.with_members(hint.members)
                self._metrics.overhead.observe(time.perf_counter() - start - exchange.waited_s)
                return await self._pass(request, data, hint, exchange)
        finally:
            self._metrics.request.observe(time.perf_counter() - start)
            if self._recorder is not None:
                self._recorder.finish(exchange)

    def _body(self, request: web.Request, data: bytes) -> JsonBody | None:
        """The body with the hints that its client may send; None where it is no JSON object and passes as it is.

        Raises:
            Refusal: A completion's body cannot be read, or another one that could hold hints.
            InputError: It is compressed, or a hint in it is not allowed.
        """
        is_completion = request.path in (CHAT, TEXT)
        try:
            for value in request.headers.getall("Content-Encoding", ()):
                if any(name.strip().lower() not in ("", "identity") for name in value.split(",")):
                    raise InputError("Content-Encoding", value, "identity")
            if not is_completion and not may_be_json_object(data):
                return None
            body = json_body(data)
        except (InputError, Refusal):
            if is_completion or self.rules.restricts:
                raise
            return None
        allowed = self.rules.allowed_content(body.content) if self.rules.restricts else body.content
        return body if allowed is body.content else JsonBody(None, allowed)

    def _exchange(self, request: web.Request, body: JsonBody | None, start: float) -> Exchange:
        content = {} if body is None else body.content
        parsed = parse_request(content, request.path, self._config.prompt_text)
        ordered = Request(
            request_id=uuid.uuid4().hex,
            arrival_s=self._clock(),
            prompt_tokens=parsed.prompt_tokens,
            max_tokens=parsed.max_tokens or self._config.default_max_tokens,
            priority=parsed.priority or 0,
            tier=self.rules.tier(request.headers),
            tenant=self.rules.tenant(request.headers),
        )
        return Exchange(parsed=parsed, request=ordered, started_s=start)

    def _query(self, exchange: Exchange) -> PredictionRequest:
        parsed, request = exchange.parsed, exchange.request
        served = parsed.model if self._config.served_model is None else self._config.served_model
        temperature = None if parsed.temperature is None else min(parsed.temperature, 100.0)
        return PredictionRequest(
            request.request_id, parsed.prompt or "", request.max_tokens, served, temperature
        )

    @asynccontextmanager
    async def _sent(self, exchange: Exchange, query: PredictionRequest) -> AsyncIterator[Hint]:
        """The hint of a request that the engine orders."""
        state = self._order.enter(exchange.request)
        try:
            forecast = await self._forecaster.forecast(query)
            self._note_forecast(exchange, forecast)
            exchange.waited_s = forecast.seconds
            yield self._hint(exchange, state, forecast)
        finally:
            self._order.leave(state.request_id)

    @asynccontextmanager
    async def _held(self, exchange: Exchange, query: PredictionRequest) -> AsyncIterator[Hint]:
        """Holds a request until its turn; its prediction comes meanwhile."""
        assert self.queue is not None
        queue, request_id = self.queue, exchange.request.request_id
        forecasting = asyncio.create_task(self._forecaster.forecast(query))

        def on_forecast(task: asyncio.Task[Forecast]) -> None:
            if not task.cancelled():
                queue.update(request_id, task.result().prediction)
                self._note_forecast(exchange, task.result())

        forecasting.add_done_callback(on_forecast)
        start = time.perf_counter()
        try:
            await queue.enter(exchange.request)
            exchange.waited_s = time.perf_counter() - start
            self._metrics.held.observe(exchange.waited_s)
            self._metrics.hints.labels("held").inc()
            yield Hint()
        finally:
            queue.leave(request_id)
            forecasting.cancel()

    def _note_forecast(self, exchange: Exchange, forecast: Forecast) -> None:
        exchange.forecast = forecast
        self._metrics.predictions.labels(forecast.outcome).inc()
        if forecast.seconds:
            self._metrics.prediction.observe(forecast.seconds)

    def _hint(self, exchange: Exchange, state: RequestState, forecast: Forecast) -> Hint:
        """The hint for the engine; an empty one where there can be none, which never costs the request."""
        parsed, prediction = exchange.parsed, forecast.prediction
        endpoints = self._engine.endpoints
        hint, outcome = Hint(), "policy" if prediction is not None else "policy_unpredicted"
        try:
            key = self._order.key(state, prediction, self._clock())
            if endpoints is not None and (parsed.path not in endpoints or not parsed.content):
                outcome = "other_endpoint"
            elif prediction is None and self._config.without_prediction == "nothing":
                outcome = "unpredicted"
            else:
                hint = self._engine.hint(parsed.content, key, state)
        except InputError as error:
            logger.warning("request %s goes on without hint: %s", state.request_id, error)
            outcome = "impossible"
        if "priority" in hint.members and parsed.content.get("priority") is not None:
            hint, outcome = Hint(), "clients_own"
        self._metrics.hints.labels(outcome).inc()
        return hint

    def _with_usage(self, exchange: Exchange, hint: Hint) -> Hint:
        """The hint, and a request for token counts where the recorder needs them and the client requests none."""
        if self._recorder is None or not self._recorder.requests_usage(exchange.parsed):
            return hint
        options = exchange.parsed.content.get("stream_options")
        members = {**hint.members, "stream_options": {**(options or {}), "include_usage": True}}
        # A compressed stream could not be read.
        return replace(hint, members=members, headers={**hint.headers, "Accept-Encoding": "identity"})

    async def _pass(
        self, request: web.Request, body: bytes, hint: Hint, exchange: Exchange
    ) -> web.StreamResponse:
        """Sends the request, and passes the response on."""
        without = CLIENT_HEADERS if self.rules.restricts else ()
        upstream = await self._relay.send(request, body, hint.headers, without=without)
        hides_usage = "stream_options" in hint.members
        reader = self._reader(upstream, exchange, hides_usage)
        end = "client_gone"
        try:
            if reader is not None:
                exchange.stats = reader.stats
            shortens = hides_usage and reader is not None
            response = await self._relay.respond(request, upstream, reader, shortens=shortens)
            end = "complete" if upstream.status < 400 else "error"
            return response
        except EngineLostError:
            end = "engine_lost"
            raise
        finally:
            exchange.end = end
            self._metrics.ends.labels(end).inc()
            # Closes the connection unless the response was read to its end: the engine notices that the client is gone.
            upstream.close() if end in ("client_gone", "engine_lost") else upstream.release()

    def _reader(
        self, upstream: aiohttp.ClientResponse, exchange: Exchange, hides_usage: bool
    ) -> Reader | None:
        if self._recorder is None or not exchange.parsed.is_completion:
            return None
        if upstream.status != 200 or upstream.headers.get("Content-Encoding", "identity") != "identity":
            return None
        if upstream.content_type == "text/event-stream":
            return EventStreamReader(hides_usage=hides_usage, keeps_text=self._recorder.counter.needs_text)
        return JsonReader() if upstream.content_type == "application/json" else None
