"""Request router for Ray Serve and Ray Serve LLM: `RequestRouterConfig(request_router_class=
"scheduler_core.adapters.ray_serve.TailcastRequestRouter", request_router_kwargs={...})` with fields of `RoutingSettings`.

Serve notifies its routers when a request is assigned to a replica, when it ends, and when the set of replicas
changes, but not of tokens. Replicas still reject requests above `max_ongoing_requests`, and Serve still retries them.

`TailcastRequestRouter` is created at its first access, so that this module can be imported without Ray. User guide:
docs/routing.md.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from scheduler_core.adapters.live_routing import (
    LiveRouting,
    RoutedPrompt,
    RoutingSettings,
    routed_prompt,
)
from scheduler_core.adapters.settings import check_version
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.prediction.api_request import ApiRequest
from scheduler_core.prediction.prompt_text import member

if TYPE_CHECKING:
    from ray.serve.request_router import (
        LocalityMixin,
        MultiplexMixin,
        PendingRequest,
        RequestRouter,
        RunningReplica,
    )

    class _Base(LocalityMixin, MultiplexMixin, RequestRouter): ...
else:
    _Base = object

#: Minor versions of Ray that this module supports (the router interface is alpha); tested with 2.60.0.
SUPPORTED = ("2.60",)
#: With this option Serve LLM bypasses the router, which then gets no end events.
DIRECT_STREAMING = "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING"


class LiveRequestRouter(_Base):
    """Mixin for Ray Serve's RequestRouter: chooses with `LiveRouting`.

    Serve runs a router in each process that sends requests to the deployment. Of requests from other
    processes only the number is available, from the queue lengths that replicas report.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Called by Serve with `request_router_kwargs`. `InputError` if a setting is unknown or not allowed."""
        if os.environ.get(DIRECT_STREAMING) == "1":
            raise InputError(
                DIRECT_STREAMING, "1", "unset: with it, routers get no event when a request ends"
            )
        self._tailcast_routing = LiveRouting(RoutingSettings.of(settings, "request_router_kwargs"))
        self._tailcast_num_choices = 0
        #: Id of the choice for each request that waits for a replica, by the future of the request.
        self._tailcast_choices: WeakKeyDictionary[asyncio.Future[Any], str] = WeakKeyDictionary()
        #: Replica and id of each assigned choice, oldest first, by Serve's id of the request.
        self._tailcast_sent: dict[str, list[tuple[str, str]]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks the chosen replica first, then all others. Serve repeats the call until one accepts."""
        if pending_request is None:
            return [candidate_replicas]
        if pending_request.metadata.multiplexed_model_id:
            allowed = self.apply_multiplex_routing(pending_request=pending_request)
        else:
            allowed = self.apply_locality_routing(pending_request=pending_request)
        candidates = {
            replica.replica_id.unique_id: replica
            for replica in candidate_replicas
            if replica.replica_id in allowed
        }
        if not candidates:
            return []
        future = pending_request.future
        choice = self._tailcast_choices.get(future)
        if choice is None:
            self._tailcast_num_choices += 1
            choice = f"{pending_request.metadata.internal_request_id}-{self._tailcast_num_choices}"
            self._tailcast_choices[future] = choice
            future.add_done_callback(
                partial(self._tailcast_assigned, pending_request.metadata.internal_request_id, choice)
            )
        chosen = self._tailcast_routing.send(
            choice, request_prompt(pending_request), candidates, self._tailcast_others(candidates)
        )
        best = candidates.pop(chosen)
        return [[best], [*candidates.values()]]

    def _tailcast_assigned(
        self, request_id: str, choice: str, future: asyncio.Future[RunningReplica]
    ) -> None:
        """Called when Serve has assigned the request to a replica, or the request was cancelled."""
        self._tailcast_choices.pop(future, None)
        if future.cancelled():
            self._tailcast_routing.abort(choice)
            return
        replica_id = future.result().replica_id.unique_id
        self._tailcast_routing.move(choice, replica_id)
        # A request that is cancelled between assignment and sending gets no further event: it expires.
        for oldest in list(islice(self._tailcast_sent, 2)):
            if not any(name in self._tailcast_routing for _, name in self._tailcast_sent[oldest]):
                del self._tailcast_sent[oldest]
        self._tailcast_sent.setdefault(request_id, []).append((replica_id, choice))

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Called by Serve at the end of each attempt to send a request, including failures and rejections."""
        super().on_request_completed(replica_id, internal_request_id)
        sent = self._tailcast_sent.get(internal_request_id, [])
        for entry in sent:
            if entry[0] == replica_id.unique_id:
                sent.remove(entry)
                self._tailcast_routing.finish(entry[1])
                break
        if not sent:
            self._tailcast_sent.pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Called by Serve when the actor of a replica has died."""
        super().on_replica_actor_died(replica_id)
        self._tailcast_gone({replica_id.unique_id})

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with the current replicas."""
        before = {replica_id.unique_id for replica_id in self._replica_id_set}
        super().update_replicas(replicas)
        self._tailcast_gone(before - {replica.replica_id.unique_id for replica in replicas})

    def _tailcast_gone(self, replica_ids: set[str]) -> None:
        for replica_id in replica_ids:
            self._tailcast_routing.gone(replica_id)

    def _tailcast_others(self, candidates: dict[str, RunningReplica]) -> dict[str, int]:
        """By replica: number of queued requests from other routers, for known queue lengths."""
        own = self._tailcast_routing.num_requests
        others = {}
        for name, replica in candidates.items():
            length = self.replica_queue_len_cache.get(replica.replica_id)
            if length is not None and length > own.get(name, 0):
                others[name] = length - own.get(name, 0)
        return others


def request_prompt(pending_request: PendingRequest) -> RoutedPrompt:
    """The prompt in the arguments of a call: the body of a request as an object or mapping, or a plain string.

    The arguments of a raw HTTP request do not include its body, so it has no text and no prediction.
    """
    arguments = (*pending_request.args, *pending_request.kwargs.values())
    for argument in arguments:
        if any(member(argument, name) is not None for name in ("messages", "prompt", "input")):
            return routed_prompt(argument, member(argument, "vllm_xargs"))
    text = next((argument for argument in arguments if isinstance(argument, str)), "")
    return RoutedPrompt(ApiRequest(texts=(text,) if text else ()))


@cache
def router_class() -> type:
    """The class `TailcastRequestRouter`, derived from Ray Serve's. `MissingExtraError` if Ray Serve is not
    installed; `InputError` if the version of Ray is untested."""
    try:
        import ray
        from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter
    except ImportError as error:
        raise MissingExtraError("ray[serve]", "ray") from error
    check_version("Ray", str(ray.__version__), SUPPORTED)
    bases = (LiveRequestRouter, LocalityMixin, MultiplexMixin, RequestRouter)
    return type("TailcastRequestRouter", bases, {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "TailcastRequestRouter":
        return router_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
