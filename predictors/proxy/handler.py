"""One request through the proxy: parse, predict, order, send to the engine, relay and record the response."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from predictors.proxy.client_rules import CLIENT_HEADERS, ClientRules, allowed_body
from predictors.proxy.config import ProxyConfig
from predictors.proxy.engines import Hint, make_engine
from predictors.proxy.errors import EngineGoneError, EngineLostError, Refusal
from predictors.proxy.feedback import Exchange, Recorder, context_of
from predictors.proxy.forecast import Forecast, Forecaster
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.order import NO_END, EngineOrder, HoldQueue, make_order
from predictors.proxy.parsing import JsonBody, ParsedRequest, endpoint_of, parse_request, parsed_bytes
from predictors.proxy.relay import HeldBody, Relay, engine_tls, origin_form
from predictors.proxy.replicas import Engine, Replicas
from predictors.proxy.responses import EventStreamReader, JsonReader, ReadBudget, Reader
from predictors.proxy.session_id import SESSION_HEADER
from predictors.proxy.sessions import Sessions
from predictors.proxy.spans import ProxySpans
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import MAX_TOKENS
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.prediction.prompt_text import prompt_key
from scheduler_core.request import Request, RequestState

logger = logging.getLogger(__name__)
#: Bodies above this size are parsed in a thread.
LARGE_BYTES = 2**17
#: ASCII control characters in a path, encoded.
CONTROL = re.compile(r"%(?:[01][0-9a-f]|7f)", re.IGNORECASE)
#: Methods that never generate output.
READING = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
#: Paths that never generate output, for any method; all other paths are queued and limited.
UNQUEUED = frozenset(
    {"/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens", "/ping"}
    | {f"/api/{name}" for name in ("show", "pull", "push", "create", "copy")}  # Ollama's
)
#: Origin of arrival times (2026-01-01 UTC), common to all proxies, so that their keys are comparable.
ORIGIN_S = 1_767_225_600.0
NO_HINT = Hint()
#: Status of a response to a request that the engine does not accept.
REFUSED = (400, 422)
#: Weight of a new prompt in the moving average of prompt lengths.
PROMPT_WEIGHT = 1 / 64


class RequestHandler:
    """Handles the requests of clients; its parts are those of `config`. `queue` has the queued requests, None if the engine
    orders requests."""

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        self.metrics = ProxyMetrics()
        # System time at startup plus monotonic time.
        offset_s = time.time() - ORIGIN_S - time.monotonic()
        self._clock: Callable[[], float] = lambda: offset_s + time.monotonic()
        self._rules = ClientRules(config)
        self._engine = make_engine(config)
        tls = engine_tls(config)
        self.engines = [
            Engine(url, Relay(config, url, tls), make_order(config, self._clock)) for url in config.urls
        ]
        self.replicas = Replicas(self.engines, self._clock)
        #: Those of the first engine; bodies are read by its relay.
        self.relay, self.order = self.engines[0].relay, self.engines[0].order
        self.queue = self.order if isinstance(self.order, HoldQueue) else None
        predictor = None if config.predictor == "none" else config.predictor
        self.forecaster = Forecaster(predictor, "predictor", config.deadline_s, config)
        self.recorder = Recorder(config, self.metrics, lambda: self.forecaster.client)
        self._spans = ProxySpans(config) if config.traces else None
        self.sessions: Sessions | None = None
        if self.order.model is not None:
            self.sessions = Sessions(config, self.metrics, self.engines, self.recorder)
        elif config.session_file is not None:
            raise InputError("session_file", config.session_file, "only with a policy that uses sessions")
        #: Requests in flight that may generate (True), and others.
        self._num_in_flight = {True: 0, False: 0}
        self.budget = ReadBudget()
        self._mean_prompt_tokens = 0.0

    @property
    def num_in_flight(self) -> int:
        """Number of requests without a complete response."""
        return sum(self._num_in_flight.values())

    def apply(
        self, config: ProxyConfig, tls: ssl.SSLContext | bool, forecaster: Forecaster, shadow: Forecaster
    ) -> None:
        """Applies new options (see `config.RELOADED`), `engine_tls` and the predictors of them."""
        self.config = config
        self._rules, self._engine = ClientRules(config), make_engine(config)
        for engine in self.engines:
            engine.relay.config, engine.relay.tls = config, tls
            engine.order.resize(config.max_num_seqs if self.queue is None else config.release)
            if isinstance(engine.order, HoldQueue):
                engine.order.max_waiting = config.max_waiting
        self.forecaster = forecaster
        self.recorder.reload(config, shadow)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The response to any request of a client."""
        if self._spans is None:
            return await self._handle(request, None)
        with self._spans.request(request) as span:
            return await self._handle(request, span)

    async def _handle(self, request: web.Request, span: Any) -> web.StreamResponse:
        target = origin_form(request.raw_path)
        generates = request.method not in READING and target not in UNQUEUED
        is_known = generates and endpoint_of(request.path) != "other"
        start, code = time.perf_counter(), "499"  # the client disconnected
        self._num_in_flight[generates] += 1
        try:
            self._check(request, target)
            if self._num_in_flight[generates] > (limit := self.config.max_in_flight):
                text = f"requests in flight: got {self._num_in_flight[generates]}; allowed: {limit}"
                raise Refusal(429, text, "proxy_full")
            response = await (self._generate(request, span) if generates else self._pass(request))
            code = str(response.status)
            return response
        except Refusal as refusal:
            code = str(refusal.status)
            self.metrics.refused.labels(refusal.code or "other").inc()
            return refusal.response(closes=not request.content.is_eof())
        except EngineLostError as error:
            code = "broken"
            logger.warning("%s: the engine disconnected (%s)", request.rel_url.raw_path, error)
            return web.Response(status=502)  # not sent: the connection is closed
        except ConnectionError:
            return web.Response(status=499)
        finally:
            self._num_in_flight[generates] -= 1
            self.metrics.requests.labels("completion" if is_known else "other", code).inc()
            if self._spans is not None:
                self._spans.respond(span, request, code)
            if self.config.access_log:
                path, seconds = request.rel_url.raw_path, round(time.perf_counter() - start, 6)
                fields = {"path": path, "code": code, "seconds": seconds}
                logger.info("%s %s", request.method, path, extra=fields)

    def _check(self, request: web.Request, target: str | None) -> None:
        """Refusal (400) if a request to `target` cannot be forwarded unchanged."""
        try:
            self._rules.check_headers(request.headers)
            if request.method == "CONNECT":
                raise InputError("method", "CONNECT", "methods of the API; the proxy opens no tunnels")
            if target is None:
                raise InputError("request target", "another form", "a path or an absolute URL")
            if not target.isascii():
                raise InputError("request target", "other characters", "ASCII and percent-encoding")
            if CONTROL.search(target.partition("?")[0]):
                raise InputError("request target", "control characters", "a path without them")
        except InputError as error:
            raise Refusal.of(error) from error

    async def _generate(self, request: web.Request, span: Any) -> web.StreamResponse:
        """The response to a completion, or to any other request that can generate output; raises as `_send`,
        or Refusal for an invalid request."""
        start = time.perf_counter()
        async with self.relay.body(request) as held:
            body, parsed = await self._read(request, held)
            try:
                exchange = self._exchange(request, parsed, start)
            except InputError as error:
                raise Refusal.of(error) from error
            exchange.span = span
            if self._spans is not None:
                self._spans.begin(exchange)
            self.recorder.start_shadow(exchange)
            try:
                return await self._respond(request, held.data, body, exchange)
            finally:
                self.metrics.request.observe(time.perf_counter() - start)
                if self._spans is not None:
                    self._spans.end(exchange)
                self.recorder.finish(exchange)

    async def _respond(
        self, request: web.Request, data: bytes, body: JsonBody | None, exchange: Exchange
    ) -> web.StreamResponse:
        """Sends a request when it is its turn; to another engine if it has not reached the chosen one. Raises as `_send`."""
        while True:
            try:
                async with self._ordered(exchange) as (engine, hint):
                    with_usage = self._with_usage(exchange, hint)
                    sent = data if body is None else body.with_members(with_usage.members)
                    overhead_s = time.perf_counter() - exchange.started_s - exchange.waited_s
                    self.metrics.overhead.observe(overhead_s)
                    own = None
                    if with_usage is not hint and body is not None:
                        own = partial(body.with_members, hint.members)
                    return await self._send(request, sent, engine, with_usage, exchange, own)
            except EngineGoneError:
                continue
            except Refusal as refusal:
                if refusal.was_sent or not self.replicas.has_other(engine):
                    raise

    async def _read(self, request: web.Request, held: HeldBody) -> tuple[JsonBody | None, ParsedRequest]:
        """The body (see `allowed_body`) and its fields, which count as held too; Refusal if it is invalid. A large one is
        parsed in a thread."""
        data = held.data

        def parse() -> tuple[JsonBody | None, ParsedRequest, int]:
            body = allowed_body(request, data, self._rules)
            if body is None:
                return None, parse_request({}, request.path), 0
            parsed = parse_request(body.content, request.path)
            return body, parsed, parsed_bytes(data)

        try:
            body, parsed, num_bytes = await asyncio.to_thread(parse) if len(data) > LARGE_BYTES else parse()
        except InputError as error:
            raise Refusal.of(error) from error
        self.relay.hold(held, num_bytes)
        return body, parsed

    def _exchange(self, request: web.Request, parsed: ParsedRequest, start: float) -> Exchange:
        config = self.config
        fields, headers = parsed.body, request.headers
        if not fields.has_prompt:
            self.metrics.unread.labels(parsed.endpoint).inc()
        max_tokens = fields.max_tokens or config.default_max_tokens
        engine, restricts, tenant = self._engine, self._rules.restricts, self._rules.tenant(headers)
        owner = self._rules.owner(headers)
        turn = None if self.sessions is None else self.sessions.begin(headers, parsed, owner)
        declared = (fields.priority or 0) if engine is None else engine.client_priority(parsed, headers)
        ordered = Request(
            request_id=uuid.uuid4().hex,
            arrival_s=self._clock(),
            prompt_tokens=self._prompt_tokens(parsed) if turn is None else turn.prompt_tokens,
            max_tokens=min(max_tokens * parsed.num_outputs, MAX_TOKENS),
            priority=0 if restricts else declared,
            tier=self._rules.tier(headers),
            tenant=tenant,
            session="" if turn is None else turn.session,
            content=() if turn is None else turn.content,
        )
        served = fields.model if config.served_model is None else config.served_model
        temperature = None if fields.temperature is None else min(fields.temperature, 100.0)
        query = PredictionRequest(
            ordered.request_id,
            parsed.prompt,
            max_tokens,
            served,
            temperature,
            tenant=ordered.tenant,
            system_prompt=prompt_key(fields.messages),
            messages=fields.conversation,
        )
        return Exchange(parsed=parsed, request=ordered, query=query, turn=turn, started_s=start)

    def _prompt_tokens(self, parsed: ParsedRequest) -> int:
        """Estimated tokens of a prompt; of one that cannot be read, the moving average of the others."""
        if not parsed.body.has_prompt:
            return max(1, round(self._mean_prompt_tokens))
        num_tokens = parsed.prompt_tokens()
        weight = PROMPT_WEIGHT if self._mean_prompt_tokens else 1.0
        self._mean_prompt_tokens += weight * (num_tokens - self._mean_prompt_tokens)
        return num_tokens

    @asynccontextmanager
    async def _ordered(self, exchange: Exchange) -> AsyncIterator[tuple[Engine, Hint]]:
        """Chooses the engine, and waits for admission by its queue or, if there is no queue, for the prediction.
        EngineGoneError if another engine has to be chosen."""
        start = time.perf_counter() - exchange.waited_s
        names_response = bool(exchange.parsed.content.get("previous_response_id"))
        engine = exchange.engine = self.replicas.choose(exchange.request, stays=names_response)
        order = engine.order
        forecasting = exchange.forecasting = asyncio.create_task(self._forecast(exchange))
        try:
            if isinstance(order, HoldQueue):
                try:
                    with self._part("queue"):
                        await order.enter(exchange.request)
                finally:
                    exchange.waited_s = time.perf_counter() - start
                self.metrics.held.observe(exchange.waited_s)
                self.metrics.hints.labels("held").inc()
                hint = NO_HINT
                if session := exchange.request.session:
                    self.metrics.session_held.observe(exchange.waited_s)
                    # Read by vLLM and Dynamo, and by balancers between proxy and replicas.
                    hint = Hint(headers={SESSION_HEADER: session})
            else:
                state = order.enter(exchange.request)
                forecast = await forecasting
                exchange.waited_s = forecast.seconds
                hint = self._hint(exchange, state, *order.key(state), forecast)
            yield engine, hint
        finally:
            end = NO_END if self.sessions is None else self.sessions.end(exchange)
            order.leave(exchange.request.request_id, end)
            self.replicas.leave(exchange.request, engine)
            if exchange.end != "complete":  # otherwise the recorder waits for it: an output can be quicker
                forecasting.cancel()

    async def _forecast(self, exchange: Exchange) -> Forecast:
        spans, is_remote = self._spans, self.forecaster.is_remote
        with nullcontext() if spans is None else spans.predict(exchange, is_remote=is_remote):
            forecast = exchange.forecast = await self.forecaster.forecast(exchange.query)
        prediction = forecast.prediction
        is_counted = prediction is not None and prediction.prompt_tokens is not None
        prompt_tokens = exchange.parsed.prompt_tokens(prediction) if is_counted else None
        exchange.prompt_tokens = prompt_tokens
        calibration = self.recorder.calibration
        if calibration is not None:
            exchange.context = context_of(exchange)
            prediction = calibration.correct(exchange.context, prediction)
        prediction = exchange.used = exchange.parsed.body.prediction(prediction, exchange.query.max_tokens)
        turn = exchange.turn
        if turn is not None and not turn.is_estimated:
            prompt_tokens = None  # the engine has counted better
        if exchange.engine is not None:
            exchange.engine.order.update(exchange.request.request_id, prediction, prompt_tokens)
        if self._spans is not None:
            self._spans.predicted(exchange)
        self.metrics.predictions.labels(forecast.outcome).inc()
        if forecast.seconds:
            self.metrics.prediction.observe(forecast.seconds)
        return forecast

    def _hint(
        self, exchange: Exchange, state: RequestState, level: int, key: float, forecast: Forecast
    ) -> Hint:
        """The hint for the engine; empty if no hint is possible. Never fails the request."""
        assert self._engine is not None
        parsed, endpoints = exchange.parsed, self._engine.endpoints
        hint, outcome = NO_HINT, "policy_unpredicted" if forecast.prediction is None else "policy"
        try:
            hint = self._engine.hint(parsed, level, key, state)
            if endpoints is not None and (parsed.endpoint not in endpoints or not parsed.content):
                hint, outcome = replace(hint, members={}), "other_endpoint"
        except InputError as error:
            logger.warning("request %s continues without hint: %s", state.request_id, error)
            outcome = "impossible"
        self.metrics.hints.labels(outcome).inc()
        return hint

    def _with_usage(self, exchange: Exchange, hint: Hint) -> Hint:
        """The hint, with a request for token counts if only the recorder needs them."""
        if not self.recorder.requests_usage(exchange.parsed):
            return hint
        options = exchange.parsed.content.get("stream_options")
        members = {**hint.members, "stream_options": {**(options or {}), "include_usage": True}}
        # A compressed stream could not be parsed.
        return replace(hint, members=members, headers={**hint.headers, "Accept-Encoding": "identity"})

    def _part(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self._spans is None else self._spans.part(name)

    async def _send(
        self,
        request: web.Request,
        body: bytes | None,
        engine: Engine,
        hint: Hint = NO_HINT,
        exchange: Exchange | None = None,
        without_usage: Callable[[], bytes] | None = None,
    ) -> web.StreamResponse:
        """As `_forward`, in a span of its own."""
        if self._spans is None:
            return await self._forward(request, body, engine, hint, exchange, without_usage)
        with self._spans.engine(engine.url) as (span, headers):
            hint = replace(hint, headers={**hint.headers, **headers})
            response = await self._forward(request, body, engine, hint, exchange, without_usage)
            span.set_attribute("http.response.status_code", response.status)
            return response

    async def _forward(
        self,
        request: web.Request,
        body: bytes | None,
        engine: Engine,
        hint: Hint,
        exchange: Exchange | None,
        without_usage: Callable[[], bytes] | None,
    ) -> web.StreamResponse:
        """Sends a request to the engine and forwards the response; Refusal if the engine does not respond,
        EngineLostError if it disconnects during the response.

        `without_usage` returns the body without a request for token counts that the proxy has added. It is sent instead if the engine
        refuses the first one, so that no request fails because of the proxy."""
        without = CLIENT_HEADERS if self._rules.restricts else ()
        head_s = self.config.request_timeout_s if request.method in READING else None
        relay = engine.relay
        upstream = await relay.send(request, body, hint.headers, without, head_s)
        if without_usage is not None and upstream.status in REFUSED:
            upstream.release()
            hint = replace(hint, members={})
            upstream = await relay.send(request, without_usage(), hint.headers, without, head_s)
            if upstream.status not in REFUSED:
                self.recorder.stop_requesting_usage()
        hides_usage = "stream_options" in hint.members
        reader = None if exchange is None else self._reader(upstream, exchange, engine.order, hides_usage)
        end = "client_gone"
        try:
            response = await relay.respond(request, upstream, reader)
            end = "complete" if upstream.status < 400 else "error"
            return response
        except EngineLostError:
            end = "engine_lost"
            relay.monitor.doubt()
            raise
        finally:
            if reader is not None:
                reader.close()
            if exchange is not None:
                exchange.end, exchange.stats = end, None if reader is None else reader.stats
                self.metrics.ends.labels(end).inc()
            # An unfinished response closes the connection, so that the engine detects the abort.
            upstream.close() if end in ("client_gone", "engine_lost") else upstream.release()

    def _reader(
        self, upstream: aiohttp.ClientResponse, exchange: Exchange, order: EngineOrder, hides_usage: bool
    ) -> Reader | None:
        """The reader of a response, if the recorder or the policy needs it."""
        is_used = self.recorder.is_on or order.uses_outputs
        if not is_used or upstream.headers.get("Content-Encoding", "identity") != "identity":
            return None
        if upstream.status != 200:
            return None
        on_output = partial(order.on_output, exchange.request.request_id)
        on_tokens = on_output if order.uses_outputs else None
        match upstream.content_type:
            case "text/event-stream":
                return EventStreamReader(hides_usage, self.budget, on_tokens)
            case "application/x-ndjson" | "application/jsonl":
                return EventStreamReader(False, self.budget, on_tokens, is_lines=True)
            case "application/json" if exchange.parsed.endpoint != "other":
                return JsonReader(self.budget, on_tokens)
        return None

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if "Upgrade" in request.headers:
            text = f"Upgrade: got {request.headers['Upgrade']!r}; allowed: none"
            raise Refusal(501, text, "upgrade_not_supported", "Upgrade")
        engine = self.replicas.first_up
        if not request.can_read_body:
            return await self._send(request, None, engine)
        async with self.relay.body(request) as held:
            body = (await self._read(request, held))[0] if self._rules.restricts else None
            return await self._send(request, held.data if body is None else body.with_members({}), engine)
