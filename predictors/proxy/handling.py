"""One completion from end to end: predicted, told or held, passed on, recorded."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp
from aiohttp import web

from predictors.proxy.answers import Reader, StreamReader, WholeReader
from predictors.proxy.asked import CHAT, TEXT, Asked, Reads, read_asked
from predictors.proxy.engines import CLIENT_HINTS, Engine, Hint, Outlook
from predictors.proxy.forecast import Forecast, Forecaster
from predictors.proxy.headers import check_unencoded
from predictors.proxy.holding import HoldQueue
from predictors.proxy.members import JsonBody, json_body, may_be_json_object
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.order import SentOrder
from predictors.proxy.problems import Refusal
from predictors.proxy.recording import Recorder, Visit
from predictors.proxy.relay import EngineLostError, Relay
from predictors.proxy.rules import ClientRules
from predictors.proxy.tenants import TenantBook
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest
from scheduler_core.request import Request, RequestState

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Completions:
    """Handles chat and text completions, and whatever else may make an engine work.

    Attributes:
        relay: To the engine.
        forecaster: Asks the predictor.
        engine: Its hints; None: the proxy holds the queue.
        order: Keys for hints; None without an engine that reads them.
        queue: Held requests; None with one.
        rules: What clients may say themselves.
        book: What tenants may, beside that.
        recorder: Keeps what came of it; None: nobody does.
        metrics: Counts.
        clock: Seconds since a fixed moment, the same for all proxies, that never step back.
        reads: What the artifact was trained on.
        served_model: Name the predictor knows the served model by; None: the request's own.
        default_max_tokens: Cap that is assumed where a request has none.
        sends_unpredicted: Whether a request without prediction gets the policy's key for unknown lengths; False: no hint.
    """

    relay: Relay
    forecaster: Forecaster
    engine: Engine | None
    order: SentOrder | None
    queue: HoldQueue | None
    rules: ClientRules
    book: TenantBook
    recorder: Recorder | None
    metrics: ProxyMetrics
    clock: Callable[[], float]
    reads: Reads = "last"
    served_model: str | None = None
    default_max_tokens: int = 4096
    sends_unpredicted: bool = True

    async def handle(self, request: web.Request, tenant: str) -> web.StreamResponse:
        """The engine's answer.

        Raises:
            Refusal: The request is refused, or the engine does not answer.
            EngineLostError: The answer broke off.
        """
        start = time.perf_counter()
        data = await self.relay.read(request)
        restricted = self.rules.restricts(self.book.limits(tenant).most_urgent_tier)
        try:
            body = self._body(request, data, restricted)
            asked = read_asked({} if body is None else body.content, request.path, self.reads)
            state = self._state(request, asked, tenant)
        except InputError as error:
            raise Refusal.of(error) from error
        visit = Visit(asked=asked, state=state, started_s=start)
        if self.recorder is not None:
            self.recorder.shadow(visit, self._question(asked, state))
        way = self._held if self.queue is not None else self._sent
        try:
            async with way(asked, state, visit) as hint:
                hint = self._counting(asked, hint)
                data = data if body is None else body.with_members(hint.members)
                self.metrics.overhead.observe(time.perf_counter() - start - visit.waited_s)
                return await self._pass(request, data, hint, visit, restricted)
        finally:
            self.metrics.request.observe(time.perf_counter() - start)
            if self.recorder is not None:
                self.recorder.finish(visit)

    def _body(self, request: web.Request, data: bytes, restricted: bool) -> JsonBody | None:
        """The body with the hints that its client may send; None where it is no JSON object and passes as it is.

        Raises:
            Refusal: A completion's body cannot be read, or another one that could hold hints.
            InputError: It is compressed, or a hint in it is not allowed.
        """
        is_completion = request.path in (CHAT, TEXT)
        try:
            check_unencoded(request.headers)
            if not is_completion and not may_be_json_object(data):
                return None
            body = json_body(data)
        except (InputError, Refusal):
            if is_completion or restricted:
                raise
            return None
        allowed = self.rules.allowed_content(body.content) if restricted else body.content
        return body if allowed is body.content else JsonBody(None, allowed)

    def _state(self, request: web.Request, asked: Asked, tenant: str) -> RequestState:
        """The request as policies see it."""
        tier = self.rules.tier(request.headers, self.book.limits(tenant).most_urgent_tier)
        found = Request(
            request_id=uuid.uuid4().hex,
            arrival_s=self.clock(),
            prompt_tokens=asked.prompt_tokens,
            max_tokens=asked.max_tokens or self.default_max_tokens,
            priority=asked.priority or 0,
            tier=tier,
            tenant=tenant,
        )
        return RequestState(found, order=0 if self.queue is None else self.queue.next_order())

    def _question(self, asked: Asked, state: RequestState) -> PredictionRequest:
        served = asked.model if self.served_model is None else self.served_model
        temperature = asked.temperature if asked.temperature is None else min(asked.temperature, 100.0)
        return PredictionRequest(
            state.request_id, asked.prompt or "", state.request.max_tokens, served, temperature
        )

    @asynccontextmanager
    async def _sent(self, asked: Asked, state: RequestState, visit: Visit) -> AsyncIterator[Hint]:
        """The hint of a request that the engine orders."""
        assert self.order is not None
        self.order.enter(state, state.request.arrival_s)
        try:
            forecast = await self.forecaster.ask(self._question(asked, state))
            self._predicted(forecast, visit)
            visit.waited_s = forecast.seconds
            yield self._hint(asked, state, forecast)
        finally:
            self.order.leave(state)

    @asynccontextmanager
    async def _held(self, asked: Asked, state: RequestState, visit: Visit) -> AsyncIterator[Hint]:
        """Holds a request until its turn; its prediction comes meanwhile."""
        assert self.queue is not None
        queue = self.queue
        asking = asyncio.create_task(self.forecaster.ask(self._question(asked, state)))

        def answered(task: asyncio.Task[Forecast]) -> None:
            if not task.cancelled():
                queue.update(state, task.result().prediction)
                self._predicted(task.result(), visit)

        asking.add_done_callback(answered)
        start = time.perf_counter()
        try:
            await queue.enter(state)
            visit.waited_s = time.perf_counter() - start
            self.metrics.held.observe(visit.waited_s)
            self.metrics.hints.labels("held").inc()
            yield Hint()
        finally:
            queue.leave(state)
            asking.cancel()

    def _predicted(self, forecast: Forecast, visit: Visit) -> None:
        visit.forecast = forecast
        self.metrics.predictions.labels(forecast.outcome).inc()
        if forecast.seconds:
            self.metrics.prediction.observe(forecast.seconds)

    def _hint(self, asked: Asked, state: RequestState, forecast: Forecast) -> Hint:
        """What the engine is told; nothing where that is not possible: a hint is never worth a request."""
        assert self.engine is not None
        assert self.order is not None
        prediction = forecast.prediction
        endpoints = self.engine.endpoints
        try:
            key = self.order.key(state, prediction, self.clock())
            if endpoints is not None and (asked.path not in endpoints or not asked.content):
                return self._no_hint("other_endpoint")
            if prediction is None and not self.sends_unpredicted:
                return self._no_hint("unpredicted")
            hint = self.engine.hint(asked.content, Outlook(key=key, state=state))
        except InputError as error:
            logger.warning("request %s goes on without hint: %s", state.request_id, error)
            return self._no_hint("impossible")
        if "priority" in hint.members and asked.content.get("priority") is not None:
            return self._no_hint("clients_own")
        self.metrics.hints.labels("policy" if prediction is not None else "policy_unpredicted").inc()
        return hint

    def _no_hint(self, why: str) -> Hint:
        self.metrics.hints.labels(why).inc()
        return Hint()

    def _counting(self, asked: Asked, hint: Hint) -> Hint:
        """The hint, and the wish for token counts where the recorder needs it and the client has not said it."""
        if self.recorder is None or not asked.is_completion or not self.recorder.asks_usage(asked):
            return hint
        options = asked.content.get("stream_options")
        members = {**hint.members, "stream_options": {**(options or {}), "include_usage": True}}
        # A compressed stream could not be read.
        return replace(hint, members=members, headers={**hint.headers, "Accept-Encoding": "identity"})

    async def _pass(
        self, request: web.Request, body: bytes, hint: Hint, visit: Visit, restricted: bool
    ) -> web.StreamResponse:
        """Sends it, and passes the answer on."""
        without = CLIENT_HINTS.headers if restricted else ()
        upstream = await self.relay.send(request, body, hint.headers, without=without)
        hides = "stream_options" in hint.members
        reads = self.recorder is not None and visit.asked.is_completion
        reader = self._reader(upstream, hides) if reads else None
        end = "client_gone"
        try:
            if reader is not None:
                visit.seen = reader.seen
            response = await self.relay.answer(
                request, upstream, reader, shortens=hides and reader is not None
            )
            end = "complete" if upstream.status < 400 else "error"
            return response
        except EngineLostError:
            end = "engine_lost"
            raise
        finally:
            visit.end = end
            self.metrics.ends.labels(end).inc()
            # Closes the connection unless the answer was read to its end: the engine learns that nobody listens.
            upstream.close() if end in ("client_gone", "engine_lost") else upstream.release()

    def _reader(self, upstream: aiohttp.ClientResponse, hides_usage: bool) -> Reader | None:
        assert self.recorder is not None
        if upstream.status != 200 or upstream.headers.get("Content-Encoding", "identity") != "identity":
            return None
        if upstream.content_type == "text/event-stream":
            return StreamReader(hides_usage=hides_usage, keeps_text=self.recorder.counter.needs_text)
        return WholeReader() if upstream.content_type == "application/json" else None
