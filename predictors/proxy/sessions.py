"""Sessions of the requests in a proxy: their identity, their prompts, and the model of the engine that has their contexts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from prometheus_client import Gauge

from predictors.proxy.config import ProxyConfig
from predictors.proxy.engine_model import CacheSize, End, EngineModel, read_cache_size
from predictors.proxy.feedback import Exchange, Recorder
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.order import HoldQueue
from predictors.proxy.parsing import ParsedRequest
from predictors.proxy.relay import Relay
from predictors.proxy.session_context import SessionContexts, Turn, resized
from predictors.proxy.session_id import SessionIds
from scheduler_core.prediction.api_response import ended_by

logger = logging.getLogger(__name__)


class Sessions:
    """Follows the sessions of a proxy whose queue has a model of the engine; reads the size of the engine's KV cache."""

    def __init__(
        self,
        config: ProxyConfig,
        metrics: ProxyMetrics,
        queue: HoldQueue,
        model: EngineModel,
        relay: Relay,
        recorder: Recorder,
    ) -> None:
        self._config, self._metrics, self._queue, self._model = config, metrics, queue, model
        self._relay, self._recorder = relay, recorder
        self._ids, self._contexts = SessionIds(), SessionContexts()
        self._reading: asyncio.Task[None] | None = None
        relay.monitor.on_back = self._on_back
        held = "Sessions whose next request waits in the queue of the proxy."
        resident = "Tokens in the engine's KV cache, by the proxy's model of it."
        for name, text, value in (
            ("sessions", "Sessions that are known.", lambda: len(self._contexts)),
            ("held_sessions", held, lambda: len({state.request.session for state in queue.waiting()} - {""})),
            ("resident_tokens", resident, lambda: model.num_resident_tokens),
            ("kv_tokens", "Size of the KV cache, 0 if it is unknown.", self._num_kv_tokens),
        ):
            Gauge(f"tailcast_proxy_{name}", text, registry=metrics.registry).set_function(value)

    def begin(self, headers: Mapping[str, str], parsed: ParsedRequest, tenant: str) -> Turn | None:
        """The next prompt of the session of a request, or of none; None if the prompt cannot be read."""
        body = parsed.body
        if not body.has_prompt:
            return None
        session = self._ids.session_of(headers, parsed.content, body, tenant)
        return self._contexts.begin(session, body, continues=bool(parsed.content.get("previous_response_id")))

    def end(self, exchange: Exchange) -> End:
        """What the response of a request says, which also becomes known of its session."""
        turn, stats = exchange.turn, exchange.stats
        is_complete = exchange.end == "complete"
        if turn is None or stats is None:
            return End(is_complete=is_complete)
        self._metrics.cached_tokens.labels("model").inc(
            self._queue.cached_tokens(exchange.request.request_id)
        )
        self._contexts.end(turn, stats.prompt_tokens, stats.output_tokens)
        if stats.response_id and turn.session:
            self._ids.responded(stats.response_id, turn.session, exchange.request.tenant)
        if stats.prompt_tokens:
            self._metrics.prompt_tokens.inc(stats.prompt_tokens)
        if stats.cached_tokens is not None:
            self._metrics.cached_tokens.labels("engine").inc(stats.cached_tokens)
        return End(
            ended_by=ended_by(stats.finish_reason),
            is_complete=is_complete,
            content=resized(turn.content, stats.prompt_tokens) if stats.prompt_tokens else (),
            prompt_tokens=stats.prompt_tokens or None,
            cached_tokens=stats.cached_tokens,
        )

    async def read_size(self) -> None:
        """Reads the size of the engine's KV cache, if it can be reached; logs if the size remains unknown."""
        size = read_cache_size(await self._relay.read_metrics())
        if size is not None:
            self._recorder.count_tokens()
        if self._config.engine_kv_tokens is not None:
            size = CacheSize(self._config.engine_kv_tokens, *([] if size is None else [size.block_tokens]))
        if size is None:
            logger.warning(
                "the size of the engine's KV cache is unknown, all contexts count as cached: set --engine_kv_tokens"
            )
        elif size != self._model.size:
            self._queue.set_size(size)
            logger.info("the engine's KV cache has %d tokens", size.num_tokens)

    async def close(self) -> None:
        """Ends the reading of the size."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def _on_back(self) -> None:
        """The engine was away: it has been restarted, with an empty cache that may have another size."""
        self._model.clear(self._model.size)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self.read_size())

    def _num_kv_tokens(self) -> int:
        return 0 if self._model.size is None else self._model.size.num_tokens
