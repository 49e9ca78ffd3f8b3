"""Small builders shared by the tests of routing."""

from typing import Any

import numpy as np

from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.request import Request
from scheduler_core.routing import ROUTERS, make_router
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot, RequestView


def item(
    name: str = "new", tier: int = 2, arrival_s: float = 0.0, prompt: int = 16, cap: int = 64, session: str = "",
    **more: Any,
) -> RoutingRequest:  # fmt: skip
    request = Request(
        request_id=name, arrival_s=arrival_s, prompt_tokens=prompt, max_tokens=cap, tier=tier, session=session
    )
    return RoutingRequest(request=request, **more)


def running(
    name: str, blocks: int, tier: int = 2, done: int = 1, arrival_s: float = 0.0, cap: int = 64
) -> RequestView:
    """A request that generates and holds so many blocks of 16 tokens."""
    return RequestView(
        request_id=name, arrival_s=arrival_s, tier=tier, prompt_tokens=blocks * 16, max_tokens=cap,
        num_computed_tokens=blocks * 16, num_output_tokens=done, kv_blocks=blocks, demand_blocks=blocks,
        running=True, decoding=True,
    )  # fmt: skip


def waiting(name: str, blocks: int, tier: int = 2, arrival_s: float = 0.0, cap: int = 64) -> RequestView:
    """A request that waits for so many blocks of 16 tokens."""
    return RequestView(
        request_id=name, arrival_s=arrival_s, tier=tier, prompt_tokens=blocks * 16, max_tokens=cap,
        demand_blocks=blocks,
    )  # fmt: skip


def predicted(view: RequestView, mu: float, sigma: float = 0.5, nu: float = 3.5) -> RequestView:
    return view._replace(prediction=LengthPrediction(mu, sigma, nu))


def replica(name: str, *views: RequestView, blocks: int = 100, **more: Any) -> ReplicaSnapshot:
    """A replica that holds these requests; the most urgent waiting one, then the earliest, is served next."""
    running = [view for view in views if view.running]
    waiting = [view for view in views if not view.running]
    used = sum(view.kv_blocks for view in running)
    head = min(waiting, key=lambda view: (view.tier, view.arrival_s, view.request_id), default=None)
    return ReplicaSnapshot(
        replica_id=name, num_kv_blocks=blocks, num_free_blocks=blocks - used, num_running=len(running),
        num_waiting=len(waiting), used_blocks=used,
        head_demand_blocks=0 if head is None else head.demand_blocks,
        waiting_prefill_tokens=sum(view.prefill_left_tokens for view in waiting),
        tiers=tuple(sorted({view.tier for view in views})), requests=(*running, *waiting), **more,
    )  # fmt: skip


def router(name: str, seed: int = 0) -> Router:
    rng = np.random.default_rng(seed) if ROUTERS[name].needs_generator else None
    return make_router(name, rng=rng)
