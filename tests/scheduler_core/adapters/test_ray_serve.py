"""The request router in a real Ray Serve: what it distributes, what it forgets, and one of two replicas killed."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler_core.adapters.live_routing import RoutedPrompt
from scheduler_core.adapters.ray_serve import DIRECT_STREAMING, request_prompt
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import ApiRequest
from scheduler_core.shell.ray_cluster import LOCAL, ray_cluster
from tests.properties import RAY_WARNINGS
from tests.waiting import eventually, taken

serve = pytest.importorskip("ray.serve", exc_type=ImportError)
pytest.importorskip("starlette")
pytestmark = RAY_WARNINGS

ROUTER = "scheduler_core.adapters.ray_serve.TailcastRequestRouter"


class Engine:
    """Takes 2 ms for each token."""

    async def __call__(self, body: dict[str, Any]) -> int:
        await taken(0.002 * body["max_tokens"])
        return os.getpid()


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    from ray.serve.config import RequestRouterConfig

    with ray_cluster(LOCAL, "ray", num_cpus=2):
        config = RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs={"max_num_seqs": 4})
        deployment = serve.deployment(Engine).options(
            num_replicas=2, max_ongoing_requests=4, ray_actor_options={"num_cpus": 0.1},
            request_router_config=config,
        )  # fmt: skip
        yield serve.run(deployment.bind(), name="engines", route_prefix=None)
        serve.shutdown()


def live(handle: Any) -> dict[str, int]:
    """Live requests of the router of this process, once they do not change by themselves any more."""
    router = handle._router._asyncio_router.request_router
    eventually(lambda: not (router._tailcast_routing.num_requests or router._tailcast_sent), 20)
    assert not router._tailcast_sent
    return dict(router._tailcast_routing.num_requests)


@pytest.mark.slow
def test_requests_are_distributed_and_forgotten(handle: Any) -> None:
    """Also those that a full replica rejects: eight slots, forty requests."""
    responses = [handle.remote({"prompt": "hello", "max_tokens": 20}) for _ in range(40)]
    counts = Counter(response.result() for response in responses)
    assert len(counts) == 2
    assert min(counts.values()) >= 10
    assert live(handle) == {}


@pytest.mark.slow
def test_cancelled_requests_are_forgotten(handle: Any) -> None:
    responses = [handle.remote({"prompt": "hello", "max_tokens": 5000}) for _ in range(12)]
    routing = handle._router._asyncio_router.request_router._tailcast_routing
    assert eventually(lambda: sum(routing.num_requests.values()) >= 8, 20)
    for response in responses:
        response.cancel()
    assert live(handle) == {}


@pytest.mark.slow
def test_a_killed_replica_is_left_out_and_forgotten(handle: Any) -> None:
    """Its own requests fail, as Serve reports them; all that come later are served by the other one."""
    victim = handle.remote({"prompt": "hello", "max_tokens": 1}).result()
    before = [handle.remote({"prompt": "hello", "max_tokens": 500}) for _ in range(8)]
    routing = handle._router._asyncio_router.request_router._tailcast_routing
    assert eventually(lambda: sum(routing.num_requests.values()) == 8, 20)
    os.kill(victim, signal.SIGKILL)
    after = [handle.remote({"prompt": "hello", "max_tokens": 10}) for _ in range(20)]
    failed = 0
    for response in before:
        try:
            assert response.result(timeout_s=60) != victim
        except Exception:  # of Ray: ActorDiedError and others
            failed += 1
    assert failed <= 4
    assert all(response.result(timeout_s=60) != victim for response in after)
    assert live(handle) == {}
    assert len(handle._router._asyncio_router.request_router._tailcast_routing.replica_ids) <= 2


def test_the_router_is_a_class_that_serve_accepts() -> None:
    """As a name, which is what a Serve LLM `deployment_config` has, too."""
    from ray.serve.config import RequestRouterConfig
    from ray.serve.request_router import RequestRouter

    options = {"predictor": "pretrained"}
    config = RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs=options)
    assert issubclass(config.get_request_router_class(), RequestRouter)


def test_it_is_refused_where_serve_reports_no_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from scheduler_core.adapters.ray_serve import router_class

    monkeypatch.setenv(DIRECT_STREAMING, "1")
    router = router_class()
    with pytest.raises(InputError, match=DIRECT_STREAMING):
        router.initialize_state(object.__new__(router))


def test_prompts_are_found_among_the_arguments() -> None:
    from ray.serve.request_router import PendingRequest

    async def prompt(*arguments: Any) -> RoutedPrompt:
        return request_prompt(PendingRequest(args=[*arguments], kwargs={}, metadata=None))

    body = {"prompt": "Once", "max_tokens": 5, "vllm_xargs": {"tailcast_tier": 1}}
    assert asyncio.run(prompt(body)) == RoutedPrompt(ApiRequest(texts=("Once",), max_tokens=5), tier=1)
    assert asyncio.run(prompt(7, "Once")) == RoutedPrompt(ApiRequest(texts=("Once",)))
    assert asyncio.run(prompt(7)) == RoutedPrompt()
