"""A routing strategy of LiteLLM's Router: `TailcastStrategy(router, RoutingSettings(predictor="pretrained")).install()`; in LiteLLM's
proxy the callback `scheduler_core.adapters.litellm.proxy_handler`.

LiteLLM chooses the deployments that a request may go to, by health, cooldown, team, tags and order, and retries and falls
back as ever; the strategy chooses among them. Its events are LiteLLM's callbacks: the last piece of a stream, success,
failure.

Both classes are made when they are imported: this module imports without LiteLLM, as all of scheduler_core does. For users:
docs/routing.md.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from scheduler_core.adapters.live_routing import LiveRouting, RoutingSettings, openai_prompt
from scheduler_core.adapters.settings import check_version, read_yaml
from scheduler_core.errors import MissingExtraError, TailcastError

if TYPE_CHECKING:
    from litellm import Router
    from litellm.integrations.custom_logger import CustomLogger as _Base
else:
    _Base = object

#: Minor versions whose strategy and callbacks this module fits; tested with 1.109.1.
SUPPORTED = ("1.109",)
#: Environment variable that names the YAML file of the proxy's settings.
VARIABLE = "TAILCAST_ROUTING_CONFIG"
#: Member of a request's metadata that holds the id of the attempt.
KEY = "tailcast_attempt"
#: Member that holds ids and deployments of all attempts so far.
TRIED = "tailcast_tried"
#: Where a request has LiteLLM's metadata: of newer endpoints in the first; their `metadata` are the client's, for the engine.
METADATA_FIELDS = ("litellm_metadata", "metadata")


class Attempt(str):
    """Id of one attempt at a request, in its metadata; collected with it, also where no event reports its end.

    Copies of the metadata have the same object.
    """

    def __copy__(self) -> Attempt:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Attempt:
        return self


class LiveStrategy(_Base):  # type: ignore[misc]
    """Mixin for LiteLLM's CustomLogger and CustomRoutingStrategyBase: chooses with `LiveRouting`. `InputError` if there is no
    such predictor.

    It has the requests of this process: with several workers each sees its own.
    """

    def __init__(self, router: Router, settings: RoutingSettings) -> None:
        super().__init__()
        self.router = router
        self.routing = LiveRouting(settings)
        #: LiteLLM takes two callbacks of one class for the same unless a public text differs.
        self.name = uuid.uuid4().hex
        self._num_attempts = 0

    def install(self) -> None:
        """Registers the strategy with the router and for LiteLLM's events."""
        import litellm

        self.router.register_plugin(self)
        litellm.logging_callback_manager.add_litellm_callback(self)

    def close(self) -> None:
        """Ends events and predictions; the router goes on with this strategy, by number of requests at best."""
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
        """The deployment that a request goes to; what LiteLLM raises where none may be chosen."""
        options = {} if request_kwargs is None else request_kwargs
        offered = await self.router.select(
            model,
            options,
            kind="healthy",
            messages=messages,
            input=input,
            specific_deployment=specific_deployment,
        )
        deployments = {
            one["model_info"]["id"]: one for one in ([offered] if isinstance(offered, dict) else offered)
        }
        registry = self.router.registry()
        for replica_id in self.routing.replica_ids:
            if replica_id not in deployments and not registry.has_deployment(replica_id):
                self.routing.gone(replica_id)
        field = next((field for field in METADATA_FIELDS if field in options), METADATA_FIELDS[-1])
        metadata = options.get(field) or {}
        tried = metadata.get(TRIED, ()) if metadata.get("attempted_retries") else ()
        for name, _ in tried:
            self.routing.abort(name)  # the proxy reports the last failure only
        prompt = openai_prompt({"messages": messages, "prompt": input, **options}, metadata)
        self._num_attempts += 1
        name = f"attempt-{self._num_attempts}"
        attempt = Attempt(name)
        weakref.finalize(attempt, self.routing.drop, name).atexit = False
        # A deployment that fails at once is always the least busy one.
        failed = {replica_id for _, replica_id in tried}
        others = [replica_id for replica_id in deployments if replica_id not in failed]
        replica_id = self.routing.send(name, prompt, others or deployments)
        metadata[TRIED] = (*tried, (name, replica_id))  # all attempts of a request share this mapping
        options[field] = {**metadata, KEY: attempt}  # events have the one of their attempt
        return deployments[replica_id]

    def get_available_deployment(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: LiteLLM offers the healthy deployments to asynchronous strategies only."""
        raise TailcastError(
            "the routing strategy serves the asynchronous methods of LiteLLM's Router: call acompletion"
        )

    async def async_post_call_streaming_deployment_hook(
        self, request_data: dict[str, Any], response_chunk: Any, call_type: Any
    ) -> None:
        """Called by LiteLLM for the last piece of a stream, long before `async_log_success_event`."""
        choices = getattr(response_chunk, "choices", None)
        if choices and getattr(choices[0], "finish_reason", None) is not None:
            self.routing.finish(_attempt(request_data))

    async def async_log_success_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:  # fmt: skip
        """Called by LiteLLM once a request has its whole output."""
        self.routing.finish(_attempt(kwargs))

    async def async_log_failure_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:  # fmt: skip
        """Called by LiteLLM for each attempt that failed."""
        self.routing.abort(_attempt(kwargs))


def _attempt(call: Mapping[str, Any]) -> str:
    """Id of the attempt that an event is about; empty where it is another router's."""
    options = call.get("litellm_params") or {}
    return next((str(options[name][KEY]) for name in METADATA_FIELDS if KEY in (options.get(name) or {})), "")


class ProxyHandler(_Base):  # type: ignore[misc]
    """Callback of LiteLLM's proxy that installs the strategy in its router, again where the proxy has made a new one.
    `InputError` if the file that TAILCAST_ROUTING_CONFIG names is not readable, or a setting is not allowed."""

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
        self.strategy = _made("TailcastStrategy")(router, self._settings)
        self.strategy.install()


@cache
def _made(name: str) -> Any:
    """The class of that name, derived from LiteLLM's. `MissingExtraError` if there is no LiteLLM; `InputError` if the installed
    LiteLLM is of an untested version."""
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
    # The proxy calls hooks that the class itself has, not inherited ones.
    hooks = {hook: value for hook, value in vars(bases[name][0]).items() if hook.startswith("async_")}
    return type(name, bases[name], {"__module__": __name__, **hooks})


def __getattr__(name: str) -> Any:
    if name == "TailcastStrategy":
        return _made(name)
    if name == "proxy_handler":
        handler = globals()[name] = _made("TailcastProxyHandler")()
        return handler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
