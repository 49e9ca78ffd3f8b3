"""Replica choice for routers of other projects, which report their events to it.

A `Router` of `scheduler_core.routing` chooses among snapshots of replicas. In the simulator a snapshot is the state of a
scheduler. Here it is derived from the events of a router in front of engines: requests sent and ended, replicas removed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler_core.adapters.settings import PredictorSettings
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import CHARS_PER_TOKEN, MAX_TOKENS, ApiRequest, read_request
from scheduler_core.prediction.predictor import PredictionRequest, Predictor, open_predictor
from scheduler_core.prediction.prompt_text import member
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_ranges
from scheduler_core.request import DEFAULT_TIER, MAX_TIERS, Request, RequestState
from scheduler_core.routing import ROUTERS, make_router
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.prefix_affine import PrefixAffine
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot, RequestView, waiting_view

#: Weight of a new request in the moving average of request sizes.
MEAN_WEIGHT = 1 / 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings(PredictorSettings):
    """Settings of a router, and limits of its replicas. Choices never wait for a prediction. `InputError` if
    a value is invalid.

    Attributes:
        router: Name in `ROUTERS`, except disaggregated, which needs two kinds of replicas.
        router_parameters: Overrides of the router's parameters.
        default_max_tokens: max_tokens of requests that do not set it.
        num_kv_blocks: Blocks in the KV cache of each replica, for routers that use memory.
        kv_block_tokens: Tokens of one block.
        max_num_seqs: Maximum number of running requests of a replica; further ones wait there.
        expire_s: Seconds without an event after which a request is assumed to have ended, in case its end
            event was lost.
        seed: Seed of routers that use random numbers.
    """

    router: str = "predicted_wait"
    router_parameters: dict[str, Any] = field(default_factory=dict)
    default_max_tokens: int = 4096
    num_kv_blocks: int = 8192
    kv_block_tokens: int = 16
    max_num_seqs: int = 64
    expire_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        PredictorSettings.__post_init__(self)
        counts = ("default_max_tokens", "num_kv_blocks", "kv_block_tokens", "max_num_seqs")
        positive = dict.fromkeys(counts, (1, INTEGERS))
        check_ranges(self, **positive, expire_s=(POSITIVE, FINITE), seed=(0, INTEGERS))
        if self.make_router().role is not ReplicaRole.BOTH:
            raise InputError("router", self.router, "a router for identical replicas")

    def make_router(self) -> Router:
        """A new router; raises InputError as `make_router` does."""
        is_random = self.router in ROUTERS and ROUTERS[self.router].needs_generator
        rng = np.random.default_rng(self.seed) if is_random else None
        return make_router(self.router, self.router_parameters, rng)


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A request to route, and its declared urgency, 0 = most urgent."""

    request: ApiRequest = field(default_factory=ApiRequest)
    tier: int = DEFAULT_TIER


def routed_prompt(body: object, hints: object = None) -> RoutedPrompt:
    """Reads the body of a request of any generation API (see `read_request`), a mapping or an object with attributes; from
    `hints` it uses `tailcast_tier`. Missing and malformed members are ignored; the engine reports them."""
    tier = member(hints, "tailcast_tier")
    is_tier = type(tier) is int and 0 <= tier < MAX_TIERS
    return RoutedPrompt(read_request(body), tier if is_tier else DEFAULT_TIER)


@dataclass(slots=True, eq=False)
class _LiveRequest:
    state: RequestState
    replica_id: str
    last_event_s: float
    prompt: ApiRequest
    #: View for the snapshot, as a cache; None after a change.
    view: RequestView | None = None


