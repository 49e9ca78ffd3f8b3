"""Web page of a running server: predicted and true lengths, coverage, nearest past requests, and order.

The page is one HTML file without external resources. Its data are JSON, computed only when the page asks for them, at most
every `REFRESH_S` seconds. It has no texts of prompts.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from typing import Any

from aiohttp import web

from predictors.hosting.http import read_body
from scheduler_core.adapters.live_calibration import LiveCalibration
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.lengths import LogQuantiles
from scheduler_core.prediction.correction import MAX_NAME_CHARS, Correction, RequestContext
from scheduler_core.prediction.linear_correction import student_t_quantiles
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.shell.json_text import parse_json

#: Ended requests on the page, and requests in its table of the order.
MAX_ENDED, MAX_LISTED = 1000, 50
#: Minimum seconds between two computations of the same data, and served models whose data are kept.
REFRESH_S, MAX_KEPT = 1.0, 8
LEVELS = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
#: Versions of a prediction -> their names in `Correction.metrics`.
VERSIONS = {"raw": "before", "calibrated": "calibrated", "remembered": "after"}
_FIELDS = ("prompt", "system", "model", "tenant")


@dataclass(slots=True)
class EndedRequest:
    """A request with a known output length, and its prediction as it was used; `waited_s` is None if unknown."""

    request_id: str
    served_model: str
    prediction: LengthPrediction
    output_tokens: int
    is_finished: bool
    waited_s: float | None = None
    #: Computed when the page first shows the request.
    _quantiles: dict[str, float] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls, served_model: str, prediction: LengthPrediction | None, outcome: Outcome
    ) -> EndedRequest | None:
        """The request of an outcome; None if it was not predicted, or its length is not the model's."""
        if prediction is None or not outcome.has_length:
            return None
        request_id, finished = outcome.request_id or "", outcome.is_finished
        return cls(request_id, served_model, prediction, outcome.output_tokens, finished, outcome.waited_s)

    @property
    def quantiles(self) -> dict[str, float]:
        """Predicted quantiles at `LEVELS` in tokens."""
        if self._quantiles is None:
            self._quantiles = token_quantiles(self.prediction)
        return self._quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRequest:
    """A request in the table of the order. `position` counts from 1, None if the order no longer concerns it; `state` is for
    the reader; times in seconds, None if they have not begun."""

    position: int | None
    request_id: str
    state: str
    prediction: LengthPrediction | None
    waited_s: float
    running_s: float | None
    output_tokens: int
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCounts:
    """Sessions of agents and what the engine's prefix cache has of them.

    Attributes:
        num_known, num_running, num_held: All; with a request in the engine; with one that waits.
        num_active: Those in the working set; None if the policy has none.
        hit_rate: Fraction of the tokens of prompts that was cached; None before the first one.
        resident_tokens, kv_tokens: Tokens in the KV cache, and its size, 0 if it is unknown.
    """

    num_known: int
    num_active: int | None
    num_running: int
    num_held: int
    hit_rate: float | None
    resident_tokens: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTable:
    """Live requests, the first `MAX_LISTED` of them in their order, the policy's name, and sessions if it uses them."""

    policy: str
    num_waiting: int
    num_running: int
    requests: Sequence[ListedRequest]
    sessions: SessionCounts | None = None


@dataclass(frozen=True, slots=True)
class PromptQuery:
    """What was typed in: prompt, system prompt (empty: none), served model and tenant."""

    prompt: str
    system: str
    model: str
    tenant: str


#: The uncorrected predicted length of a prompt and what the correction uses of it; TailcastError if there is none.
Predict = Callable[[PromptQuery], Awaitable[tuple[LengthPrediction, RequestContext]]]


