"""Choice of the replica inside the routers of others: their events in, a replica out.

A `Router` of `scheduler_core.routing` chooses among snapshots of replicas. In the simulator a snapshot is a scheduler's
state; here it is made of what a router in front of engines sees: requests sent, their tokens, their ends, replicas gone.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler_core.adapters.settings import PredictorSettings
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest, Predictor, open_predictor
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_ranges
from scheduler_core.request import MAX_TIERS, Request, RequestState
from scheduler_core.routing import ROUTERS, make_router
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.prefix_affine import PrefixAffine
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot, RequestView, waiting_view

#: Rough number of characters per token: nothing has tokenized a prompt that is to be routed.
CHARS_PER_TOKEN = 4
#: Weight of one request in the mean size of requests.
MEAN_WEIGHT = 1 / 64
#: Tier of requests that declare none.
DEFAULT_TIER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings(PredictorSettings):
    """Settings of a router, and limits of the replicas behind it; no choice waits for a prediction. `InputError` if a value is
    not allowed.

    Attributes:
        router: Name in `ROUTERS`; all but disaggregated, which needs replicas of two kinds.
        router_parameters: Overrides of the router's parameters.
        default_max_tokens: max_tokens assumed where a request has none.
        num_kv_blocks: Blocks in the KV cache of each replica, for routers that look at memory.
        kv_block_tokens: Tokens of one block.
        max_num_seqs: Requests that a replica runs at the same time; further ones wait there.
        expire_s: A request of which nothing was seen for so long is taken to have ended, in seconds: the bound on what a
            lost event can cost.
        seed: Of routers that draw.
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
            raise InputError("router", self.router, "a router of replicas that are all alike")

    def make_router(self) -> Router:
        """A new router; raises InputError as `make_router` does."""
        draws = self.router in ROUTERS and ROUTERS[self.router].needs_generator
        rng = np.random.default_rng(self.seed) if draws else None
        return make_router(self.router, self.router_parameters, rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedPrompt:
    """What a router gets of a request's body.

    Attributes:
        text: The whole prompt, for its length and shared prefixes.
        user_text: Text for the predictor: the last user message, or the prompt of a text completion; empty without one.
        max_tokens: None where the request has none.
        temperature: None where the request has none.
        tier: Declared urgency, 0 the most urgent.
    """

    text: str = ""
    user_text: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    tier: int = DEFAULT_TIER


def openai_prompt(body: object, hints: object = None) -> RoutedPrompt:
    """The prompt in the body of a chat or text completion, whether that is a mapping or an object with attributes: of
    `messages` or `prompt`, `max_completion_tokens` or `max_tokens`, and `temperature`; `hints` may have the member
    `tailcast_tier`.

    Members that are absent or malformed are left out: reporting them is the engine's job.
    """
    messages = member(body, "messages")
    if isinstance(messages, Iterable) and not isinstance(messages, str):
        turns = [(member(item, "role"), content_text(member(item, "content"))) for item in messages]
        text = "\n".join(f"{role}: {content}" for role, content in turns)
        user_text = next((content for role, content in reversed(turns) if role == "user"), "")
    else:
        text = user_text = content_text(member(body, "prompt"))
    limits = [member(body, name) for name in ("max_completion_tokens", "max_tokens")]
    temperature, tier = member(body, "temperature"), member(hints, "tailcast_tier")
    return RoutedPrompt(
        text=text,
        user_text=user_text,
        max_tokens=next((limit for limit in limits if type(limit) is int and limit > 0), None),
        temperature=float(temperature) if type(temperature) in (int, float) and 0 <= temperature < math.inf else None,
        tier=tier if type(tier) is int and 0 <= tier < MAX_TIERS else DEFAULT_TIER,
    )  # fmt: skip


def member(source: object, name: str) -> Any:
    """A member of a mapping, or an attribute of another object; None if it has none."""
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def content_text(content: object) -> str:
    """The text of a message's content, which may be a list of parts; empty where there is none."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Iterable) or isinstance(content, Mapping):
        return ""
    parts = [part if isinstance(part, str) else member(part, "text") for part in content]
    return "".join(part for part in parts if isinstance(part, str))


@dataclass(slots=True, eq=False)
class _LiveRequest:
    state: RequestState
    replica_id: str
    last_event_s: float
    #: What routers see of it; None after a change.
    view: RequestView | None = None


class LiveRouting:
    """The requests on each replica, kept from events, and a router that chooses with them.

    Every method may be called by any thread, none waits: a prediction counts for the choices after it has come. Events of
    requests or replicas that are not here are ignored, so that they may come twice or late.

    The engine's batch is not visible here. The requests of a replica are taken to run in the order in which they were sent,
    as far as slots and KV blocks suffice.

    `predictor` takes the place of the one that the settings name, `InputError` if there is no such one; `clock` is monotonic,
    in seconds.
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
        #: In the order of their last event, the oldest first.
        self._requests: OrderedDict[str, _LiveRequest] = OrderedDict()
        #: By replica, in the order in which they were sent.
        self._on: dict[str, dict[str, _LiveRequest]] = {}
        #: Ids that `drop` has got.
        self._dropped: deque[str] = deque()
        self._num_sent = 0
        #: Mean tokens of the prompts and outputs of finished requests.
        self._mean_size: tuple[float, float] | None = None
        if predictor is None and settings.predictor is not None:
            predictor = open_predictor(settings.predictor)
        self._thread = None if predictor is None else settings.start_thread(predictor)

    @property
    def num_requests(self) -> dict[str, int]:
        """Live requests of each replica that has any."""
        with self._lock:
            self._catch_up()
            return {replica_id: len(requests) for replica_id, requests in self._on.items() if requests}

    @property
    def replica_ids(self) -> list[str]:
        """Replicas that have got a request and are not gone."""
        with self._lock:
            return [*self._on]

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is live."""
        return request_id in self._requests

    def send(
        self,
        request_id: str,
        prompt: RoutedPrompt,
        replica_ids: Collection[str],
        num_others: Mapping[str, int] | None = None,
    ) -> str:
        """Chooses a replica for a request, which counts there from now on; a live one may get another replica.

        Args:
            request_id: Of this attempt: one that was tried in vain comes back under another id.
            prompt: What it is.
            replica_ids: At least one to choose from; ties go to the earlier.
            num_others: By replica: requests there that another router has sent. They count as of mean size.
        """
        with self._lock:
            now = self._catch_up()
            live = self._requests.get(request_id)
            if live is not None:
                self._leave(live, now)
            state = RequestState(self._request(request_id, prompt, now), order=self._num_sent)
            item = RoutingRequest(
                request=state.request, tier=prompt.tier, prefix_blocks=self._prefix_blocks(prompt.text)
            )
            others = num_others or {}
            snapshots = [self._snapshot(replica_id, others.get(replica_id, 0)) for replica_id in replica_ids]
            replica_id = self._router.choose(item, snapshots, now)
            self._num_sent += 1
            self._requests[request_id] = live = _LiveRequest(state, replica_id, now)
            self._on.setdefault(replica_id, {})[request_id] = live
            self._router.on_dispatched(item, replica_id, now)
            if self._thread is not None:
                limit, model = state.request.max_tokens, self._settings.served_model
                query = PredictionRequest(request_id, prompt.user_text, limit, model, prompt.temperature)
                self._thread.submit(query)
            return replica_id

    def move(self, request_id: str, replica_id: str) -> None:
        """The host has sent the request to another replica than the chosen one."""
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
        """The request has its whole output."""
        with self._lock:
            now = self._catch_up()  # its prediction may have come after the last choice
            live = self._requests.get(request_id)
            if live is not None:
                self._leave(live, now, finished=True)

    def abort(self, request_id: str) -> None:
        """The request failed or was cancelled."""
        with self._lock:
            live = self._requests.get(request_id)
            if live is not None:
                self._leave(live, self._clock())

    def drop(self, request_id: str) -> None:
        """`abort` for the garbage collector, which may call in the middle of any other call; takes effect at the next."""
        self._dropped.append(request_id)

    def gone(self, replica_id: str) -> None:
        """The replica has failed or was removed, with all its requests."""
        with self._lock:
            now = self._clock()
            for live in list(self._on.get(replica_id, {}).values()):
                self._leave(live, now)
            self._on.pop(replica_id, None)
            self._router.on_gone(replica_id, now)

    def close(self) -> None:
        """Ends the predictor's thread; choices go on without predictions."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def _catch_up(self) -> float:
        """Takes in predictions, dropped and expired requests; returns the time."""
        now = self._clock()
        for event in () if self._thread is None else self._thread.take():
            live = self._requests.get(event.request_id)
            if live is not None:
                live.state.apply_prediction(event.prediction)
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
        """What is known of a replica; `num_others` requests there are not known one by one."""
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
        """A request of mean size, half done."""
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

    def _request(self, request_id: str, prompt: RoutedPrompt, now: float) -> Request:
        return Request(
            request_id=request_id,
            arrival_s=now,
            prompt_tokens=1 + len(prompt.text) // CHARS_PER_TOKEN,
            max_tokens=prompt.max_tokens or self._settings.default_max_tokens,
            tier=prompt.tier,
        )

    def _prefix_blocks(self, text: str) -> tuple[int, ...]:
        """A hash of each full block of the prompt's text, over all text up to the block's end."""
        if not isinstance(self._router, PrefixAffine):
            return ()
        size, blocks, digest = self._settings.kv_block_tokens * CHARS_PER_TOKEN, [], 0
        for end in range(size, len(text) + 1, size):
            digest = hash((digest, text[end - size : end]))
            blocks.append(digest)
        return tuple(blocks)


def _output_tokens(state: RequestState) -> float:
    """Length of an output: as predicted, else half of the limit."""
    limit = state.request.max_tokens
    if state.prediction is None:
        return (limit + 1) / 2
    return float(state.prediction.distribution().expected(limit))
