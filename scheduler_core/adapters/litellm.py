"""Routing strategy for LiteLLM's Router: `TailcastStrategy(router, RoutingSettings(predictor="pretrained")).install()`;
in LiteLLM's proxy the callback `scheduler_core.adapters.litellm.proxy_handler`.

LiteLLM selects the eligible deployments of a request by health, cooldown, team, tags and order, and handles
retries and fallbacks. The strategy chooses one of these deployments. It gets its events from LiteLLM's
callbacks: last chunk of a stream, success, failure.

Both classes are created at their first access, so that this module can be imported without LiteLLM. User guide:
docs/routing.md.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from scheduler_core.adapters.live_routing import LiveRouting, RoutingSettings, routed_prompt
from scheduler_core.adapters.settings import check_version, read_yaml
from scheduler_core.errors import MissingExtraError, TailcastError

if TYPE_CHECKING:
    from litellm import Router
    from litellm.integrations.custom_logger import CustomLogger as _Base
else:
    _Base = object

#: Minor versions of LiteLLM that this module supports; tested with 1.109.1.
SUPPORTED = ("1.109",)
#: Environment variable that names the YAML file of the proxy's settings.
VARIABLE = "TAILCAST_ROUTING_CONFIG"
#: Metadata key for the id of the attempt.
KEY = "tailcast_attempt"
#: Metadata key for ids and deployments of all attempts so far.
TRIED = "tailcast_tried"
#: Fields of LiteLLM's metadata. Newer endpoints use the first; their `metadata` are those of the client.
METADATA_FIELDS = ("litellm_metadata", "metadata")


class Attempt(str):
    """Id of one attempt at a request, stored in its metadata. Its finalizer ends attempts without an end event.

    Copies of the metadata share the same object.
    """

    def __copy__(self) -> Attempt:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Attempt:
        return self


class TriedDeployment(NamedTuple):
    """An attempt at a request and its deployment. A type of its own: clients can put JSON values into metadata."""

    attempt: str
    replica_id: str


class LiveStrategy(_Base):  # type: ignore[misc]
    """Mixin for LiteLLM's CustomLogger and CustomRoutingStrategyBase: chooses with `LiveRouting`.
    `InputError` if the predictor does not exist.

    It only tracks the requests of this process; with several workers, each worker tracks its own requests.
    """

    def __init__(self, router: Router, settings: RoutingSettings) -> None:
        super().__init__()
        self.router = router
        self.routing = LiveRouting(settings)
        #: LiteLLM treats two callbacks of one class as equal unless a public string attribute differs.
        self.name = uuid.uuid4().hex
        self._num_attempts = 0

    def install(self) -> None:
        """Registers the strategy with the router and the event callbacks of LiteLLM."""
        import litellm

        self.router.register_plugin(self)
        litellm.logging_callback_manager.add_litellm_callback(self)

    def close(self) -> None:
        """Stops events and predictions. The router keeps the strategy, which then only counts requests."""
        import litellm

        litellm.logging_callback_manager.remove_callback_from_all_lists(self)
        self.routing.close()

    async def async_get_available_deployment(
        self,
        model: str,
        messages: list[Any] | None = None,
        input: Any = None,
        specific_deployment: bool | None = False,
        request_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Chooses the deployment for a request; raises LiteLLM's error if none is eligible."""
        options = {} if request_kwargs is None else request_kwargs
        eligible = await self.router.select(
            model,
            options,
            kind="healthy",
            messages=messages,
            input=input,
            specific_deployment=specific_deployment,
        )
        choices = [eligible] if isinstance(eligible, dict) else eligible
        deployments = {choice["model_info"]["id"]: choice for choice in choices}
        registry = self.router.registry()
        for replica_id in self.routing.replica_ids:
            if replica_id not in deployments and not registry.has_deployment(replica_id):
                self.routing.gone(replica_id)
        field = next((field for field in METADATA_FIELDS if field in options), METADATA_FIELDS[-1])
        metadata = options.get(field)
        if not isinstance(metadata, dict):
            metadata = {}
        tried = _tried(metadata) if metadata.get("attempted_retries") else []
        for name, _ in tried:
            self.routing.abort(name)  # the proxy only reports the last failure
        prompt = routed_prompt({"messages": messages, "input": input, **options}, metadata)
        self._num_attempts += 1
        name = f"{self.name}-{self._num_attempts}"
        attempt = Attempt(name)
        weakref.finalize(attempt, self.routing.drop, name).atexit = False
        # Avoid deployments that failed: one that fails at once always has the least load.
        failed = {replica_id for _, replica_id in tried}
        others = [replica_id for replica_id in deployments if replica_id not in failed]
        replica_id = self.routing.send(name, prompt, others or deployments)
        # All attempts of a request share this mapping.
        metadata[TRIED] = (*tried, TriedDeployment(name, replica_id))
        options[field] = {**metadata, KEY: attempt}  # identifies the attempt in its events
        return deployments[replica_id]

    def get_available_deployment(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: LiteLLM provides the healthy deployments only to asynchronous strategies."""
        raise TailcastError(
            "the routing strategy only supports the asynchronous methods of LiteLLM's Router: call acompletion"
        )

    async def async_post_call_streaming_deployment_hook(
        self, request_data: dict[str, Any], response_chunk: Any, call_type: Any
    ) -> None:
        """Called by LiteLLM for the last chunk of a stream, long before `async_log_success_event`."""
        choices = getattr(response_chunk, "choices", None)
        if choices and getattr(choices[0], "finish_reason", None) is not None:
            self.routing.finish(_attempt(request_data))

    async def async_log_success_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:  # fmt: skip
        """Called by LiteLLM after a request has received its whole output."""
        self.routing.finish(_attempt(kwargs))

    async def async_log_failure_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:  # fmt: skip
        """Called by LiteLLM for each attempt that failed."""
        self.routing.abort(_attempt(kwargs))


def _tried(metadata: Mapping[str, Any]) -> list[TriedDeployment]:
    """Earlier attempts at a request, without what its client wrote there."""
    entries = metadata.get(TRIED)
    if not isinstance(entries, tuple):
        return []
    return [entry for entry in entries if isinstance(entry, TriedDeployment)]


def _attempt(call: Mapping[str, Any]) -> str:
    """Id of the attempt of an event; empty if the event belongs to another router, or its id is from a client."""
    options = call.get("litellm_params") or {}
    fields = (options.get(name) for name in METADATA_FIELDS)
    attempts = (field.get(KEY) for field in fields if isinstance(field, dict))
    return next((str(attempt) for attempt in attempts if isinstance(attempt, Attempt)), "")


class ProxyHandler(_Base):  # type: ignore[misc]
    """Callback of LiteLLM's proxy that installs the strategy in the router, and again after the proxy created a
    new one. `InputError` if the file named by TAILCAST_ROUTING_CONFIG cannot be read, or a setting is invalid."""

    def __init__(self) -> None:
        super().__init__()
        file = os.environ.get(VARIABLE)
        self._settings = RoutingSettings.of({} if file is None else read_yaml(file, VARIABLE), VARIABLE)
        self.strategy: LiveStrategy | None = None

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: Any
    ) -> None:
        """Called by the proxy before a request is routed."""
        from litellm.proxy import proxy_server

        router = proxy_server.llm_router
        if router is None or (self.strategy is not None and self.strategy.router is router):
            return
        if self.strategy is not None:
            self.strategy.close()
        self.strategy = _derived_class("TailcastStrategy")(router, self._settings)
        self.strategy.install()


@cache
def _derived_class(name: str) -> Any:
    """The class of that name, derived from LiteLLM's classes. `MissingExtraError` if LiteLLM is not
    installed; `InputError` if its version is untested."""
    try:
        version = metadata.version("litellm")
    except metadata.PackageNotFoundError as error:
        raise MissingExtraError("litellm", "litellm") from error
    check_version("LiteLLM", version, SUPPORTED)
    from litellm.integrations.custom_logger import CustomLogger
    from litellm.types.router import CustomRoutingStrategyBase

    bases = {
        "TailcastStrategy": (LiveStrategy, CustomLogger, CustomRoutingStrategyBase),
        "TailcastProxyHandler": (ProxyHandler, CustomLogger),
    }
    # The proxy only calls hooks that are defined in the class itself, not inherited ones.
    hooks = {hook: value for hook, value in vars(bases[name][0]).items() if hook.startswith("async_")}
    return type(name, bases[name], {"__module__": __name__, **hooks})


def __getattr__(name: str) -> Any:
    if name == "TailcastStrategy":
        return _derived_class(name)
    if name == "proxy_handler":
        handler = globals()[name] = _derived_class("TailcastProxyHandler")()
        return handler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
