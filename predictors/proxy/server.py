"""The proxy server: parses, predicts, orders, relays and records requests; client port and admin port."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import aiohttp
from aiohttp import web
from prometheus_client import Gauge, generate_latest

from predictors.hosting.http import HttpRunner, probe_routes
from predictors.proxy.body_rules import allowed_body
from predictors.proxy.config import RELOADED, ProxyConfig
from predictors.proxy.engines import CLIENT_HEADERS, ClientRules, Hint, make_engine
from predictors.proxy.errors import EngineLostError, Refusal
from predictors.proxy.feedback import Exchange, Recorder
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.order import HoldQueue, SentOrder
from predictors.proxy.parsing import JsonBody, ParsedRequest, endpoint_of, parse_request, parsed_bytes
from predictors.proxy.prediction import Forecast, Forecaster
from predictors.proxy.relay import HeldBody, Relay, origin_form
from predictors.proxy.responses import EventStreamReader, JsonReader, ReadBudget, Reader
from scheduler_core.adapters.live_order import order_policy
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import MAX_TOKENS
from scheduler_core.prediction.predictor import PredictionRequest
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


class ProxyServer:
    """The proxy server; `start` binds and connects. `num_in_flight` counts requests without a complete
    response; `queue` has the queued requests, None if the engine orders requests."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._metrics = metrics = ProxyMetrics()
        self._relay = Relay(config)
        # System time at startup plus monotonic time.
        offset_s = time.time() - ORIGIN_S - time.monotonic()
        self._clock: Callable[[], float] = lambda: offset_s + time.monotonic()
        self._rules = ClientRules(config)
        self._engine = make_engine(config)
        sent_once, aging_per_s = self._engine is not None, config.aging_per_s
        default = "tie" if sent_once else "bounded_shortest"
        name = default if config.policy is None else config.policy
        policy = order_policy(name, config.policy_parameters, sent_once=sent_once)
        self._order: SentOrder | HoldQueue = (
            SentOrder(policy, config.max_num_seqs, self._clock, aging_per_s)
            if sent_once
            else HoldQueue(
                policy,
                config.release,
                self._clock,
                aging_per_s,
                max_waiting=config.max_waiting,
            )
        )
        predictor = None if config.predictor == "none" else config.predictor
        self._forecaster = Forecaster(predictor, "predictor", config.deadline_s)
        self._recorder = Recorder(config, metrics)
        self._runners: list[web.AppRunner] = []
        #: Requests in flight that may generate (True), and others.
        self._num_in_flight = {True: 0, False: 0}
        self._budget = ReadBudget()
        self._mean_prompt_tokens = 0.0
        self._is_ready = False
        self.address = ""
        self._reloading = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self.queue = queue = self._order if isinstance(self._order, HoldQueue) else None
        monitor = self._relay.monitor
        for name, text, value in (
            ("engine_up", "1 unless the engine is gone.", lambda: monitor.is_up),
            ("held_bytes", "Bytes of the request bodies in memory.", lambda: self._relay.num_held_bytes),
            ("in_flight", "Requests in flight.", lambda: self.num_in_flight),
            ("waiting", "Requests in the queue of the proxy.", lambda: queue.num_waiting if queue else 0),
            ("released", "Requests admitted by the queue.", lambda: queue.num_running if queue else 0),
        ):
            Gauge(f"tailcast_proxy_{name}", text, registry=metrics.registry).set_function(value)

    @property
    def num_in_flight(self) -> int:
        """Number of requests without a complete response."""
        return sum(self._num_in_flight.values())

    async def start(self) -> tuple[int, int | None]:
        """Binds both ports and returns them; InputError if a port cannot be bound."""
        config = self._config
        await self._relay.start()

        @web.middleware  # not a route, which would not match every request target
        async def handle(request: web.Request, handler: object) -> web.StreamResponse:
            return await self._handle(request)

        application = web.Application(middlewares=[handle])
        application.router.add_route("*", "/{path:.*}", self._handle)  # so that it need not fail to find one
        try:
            port = await self._bind(application, config.port, "port", config.drain_timeout_s)
            admin = None
            if config.admin_port is not None:
                pages = web.Application()
                pages.add_routes(probe_routes(self._exposition, self._problem))
                admin = await self._bind(pages, config.admin_port, "admin_port", 1.0)
        except BaseException:
            await self.stop()
            raise
        forecasters = (self._forecaster, self._recorder.shadow)
        await asyncio.gather(*(forecaster.warm_up(config.warm_up_s) for forecaster in forecasters))
        if config.engine_probe_s:
            self._watching = asyncio.create_task(self._relay.monitor.watch(config.engine_probe_s))
        self._is_ready = True
        probes = "" if admin is None else f", probes and metrics on {config.host}:{admin}"
        self.address = f"{config.host}:{port} in front of {config.engine_url}{probes}"
        return port, admin

    async def stop(self) -> None:
        """Stops accepting requests, finishes those in flight, and closes all connections."""
        self._is_ready = False
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.sleep(self._config.drain_delay_s)
        runners, self._runners = self._runners, []
        for site in list(runners[0].sites) if runners else ():
            await site.stop()
        await self._relay.finish_reading()  # aiohttp stops reading now
        for runner in runners:
            await runner.cleanup()
        await self._recorder.close()
        await self._forecaster.close()
        await self._relay.stop()

    async def reload(self, config: ProxyConfig) -> None:
        """Applies the options of `config` that can change while requests are in flight, loads new versions of the artifacts,
        and logs what has changed and what needs a restart. TailcastError, without any change, if an artifact cannot be
        loaded."""
        async with self._reloading:
            if not self._is_ready:
                logger.warning("no reload: the proxy is starting or stopping")
                return
            changed = self._config.changed(config)
            config = replace(self._config, **{name: getattr(config, name) for name in RELOADED})
            old = (self._forecaster, self._recorder.shadow)
            new = await self._successors(config)
            self._config = self._relay.config = config
            self._rules, self._engine = ClientRules(config), make_engine(config)
            self._order.resize(config.max_num_seqs if self.queue is None else config.release)
            if self.queue is not None:
                self.queue.max_waiting = config.max_waiting
            self._forecaster = new[0]
            self._recorder.reload(config, new[1])
        applied = [f"{name} = {getattr(config, name)!r}" for name in changed if name in RELOADED]
        for field, before, after in zip(("predictor", "shadow_predictor"), old, new, strict=True):
            if before is not after:
                applied.append(f"{field}: version {after.version} replaces {before.version}")
                await before.close()
        restart = [name for name in changed if name not in RELOADED]
        logger.info("reloaded: %s", "; ".join(applied) or "no change")
        if restart:
            logger.warning("these options need a restart: %s", ", ".join(restart))

    async def _successors(self, config: ProxyConfig) -> list[Forecaster]:
        """The forecasters of `config`, loaded. TailcastError if one of them cannot be loaded."""
        predictor = None if config.predictor == "none" else config.predictor
        shadow = self._recorder.shadow
        loading = (
            self._forecaster.successor(predictor, config.deadline_s, config.warm_up_s),
            shadow.successor(config.shadow_predictor, shadow.deadline_s, config.warm_up_s),
        )
        loaded = await asyncio.gather(*loading, return_exceptions=True)
        new = [forecaster for forecaster in loaded if isinstance(forecaster, Forecaster)]
        for error in loaded:
            if isinstance(error, BaseException):
                for forecaster in set(new) - {self._forecaster, shadow}:
                    await forecaster.close()
                raise error
        return new

    async def _bind(self, application: web.Application, port: int, field: str, shutdown_s: float) -> int:
        timeout_s = self._config.request_timeout_s
        runner = HttpRunner(
            application,
            keepalive_timeout=timeout_s,
            lingering_time=min(10.0, timeout_s),
            shutdown_timeout=shutdown_s,
            on_refused=self._count_malformed,
        )
        self._runners.append(runner)
        return await runner.bind(field, self._config.host, port)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        target = origin_form(request.raw_path)
        generates = request.method not in READING and target not in UNQUEUED
        is_known = generates and endpoint_of(request.path) != "other"
        start, code = time.perf_counter(), "499"  # the client disconnected
        self._num_in_flight[generates] += 1
        try:
            self._check(request, target)
            if self._num_in_flight[generates] > (limit := self._config.max_in_flight):
                text = f"requests in flight: got {self._num_in_flight[generates]}; allowed: {limit}"
                raise Refusal(429, text, "proxy_full")
            response = await (self._generate(request) if generates else self._pass(request))
            code = str(response.status)
            return response
        except Refusal as refusal:
            code = str(refusal.status)
            self._metrics.refused.labels(refusal.code or "other").inc()
            return refusal.response(closes=not request.content.is_eof())
        except EngineLostError as error:
            code = "broken"
            self._relay.monitor.doubt()
            logger.warning("%s: the engine disconnected (%s)", request.rel_url.raw_path, error)
            return web.Response(status=502)  # not sent: the connection is closed
        except ConnectionError:
            return web.Response(status=499)
        finally:
            self._num_in_flight[generates] -= 1
            self._metrics.requests.labels("completion" if is_known else "other", code).inc()
            if self._config.access_log:
                path, seconds = request.rel_url.raw_path, round(time.perf_counter() - start, 6)
                fields = {"path": path, "code": code, "seconds": seconds}
                logger.info("%s %s", request.method, path, extra=fields)

    async def _problem(self) -> str:
        """Why the proxy is not ready; empty if it is."""
        if not self._is_ready:
            return "not ready"
        return "" if await self._relay.monitor.check() else "the engine cannot be reached"

    def _exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        if self._recorder.calibration is not None:
            self._recorder.calibration.publish()
        return generate_latest(self._metrics.registry)

    def _count_malformed(self, status: int) -> None:
        """Counts a request that was refused before it could be read."""
        self._metrics.requests.labels("malformed", str(status)).inc()
        self._metrics.refused.labels("malformed_http").inc()

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

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """The response to a completion, or to any other request that can generate output; raises as `_send`,
        or Refusal for an invalid request."""
        start = time.perf_counter()
        async with self._relay.body(request) as held:
            body, parsed = await self._read(request, held)
            try:
                exchange = self._exchange(request, parsed, start)
            except InputError as error:
                raise Refusal.of(error) from error
            self._recorder.start_shadow(exchange)
            try:
                async with self._ordered(exchange) as hint:
                    with_usage = self._with_usage(exchange, hint)
                    data = held.data if body is None else body.with_members(with_usage.members)
                    self._metrics.overhead.observe(time.perf_counter() - start - exchange.waited_s)
                    own = None
                    if with_usage is not hint and body is not None:
                        own = partial(body.with_members, hint.members)
                    return await self._send(request, data, with_usage, exchange, own)
            finally:
                self._metrics.request.observe(time.perf_counter() - start)
                self._recorder.finish(exchange)

    async def _read(self, request: web.Request, held: HeldBody) -> tuple[JsonBody | None, ParsedRequest]:
        """The body (see `allowed_body`) and its fields, which count as held too; Refusal if it is invalid. A large one is
        parsed in a thread."""
        data = held.data

        def parse() -> tuple[JsonBody | None, ParsedRequest, int]:
            body = allowed_body(request, data, self._rules)
            if body is None:
                return None, parse_request({}, request.path, self._config.prompt_text), 0
            parsed = parse_request(body.content, request.path, self._config.prompt_text)
            return body, parsed, parsed_bytes(data)

        try:
            body, parsed, num_bytes = await asyncio.to_thread(parse) if len(data) > LARGE_BYTES else parse()
        except InputError as error:
            raise Refusal.of(error) from error
        self._relay.hold(held, num_bytes)
        return body, parsed

    def _exchange(self, request: web.Request, parsed: ParsedRequest, start: float) -> Exchange:
        config = self._config
        fields, headers = parsed.body, request.headers
        if not fields.has_prompt:
            self._metrics.unread.labels(parsed.endpoint).inc()
        max_tokens = fields.max_tokens or config.default_max_tokens
        engine, restricts = self._engine, self._rules.restricts
        declared = (fields.priority or 0) if engine is None else engine.client_priority(parsed, headers)
        ordered = Request(
            request_id=uuid.uuid4().hex,
            arrival_s=self._clock(),
            prompt_tokens=self._prompt_tokens(parsed),
            max_tokens=min(max_tokens * parsed.num_outputs, MAX_TOKENS),
            priority=0 if restricts else declared,
            tier=self._rules.tier(headers),
            tenant=self._rules.tenant(headers),
        )
        served = fields.model if config.served_model is None else config.served_model
        temperature = None if fields.temperature is None else min(fields.temperature, 100.0)
        query = PredictionRequest(ordered.request_id, parsed.prompt, max_tokens, served, temperature)
        return Exchange(parsed=parsed, request=ordered, query=query, started_s=start)

    def _prompt_tokens(self, parsed: ParsedRequest) -> int:
        """Estimated tokens of a prompt; of one that cannot be read, the moving average of the others."""
        if not parsed.body.has_prompt:
            return max(1, round(self._mean_prompt_tokens))
        num_tokens = parsed.prompt_tokens()
        weight = PROMPT_WEIGHT if self._mean_prompt_tokens else 1.0
        self._mean_prompt_tokens += weight * (num_tokens - self._mean_prompt_tokens)
        return num_tokens

    @asynccontextmanager
    async def _ordered(self, exchange: Exchange) -> AsyncIterator[Hint]:
        """Waits for admission by the queue or, if there is no queue, for the prediction."""
        start = time.perf_counter()
        forecasting = exchange.forecasting = asyncio.create_task(self._forecast(exchange))
        try:
            if isinstance(self._order, HoldQueue):
                await self._order.enter(exchange.request)
                exchange.waited_s = time.perf_counter() - start
                self._metrics.held.observe(exchange.waited_s)
                self._metrics.hints.labels("held").inc()
                hint = NO_HINT
            else:
                state = self._order.enter(exchange.request)
                forecast = await forecasting
                exchange.waited_s = forecast.seconds
                hint = self._hint(exchange, state, *self._order.key(state), forecast)
            yield hint
        finally:
            self._order.leave(exchange.request.request_id)
            if exchange.end != "complete":  # otherwise the recorder waits for it: an output can be quicker
                forecasting.cancel()

    async def _forecast(self, exchange: Exchange) -> Forecast:
        forecast = exchange.forecast = await self._forecaster.forecast(exchange.query)
        num_counted = forecast.prompt_tokens
        prompt_tokens = None if num_counted is None else exchange.parsed.prompt_tokens(num_counted)
        exchange.prompt_tokens, prediction = prompt_tokens, forecast.prediction
        calibration = self._recorder.calibration
        if calibration is not None:
            prediction = calibration.correct(exchange.parsed.body.model, prediction, prompt_tokens)
        prediction = exchange.parsed.body.prediction(prediction, exchange.query.max_tokens)
        self._order.update(exchange.request.request_id, prediction, prompt_tokens)
        self._metrics.predictions.labels(forecast.outcome).inc()
        if forecast.seconds:
            self._metrics.prediction.observe(forecast.seconds)
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
        self._metrics.hints.labels(outcome).inc()
        return hint

    def _with_usage(self, exchange: Exchange, hint: Hint) -> Hint:
        """The hint, with a request for token counts if only the recorder needs them."""
        if not self._recorder.requests_usage(exchange.parsed):
            return hint
        options = exchange.parsed.content.get("stream_options")
        members = {**hint.members, "stream_options": {**(options or {}), "include_usage": True}}
        # A compressed stream could not be parsed.
        return replace(hint, members=members, headers={**hint.headers, "Accept-Encoding": "identity"})

    async def _send(
        self,
        request: web.Request,
        body: bytes | None,
        hint: Hint = NO_HINT,
        exchange: Exchange | None = None,
        without_usage: Callable[[], bytes] | None = None,
    ) -> web.StreamResponse:
        """Sends a request to the engine and forwards the response; Refusal if the engine does not respond,
        EngineLostError if it disconnects during the response.

        `without_usage` returns the body without a request for token counts that the proxy has added. It is sent instead if the engine
        refuses the first one, so that no request fails because of the proxy."""
        without = CLIENT_HEADERS if self._rules.restricts else ()
        head_s = self._config.request_timeout_s if request.method in READING else None
        upstream = await self._relay.send(request, body, hint.headers, without, head_s)
        if without_usage is not None and upstream.status in REFUSED:
            upstream.release()
            hint = replace(hint, members={})
            upstream = await self._relay.send(request, without_usage(), hint.headers, without, head_s)
            if upstream.status not in REFUSED:
                self._recorder.stop_requesting_usage()
        hides_usage = "stream_options" in hint.members
        reader = None if exchange is None else self._reader(upstream, exchange, hides_usage)
        end = "client_gone"
        try:
            response = await self._relay.respond(request, upstream, reader)
            end = "complete" if upstream.status < 400 else "error"
            return response
        except EngineLostError:
            end = "engine_lost"
            raise
        finally:
            if reader is not None:
                reader.close()
            if exchange is not None:
                exchange.end, exchange.stats = end, None if reader is None else reader.stats
                self._metrics.ends.labels(end).inc()
            # An unfinished response closes the connection, so that the engine detects the abort.
            upstream.close() if end in ("client_gone", "engine_lost") else upstream.release()

    def _reader(
        self, upstream: aiohttp.ClientResponse, exchange: Exchange, hides_usage: bool
    ) -> Reader | None:
        """The reader of a response, if the recorder or the policy needs it."""
        is_used = self._recorder.is_on or self._order.uses_outputs
        if not is_used or upstream.headers.get("Content-Encoding", "identity") != "identity":
            return None
        if upstream.status != 200:
            return None
        on_output = partial(self._order.on_output, exchange.request.request_id)
        on_tokens = on_output if self._order.uses_outputs else None
        match upstream.content_type:
            case "text/event-stream":
                return EventStreamReader(hides_usage, self._budget, on_tokens)
            case "application/x-ndjson" | "application/jsonl":
                return EventStreamReader(False, self._budget, on_tokens, is_lines=True)
            case "application/json" if exchange.parsed.endpoint != "other":
                return JsonReader(self._budget, on_tokens)
        return None

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if "Upgrade" in request.headers:
            text = f"Upgrade: got {request.headers['Upgrade']!r}; allowed: none"
            raise Refusal(501, text, "upgrade_not_supported", "Upgrade")
        if not request.can_read_body:
            return await self._send(request, None)
        async with self._relay.body(request) as held:
            body = (await self._read(request, held))[0] if self._rules.restricts else None
            return await self._send(request, held.data if body is None else body.with_members({}))
