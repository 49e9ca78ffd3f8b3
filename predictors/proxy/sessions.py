"""Sessions of the requests in a proxy: their identity, their prompts, and the model of the engine that has their contexts.

`--session_file` keeps them over restarts of the proxy, so that sessions go on where they were: the latest responses, the
hashes of messages, the contexts in the engine's cache, and what was learned of returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from prometheus_client import Gauge

from predictors.hosting.live_page import SessionCounts
from predictors.proxy.config import ProxyConfig
from predictors.proxy.engine_model import CacheSize, End, EngineModel, read_cache_size
from predictors.proxy.feedback import Exchange, Recorder
from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.order import HoldQueue
from predictors.proxy.parsing import ParsedRequest
from predictors.proxy.relay import Relay
from predictors.proxy.replicas import Engine
from predictors.proxy.session_context import SessionContexts, Turn, resized
from predictors.proxy.session_id import SessionIds, is_final
from scheduler_core.adapters.live_calibration import SAVE_S, StateFile
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_response import ended_by
from scheduler_core.prediction.session_return import ReturnPredictor

logger = logging.getLogger(__name__)
#: Weight of a prompt in the hit rate relative to that of the next one, so that about the last thousand count.
HIT_DECAY = 0.999
STATE_FORMAT = "tailcast-proxy-sessions/1"


class _Parts(NamedTuple):
    """The parts of an engine that has a model."""

    queue: HoldQueue
    model: EngineModel
    relay: Relay


class Sessions:
    """Follows the sessions of a proxy whose queues have models of their engines; reads the sizes of the engines' KV caches."""

    def __init__(
        self,
        config: ProxyConfig,
        metrics: ProxyMetrics,
        engines: Sequence[Engine],
        recorder: Recorder,
    ) -> None:
        self._config, self._metrics, self._recorder = config, metrics, recorder
        self._engines = [
            _Parts(each.order, each.order.model, each.relay)
            for each in engines
            if isinstance(each.order, HoldQueue) and each.order.model is not None
        ]
        self._ids, self._contexts = SessionIds(), SessionContexts()
        self._reading: dict[Relay, asyncio.Task[None]] = {}
        #: Of prompts and of what of them was cached, fading.
        self._prompt_tokens = self._cached_tokens = 0.0
        returns = [getattr(each.queue.policy, "returns", None) for each in self._engines]
        self._returns = [each for each in returns if isinstance(each, ReturnPredictor)]
        self._file: StateFile | None = None
        self._saving: asyncio.Task[None] | None = None
        if config.session_file is not None:
            self._file = StateFile(config.session_file, "session_file", "", self._restore)
        for each in self._engines:
            each.relay.monitor.on_back = partial(self._on_back, each)
        held = "Sessions whose next request waits in the queue of the proxy."
        resident = "Tokens in the engine's KV cache, by the proxy's model of it."
        for name, text, value in (
            ("sessions", "Sessions that are known.", lambda: len(self._contexts)),
            ("held_sessions", held, self._num_held),
            ("resident_tokens", resident, self._num_resident_tokens),
            ("kv_tokens", "Size of the KV cache, 0 if it is unknown.", self._num_kv_tokens),
        ):
            Gauge(f"tailcast_proxy_{name}", text, registry=metrics.registry).set_function(value)

    def begin(self, headers: Mapping[str, str], parsed: ParsedRequest, owner: str) -> Turn | None:
        """The next prompt of the session of a request, or of none; None if the prompt cannot be read. `owner`: see `ClientRules`."""
        body = parsed.body
        if not body.has_prompt:
            return None
        session = self._ids.session_of(headers, parsed.content, body, owner)
        continues = bool(parsed.content.get("previous_response_id"))
        turn = self._contexts.begin(session, body, continues=continues)
        return replace(turn, owner=owner, is_last=bool(session) and is_final(headers))

    def end(self, exchange: Exchange) -> End:
        """What the response of a request says, which also becomes known of its session."""
        turn, stats = exchange.turn, exchange.stats
        is_complete, is_last = exchange.end == "complete", turn is not None and turn.is_last
        if turn is not None and is_last:
            self._contexts.forget(turn.session)
        if turn is None or stats is None:
            return End(is_complete=is_complete, ends_session=is_last)
        num_cached = sum(each.queue.cached_tokens(exchange.request.request_id) for each in self._engines)
        self._metrics.cached_tokens.labels("model").inc(num_cached)
        self._contexts.end(turn, stats.prompt_tokens, stats.output_tokens)
        if stats.response_id and turn.session:
            self._ids.responded(stats.response_id, turn.session, turn.owner)
        if stats.cached_tokens is not None:
            num_cached = stats.cached_tokens
            self._metrics.cached_tokens.labels("engine").inc(num_cached)
        if stats.prompt_tokens:
            self._metrics.prompt_tokens.inc(stats.prompt_tokens)
            self._prompt_tokens = HIT_DECAY * self._prompt_tokens + stats.prompt_tokens
            self._cached_tokens = HIT_DECAY * self._cached_tokens + num_cached
        return End(
            ended_by=ended_by(stats.finish_reason),
            is_complete=is_complete,
            content=resized(turn.content, stats.prompt_tokens) if stats.prompt_tokens else (),
            prompt_tokens=stats.prompt_tokens or None,
            cached_tokens=stats.cached_tokens,
            ends_session=is_last,
        )

    async def start(self) -> None:
        """Reads the size of the engine's cache, and begins to save."""
        await asyncio.gather(*map(self.read_size, self._engines))
        if self._file is not None:
            self._saving = asyncio.create_task(self._save_repeatedly(self._file))

    async def read_size(self, engine: _Parts) -> None:
        """Reads the size of an engine's KV cache, if it can be reached; logs if the size remains unknown."""
        size = read_cache_size(await engine.relay.read_metrics())
        if size is not None:
            self._recorder.count_tokens()
        if self._config.engine_kv_tokens is not None:
            size = CacheSize(self._config.engine_kv_tokens, *([] if size is None else [size.block_tokens]))
        if size is None:
            logger.warning(
                "the size of the engine's KV cache is unknown, all contexts count as cached: set --engine_kv_tokens"
            )
        elif size != engine.model.size:
            engine.queue.set_size(size)
            logger.info("the engine's KV cache has %d tokens", size.num_tokens)

    async def close(self) -> None:
        """Ends all tasks and writes the state file."""
        tasks = [task for task in (*self._reading.values(), self._saving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._file is not None:
            await asyncio.to_thread(self._file.write, self.state())
            self._file.close()

    def state(self) -> dict[str, Any]:
        """What the state file keeps: JSON content with arrays."""
        return {
            "format": STATE_FORMAT,
            "responses": self._ids.state(),
            "sessions": self._contexts.state(),
            # Which of several engines has a context is learned anew.
            "cache": self._engines[0].model.state() if len(self._engines) == 1 else None,
            "returns": self._returns[0].state() if self._returns else None,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            if state["format"] != STATE_FORMAT:
                raise ValueError("format")
            self._ids.restore(state["responses"])
            self._contexts.restore(state["sessions"])
            if state["returns"] is not None:
                for returns in self._returns:
                    returns.restore(state["returns"])
            if state["cache"] is not None and len(self._engines) == 1:
                self._engines[0].model.restore(state["cache"])
                self._engines[0].queue.policy.bind(self._engines[0].model)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            allowed = f"a file written with this option ({error!r})"
            raise InputError("session_file", self._config.session_file, allowed) from error

    async def _save_repeatedly(self, file: StateFile) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await asyncio.to_thread(file.write, self.state())

    def _on_back(self, engine: _Parts) -> None:
        """An engine was away: it has been restarted, with an empty cache that may have another size."""
        engine.model.clear(engine.model.size)
        reading = self._reading.get(engine.relay)
        if reading is None or reading.done():
            self._reading[engine.relay] = asyncio.create_task(self.read_size(engine))

    def counts(self) -> SessionCounts:
        """What the live page shows of sessions."""
        sets = [getattr(each.queue.policy, "sessions", None) for each in self._engines]
        active = [
            sum(each.is_active for each in sessions.values()) for sessions in sets if sessions is not None
        ]
        return SessionCounts(
            num_known=len(self._contexts),
            num_active=sum(active) if active else None,
            num_running=len(
                {state.request.session for each in self._engines for state in each.queue.running()} - {""}
            ),
            num_held=self._num_held(),
            hit_rate=self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None,
            resident_tokens=self._num_resident_tokens(),
            kv_tokens=self._num_kv_tokens(),
        )

    def _num_held(self) -> int:
        return len({state.request.session for each in self._engines for state in each.queue.waiting()} - {""})

    def _num_resident_tokens(self) -> int:
        return sum(each.model.num_resident_tokens for each in self._engines)

    def _num_kv_tokens(self) -> int:
        return sum(each.model.size.num_tokens for each in self._engines if each.model.size is not None)
