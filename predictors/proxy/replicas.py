"""Engines behind one proxy, all with the same model, and the choice among them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from predictors.proxy.engine_model import MAX_CONTEXTS
from predictors.proxy.order import HoldQueue, SentOrder
from predictors.proxy.relay import Relay
from scheduler_core.request import Request
from scheduler_core.routing.base import RoutingRequest
from scheduler_core.routing.session_affine import SessionAffine
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """One engine: its URL, the connections to it, and the order of its requests with the model of its prefix cache."""

    url: str
    relay: Relay
    order: SentOrder | HoldQueue

    @property
    def is_up(self) -> bool:
        """See `EngineMonitor.is_up`."""
        return self.relay.monitor.is_up

    def snapshot(self) -> ReplicaSnapshot:
        """What `SessionAffine` reads."""
        order, model = self.order, self.order.model
        return ReplicaSnapshot(
            replica_id=self.url,
            num_kv_blocks=1,
            num_free_blocks=1,
            num_running=order.num_running,
            num_waiting=order.num_live - order.num_running,
            resident_tokens=(lambda session: 0) if model is None else model.resident_tokens,
        )


class Replicas:
    """Chooses the engine of each request once, by `SessionAffine` among those that are up, or all if none is. When an engine
    is gone, its waiting requests go to others."""

    def __init__(self, engines: Sequence[Engine], clock: Callable[[], float]) -> None:
        self.engines, self._clock = engines, clock
        self._router = SessionAffine()
        #: Session -> engine of its latest request.
        self._latest: OrderedDict[str, Engine] = OrderedDict()
        if len(engines) > 1:
            for engine in engines:
                engine.relay.monitor.on_gone = partial(self._on_gone, engine)

    @property
    def first_up(self) -> Engine:
        """The first engine that is up; the first one if none is."""
        return next((engine for engine in self.engines if engine.is_up), self.engines[0])

    def has_other(self, engine: Engine) -> bool:
        """Whether another engine is up."""
        return any(other.is_up for other in self.engines if other is not engine)

    def choose(self, request: Request, *, stays: bool) -> Engine:
        """The engine for a request, until `leave`. `stays`: the engine of the session has a response that the request names."""
        if len(self.engines) == 1:
            return self.engines[0]
        up = [engine for engine in self.engines if engine.is_up] or self.engines
        session, now = request.session, self._clock()
        former = self._latest.pop(session, None)
        item = RoutingRequest(request=request)
        if stays and former is not None and former in up:
            engine = former
        else:
            url = self._router.choose(item, [engine.snapshot() for engine in up], now)
            engine = next(engine for engine in up if engine.url == url)
        self._router.on_dispatched(item, engine.url, now)
        if session:
            self._latest[session] = engine
            if len(self._latest) > MAX_CONTEXTS:
                self._latest.popitem(last=False)
        if former is not None and former is not engine:
            former.order.end_session(session)
        return engine

    def leave(self, request: Request, engine: Engine) -> None:
        """Handles the end of a request in any way."""
        if len(self.engines) > 1:
            self._router.on_finished(request.request_id, engine.url, self._clock())

    def _on_gone(self, engine: Engine) -> None:
        self._router.on_gone(engine.url, self._clock())
        if isinstance(engine.order, HoldQueue) and self.has_other(engine):
            engine.order.give_up()