@dataclass(kw_only=True)
class LivePage:
    """The page of one server.

    Attributes:
        title: Name of the server.
        ended: Its latest ended requests, the newest last.
        calibration: Its online calibration; None if there is none.
        predict: See `Predict`.
        order: Its live requests; None if it has no order.
        hint: What to do to see requests here, one sentence.
        shows_tenants: Whether the reader may see and name tenants.
        hides_ids: Whether ids of requests are left out, because they may be those of several tenants.
    """

    title: str
    ended: deque[EndedRequest]
    calibration: Callable[[], LiveCalibration | None]
    predict: Predict
    order: Callable[[], OrderTable | None]
    hint: str
    shows_tenants: bool
    hides_ids: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    #: Served model -> when its data were computed, and the data.
    _kept: dict[str, tuple[float, bytes]] = field(default_factory=dict, init=False)
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def routes(self) -> web.RouteTableDef:
        """The page at /, its data at /ui/state.json, and POST /ui/explain for the prediction of a prompt."""
        routes = web.RouteTableDef()
        html, headers = _page()

        @routes.get("/")
        async def page(request: web.Request) -> web.Response:
            return web.Response(text=html, content_type="text/html", headers=headers)

        @routes.get("/ui/state.json")
        async def state(request: web.Request) -> web.Response:
            data = await self._state(request.query.get("model"))
            return web.Response(body=data, content_type="application/json", headers=_HEADERS)

        @routes.post("/ui/explain")
        async def explain(request: web.Request) -> web.Response:
            if request.content_type != "application/json":  # which pages of other sites cannot send
                raise web.HTTPUnsupportedMediaType(text="Content-Type must be application/json\n")
            status = 200
            try:
                content = await self._explanation(_query(await read_body(request), self.shows_tenants))
            except InputError as error:
                content, status = {"error": str(error)}, 400
            except TailcastError as error:
                content, status = {"error": str(error)}, 503
            return web.Response(
                body=_dump(content), status=status, content_type="application/json", headers=_HEADERS
            )

        return routes

    async def _state(self, served_model: str | None) -> bytes:
        """The data of the page for a served model; None: that of the latest request."""
        if served_model is None:
            served_model = self.ended[-1].served_model if self.ended else ""
        served_model = served_model[:MAX_NAME_CHARS]
        async with self._computing:
            now = self.clock()
            computed_s, data = self._kept.pop(served_model, (-math.inf, b""))
            if now - computed_s >= REFRESH_S:
                calibration, order, ended = self.calibration(), self.order(), tuple(self.ended)
                data = await asyncio.to_thread(self._computed, served_model, ended, calibration, order)
                computed_s = now
            self._kept[served_model] = computed_s, data
            if len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            return data

    def _computed(
        self,
        served_model: str,
        ended: Sequence[EndedRequest],
        calibration: LiveCalibration | None,
        order: OrderTable | None,
    ) -> bytes:
        learned = (
            None if calibration is None else calibration.read(lambda each: learned_json(each, served_model))
        )
        models = {request.served_model: None for request in reversed(ended)}
        models |= dict.fromkeys(() if learned is None else learned["models"])
        own = [request for request in ended if request.served_model == served_model]
        content = {
            "title": self.title,
            "hint": self.hint,
            "shows_tenants": self.shows_tenants,
            "models": list(models),
            "model": served_model,
            "learned": learned,
            "ended": ended_json(own, with_ids=not self.hides_ids()),
            "order": None if order is None else order_json(order, with_tenants=self.shows_tenants),
        }
        return _dump(content)

    async def _explanation(self, query: PromptQuery) -> dict[str, Any]:
        prediction, context = await self.predict(query)
        calibration = self.calibration()
        if calibration is None:
            return explained(Correction(), context, prediction)
        content = await asyncio.to_thread(calibration.read, lambda each: explained(each, context, prediction))
        if content is None:
            raise TailcastError("the server is stopping")
        if self.hides_ids():
            content["neighbors"] = [neighbor | {"request_id": ""} for neighbor in content["neighbors"]]
        return content


def token_quantiles(prediction: LengthPrediction) -> dict[str, float]:
    """Predicted quantiles at `LEVELS` in tokens, at least 1."""
    levels = tuple(LEVELS.values())
    if prediction.quantiles:
        values = LogQuantiles(prediction.quantiles).logppf(levels).tolist()
    else:
        standard = student_t_quantiles(prediction.nu, levels)
        values = [prediction.mu + prediction.sigma * value for value in standard]
    return {name: math.exp(min(max(value, 0.0), 50.0)) for name, value in zip(LEVELS, values, strict=True)}


def ended_json(ended: Sequence[EndedRequest], *, with_ids: bool) -> dict[str, Any]:
    """Ended requests by column, the oldest first: predicted quantiles and true lengths in tokens, whether the output is
    complete, seconds of waiting, ids (or empty texts)."""
    quantiles = [request.quantiles for request in ended]
    return {
        "p50": [round(each["p50"], 1) for each in quantiles],
        "p90": [round(each["p90"], 1) for each in quantiles],
        "output_tokens": [request.output_tokens for request in ended],
        "is_finished": [request.is_finished for request in ended],
        "waited_s": [None if request.waited_s is None else round(request.waited_s, 3) for request in ended],
        "request_id": [request.request_id if with_ids else "" for request in ended],
    }