class LiveRouting:
    """Tracks the requests on each replica from events, and chooses replicas with a router.

    All methods are thread-safe and do not block; a prediction is used in choices after its arrival. Events of
    unknown requests or replicas are ignored, so events may be late or repeated.

    The engine's batches are not visible. The requests of a replica are assumed to run in the order in which
    they were sent, while slots and KV blocks last.

    `predictor` replaces the one in the settings. `InputError` if the predictor of the settings does not
    exist. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        settings: RoutingSettings,
        *,
        predictor: Predictor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._router = settings.make_router()
        self._clock = clock
        self._lock = threading.Lock()
        #: Live requests by last event, the oldest first.
        self._requests: OrderedDict[str, _LiveRequest] = OrderedDict()
        #: Live requests by replica, in the order in which they were sent.
        self._on: dict[str, dict[str, _LiveRequest]] = {}
        #: Ids passed to `drop` and not yet processed.
        self._dropped: deque[str] = deque()
        self._num_sent = 0
        #: Mean tokens of the prompts and outputs of finished requests.
        self._mean_size: tuple[float, float] | None = None
        if predictor is None and settings.predictor is not None:
            predictor = open_predictor(settings.predictor)
        self._thread = None if predictor is None else settings.start_thread(predictor)

    @property
    def num_requests(self) -> dict[str, int]:
        """Number of live requests by replica, without idle replicas."""
        with self._lock:
            self._catch_up()
            return {replica_id: len(requests) for replica_id, requests in self._on.items() if requests}

    @property
    def replica_ids(self) -> list[str]:
        """Replicas that have received a request and were not removed."""
        with self._lock:
            return [*self._on]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def send(
        self,
        request_id: str,
        prompt: RoutedPrompt,
        replica_ids: Collection[str],
        num_others: Mapping[str, int] | None = None,
    ) -> str:
        """Chooses a replica for a request and adds the request there. A live request may be sent again.

        Args:
            request_id: Id of this attempt; a retry needs another id.
            prompt: The prompt and its limits.
            replica_ids: One or more candidates; ties go to the earlier one.
            num_others: By replica: number of its requests from other routers, which count with the mean size.
        """
        with self._lock:
            now = self._catch_up()
            live = self._requests.get(request_id)
            if live is not None:
                self._leave(live, now)
            state = RequestState(self._request(request_id, prompt, now), order=self._num_sent)
            prefix_blocks = self._prefix_blocks(prompt.request.whole_text())
            item = RoutingRequest(request=state.request, prefix_blocks=prefix_blocks)
            others = num_others or {}
            snapshots = [self._snapshot(replica_id, others.get(replica_id, 0)) for replica_id in replica_ids]
            replica_id = self._router.choose(item, snapshots, now)
            self._num_sent += 1
            self._requests[request_id] = live = _LiveRequest(state, replica_id, now, prompt.request)
            self._on.setdefault(replica_id, {})[request_id] = live
            self._router.on_dispatched(item, replica_id, now)
            if self._thread is not None:
                limit, model = self._limit(prompt.request), self._settings.model
                text, temperature = prompt.request.text(), prompt.request.temperature
                self._thread.submit(PredictionRequest(request_id, text, limit, model, temperature))
            return replica_id

    def move(self, request_id: str, replica_id: str) -> None:
        """Moves a request that the host sent to another replica than the chosen one."""
        with self._lock:
            live, now = self._requests.get(request_id), self._clock()
            if live is None or live.replica_id == replica_id:
                return
            source = live.replica_id
            del self._on[source][request_id]
            self._on.setdefault(replica_id, {})[request_id] = live
            live.replica_id, live.last_event_s = replica_id, now
            self._requests.move_to_end(request_id)
            self._router.on_migrated(request_id, source, replica_id, now)

    def finish(self, request_id: str) -> None:
        """Removes a request that has received its whole output."""
        with self._lock:
            now = self._catch_up()  # its prediction may have arrived after the last choice
            live = self._requests.get(request_id)
            if live is not None:
                self._leave(live, now, finished=True)

    def abort(self, request_id: str) -> None:
        """Removes a request that failed or was cancelled."""
        with self._lock:
            live = self._requests.get(request_id)
            if live is not None:
                self._leave(live, self._clock())

    def drop(self, request_id: str) -> None:
        """Like `abort`, but safe in finalizers, which may run during other calls; delayed to the next call."""
        self._dropped.append(request_id)

    def gone(self, replica_id: str) -> None:
        """Removes a replica that failed or was removed, with all its requests."""
        with self._lock:
            now = self._clock()
            for live in list(self._on.get(replica_id, {}).values()):
                self._leave(live, now)
            self._on.pop(replica_id, None)
            self._router.on_gone(replica_id, now)

    def close(self) -> None:
        """Ends the predictor's thread; later choices are made without predictions."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def _catch_up(self) -> float:
        """Applies predictions, removes dropped and expired requests, and returns the current time."""
        now = self._clock()
        for event in () if self._thread is None else self._thread.take():
            live = self._requests.get(event.request_id)
            if live is not None:
                limit = self._limit(live.prompt)
                live.state.apply_prediction(live.prompt.prediction(event.prediction, limit))
                live.view = None
        while self._dropped:
            live = self._requests.get(self._dropped.popleft())
            if live is not None:
                self._leave(live, now)
        while self._requests:
            live = next(iter(self._requests.values()))
            if now - live.last_event_s < self._settings.expire_s:
                break
            self._leave(live, now)
        return now

    def _leave(self, live: _LiveRequest, now: float, *, finished: bool = False) -> None:
        request_id = live.state.request_id
        del self._requests[request_id]
        del self._on[live.replica_id][request_id]
        if finished:
            self._router.on_finished(request_id, live.replica_id, now)
            size = (float(live.state.request.prompt_tokens), _output_tokens(live.state))
            prompt, output = self._mean_size or size
            self._mean_size = (
                prompt + MEAN_WEIGHT * (size[0] - prompt), output + MEAN_WEIGHT * (size[1] - output)
            )  # fmt: skip
        else:
            self._router.on_aborted(request_id, live.replica_id, now)
        if self._thread is not None:
            self._thread.withdraw(request_id)

    def _snapshot(self, replica_id: str, num_others: int) -> ReplicaSnapshot:
        """Snapshot of a replica; `num_others` is the number of its requests from other routers."""
        settings = self._settings
        num_blocks, block_tokens = settings.num_kv_blocks, settings.kv_block_tokens
        views = []
        for live in self._on.get(replica_id, {}).values():
            if live.view is None:
                state = live.state
                live.view = waiting_view(
                    state.request, state.effective_level(), state.prediction, block_tokens
                )
            views.append(live.view)
        if num_others:
            views += [self._mean_view()] * num_others
        running: list[RequestView] = []
        waiting: list[RequestView] = []
        used = 0
        for view in views:
            fits = len(running) < settings.max_num_seqs and used + view.demand_blocks <= num_blocks
            if fits and not waiting:
                running.append(view)
                used += view.demand_blocks
            else:
                waiting.append(view)
        return ReplicaSnapshot(
            replica_id=replica_id,
            num_kv_blocks=num_blocks,
            num_free_blocks=num_blocks - used,
            kv_block_tokens=block_tokens,
            max_num_seqs=settings.max_num_seqs,
            num_running=len(running),
            num_waiting=len(waiting),
            used_blocks=used,
            head_demand_blocks=waiting[0].demand_blocks if waiting else 0,
            waiting_prefill_tokens=sum(view.prefill_left_tokens for view in waiting),
            tiers=tuple(sorted({view.tier for view in views})),
            requests=(*running, *waiting),
        )

    def _mean_view(self) -> RequestView:
        """View of a half-finished request of mean size."""
        prompt, output = self._mean_size or (1.0, (self._settings.default_max_tokens + 1) / 2)
        return RequestView(
            request_id="",
            arrival_s=0.0,
            tier=DEFAULT_TIER,
            prompt_tokens=math.ceil(prompt),
            max_tokens=math.ceil(output),
            num_computed_tokens=math.ceil(prompt),
            demand_blocks=math.ceil((prompt + output / 2) / self._settings.kv_block_tokens),
        )

    def _limit(self, prompt: ApiRequest) -> int:
        return prompt.max_tokens or self._settings.default_max_tokens

    def _request(self, request_id: str, prompt: RoutedPrompt, now: float) -> Request:
        request = prompt.request
        return Request(
            request_id=request_id,
            arrival_s=now,
            prompt_tokens=request.prompt_tokens(),
            max_tokens=min(self._limit(request) * (request.num_outputs or 1), MAX_TOKENS),
            tier=prompt.tier,
        )

    def _prefix_blocks(self, text: str) -> tuple[int, ...]:
        """For each full block of the prompt's text, a hash of all text up to the end of the block."""
        if not isinstance(self._router, PrefixAffine):
            return ()
        size, blocks, digest = self._settings.kv_block_tokens * CHARS_PER_TOKEN, [], 0
        for end in range(size, len(text) + 1, size):
            digest = hash((digest, text[end - size : end]))
            blocks.append(digest)
        return tuple(blocks)


def _output_tokens(state: RequestState) -> float:
    """Expected output length: as predicted, otherwise half of max_tokens."""
    limit = state.request.max_tokens
    if state.prediction is None:
        return (limit + 1) / 2
    return float(state.prediction.distribution().expected(limit))