def learned_json(correction: Correction, served_model: str) -> dict[str, Any]:
    """What was learned: memories, served models, and the metrics of one of them (None before its first output) with tau, CRPS
    and coverage of each version in `VERSIONS`."""
    content: dict[str, Any] = {
        "models": [*reversed(correction.served_models)],
        "num_remembered": correction.num_remembered,
        "num_scopes": correction.num_scopes,
        "metrics": None,
    }
    if served_model in correction.served_models:
        metrics = correction.metrics(served_model)
        versions = {version: metrics.pop(name) for version, name in VERSIONS.items()}
        content["metrics"] = metrics | {"versions": versions}
    return content


def order_json(order: OrderTable, *, with_tenants: bool) -> dict[str, Any]:
    """The table of the order, with predicted quantiles in tokens."""
    rows = []
    for request in order.requests:
        quantiles = None if request.prediction is None else token_quantiles(request.prediction)
        row = {
            name: value
            for name, value in asdict(replace(request, prediction=None)).items()
            if name != "prediction"
        }
        if not with_tenants:
            del row["tenant"]
        rows.append(row | {"p50": quantiles and quantiles["p50"], "p90": quantiles and quantiles["p90"]})
    return {
        "policy": order.policy,
        "num_waiting": order.num_waiting,
        "num_running": order.num_running,
        "sessions": None if order.sessions is None else asdict(order.sessions),
        "requests": rows,
    }


def explained(
    correction: Correction, context: RequestContext, prediction: LengthPrediction
) -> dict[str, Any]:
    """Quantiles of each version of a prediction in tokens, which one is used, the weight of the memory, the tenant whose
    memory it is (empty: the shared one), and the nearest past requests."""
    calibrated = correction.correct(replace(context, embedding=None), prediction)
    used = correction.correct(context, prediction)
    version = "raw" if calibrated == prediction else "calibrated"
    version = version if used == calibrated else "remembered"
    tenant, weight = correction.scope(context), 0.0
    if context.served_model in correction.served_models:
        weight = correction.metrics(context.served_model, tenant)["memory_weight"]
    return {
        "versions": {
            "raw": token_quantiles(prediction),
            "calibrated": token_quantiles(calibrated),
            "remembered": token_quantiles(used),
        },
        "used": version,
        "memory_weight": weight,
        "tenant": tenant,
        "model": context.served_model,
        "prompt_tokens": context.prompt_tokens,
        "has_embedding": context.embedding is not None,
        "neighbors": [asdict(neighbor) for neighbor in correction.neighbors(context)],
    }


def _query(body: bytes, with_tenants: bool) -> PromptQuery:
    """The query in a JSON object; InputError if it is none."""
    try:
        content = parse_json(body.decode("utf-8"), unique_keys=True, lone_surrogates="refuse")
    except ValueError as error:
        raise InputError(f"the body is not valid JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise InputError("the body is not a JSON object")
    values = {name: content.get(name, "") for name in _FIELDS}
    for name, value in values.items():
        if not isinstance(value, str):
            raise InputError(name, type(value).__name__, "a text")
        if name in ("model", "tenant") and len(value) > MAX_NAME_CHARS:
            raise InputError(name, f"{len(value)} characters", f"at most {MAX_NAME_CHARS}")
    if not values["prompt"].strip():
        raise InputError("prompt", "no text", "a text that is not empty")
    return PromptQuery(**values) if with_tenants else PromptQuery(**values | {"tenant": ""})


def _dump(content: Any) -> bytes:
    """JSON with null for numbers that are not finite."""
    return json.dumps(_finite(content), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _page() -> tuple[str, dict[str, str]]:
    """The page and its headers, which allow nothing but its own style and script, and requests to its server."""
    html = files(__package__).joinpath("live_page.html").read_text(encoding="utf-8")
    policy = ["default-src 'none'", "connect-src 'self'", "img-src data:"]
    policy += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    for tag in ("style", "script"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        policy.append(f"{tag}-src 'sha256-{digest}'")
    return html, _HEADERS | {"Content-Security-Policy": "; ".join(policy)}
