"""Quota of tokens per minute in LiteLLM's proxy, reserved by predicted lengths: the callback
`scheduler_core.adapters.litellm.callback`.

LiteLLM's limiter reserves the input of a request and an estimate of its output before the request runs, and settles the
difference to the actual usage when it ends. The estimate is max_tokens; without it, `default_estimated_output_tokens` in
the metadata of the key or its team, else max(input, 1024). Callbacks of the configuration run before the limiter. This one
puts the predicted mean into the metadata of the key, of which every request has a copy of its own. The request itself stays
unchanged, and one with max_tokens keeps LiteLLM's reservation.

The predictions are corrected with the lengths of ended requests, per team or key. User guide: docs/routing.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from scheduler_core.adapters.settings import PredictorSettings, check_version, read_yaml
from scheduler_core.errors import InputError, MissingExtraError, TailcastError
from scheduler_core.prediction.api_request import ApiRequest, read_request
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.outcome import Outcome, is_finished
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.prediction.predictor import PredictionRequest, Predictor, open_predictor
from scheduler_core.prediction.prompt_text import prompt_key
from scheduler_core.ranges import INTEGERS, check_ranges

if TYPE_CHECKING:
    from litellm.integrations.custom_logger import CustomLogger as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)
#: Minor versions of LiteLLM that this module supports; tested with 1.109.1.
SUPPORTED = ("1.109",)
#: Environment variable that names the YAML file of the settings.
VARIABLE = "TAILCAST_QUOTA_CONFIG"
#: Metadata of a key that LiteLLM's limiter reads first: output tokens by model.
ESTIMATES = "default_estimated_output_tokens_per_model"
#: Maximum number of requests that have not ended; the oldest ones are then not learned.
MAX_PENDING = 10_000
#: Seconds between two log lines about a predictor that fails.
REMINDER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSettings(PredictorSettings):
    """Settings of the callback. `InputError` if a value is invalid.

    Attributes:
        predictor: As in `PredictorSettings`, not None.
        timeout_s: Maximum delay of a request by its prediction in seconds; LiteLLM's estimate is then used.
        default_max_tokens: Maximum output of the served models, for the mean.
    """

    predictor: str = "pretrained"
    timeout_s: float = 0.1
    default_max_tokens: int = 4096

    def __post_init__(self) -> None:
        PredictorSettings.__post_init__(self)
        check_ranges(self, default_max_tokens=(1, INTEGERS))


class QuotaCallback(_Base):  # type: ignore[misc]
    """Mixin for LiteLLM's CustomLogger. Failures of the predictor never fail a request.

    `settings`: None: those of the file named by TAILCAST_QUOTA_CONFIG, if any. `predictor` replaces the one in the settings.
    `InputError` if the file cannot be read, or a setting is invalid.
    """

    def __init__(self, settings: QuotaSettings | None = None, predictor: Predictor | None = None) -> None:
        super().__init__()
        if settings is None:
            file = os.environ.get(VARIABLE)
            settings = QuotaSettings.of({} if file is None else read_yaml(file, VARIABLE), VARIABLE)
        self._settings = settings
        self._predictor = predictor or open_predictor(settings.predictor, access=settings)
        self._correction = Correction()
        #: Requests in flight by LiteLLM's id, with their predictions before the correction.
        self._pending: OrderedDict[str, tuple[RequestContext, LengthPrediction]] = OrderedDict()
        self._reminded_s = -REMINDER_S

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> None:
        """Called by the proxy before its limiter."""
        request, model = read_request(data), data.get("model")
        if request.max_tokens is not None or "embedding" in str(call_type) or not isinstance(model, str):
            return
        tenant = str(user_api_key_dict.team_id or user_api_key_dict.api_key or "")
        predicted = await self._predicted(request, model, tenant)
        if predicted is None:
            return
        context, length = predicted
        corrected = self._correction.correct(context, length)
        mean, _ = corrected.expected_and_cvar(float(self._settings.default_max_tokens))
        estimates = {ESTIMATES: {model: max(1, round(mean))}}
        user_api_key_dict.metadata = {**(user_api_key_dict.metadata or {}), **estimates}
        if request.num_outputs == 1 and not request.forces_length:
            self._pending[str(data.get("litellm_call_id"))] = predicted
            if len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)

    async def _predicted(
        self, request: ApiRequest, model: str, tenant: str
    ) -> tuple[RequestContext, LengthPrediction] | None:
        """What is known of a request, and the length of one output; None without a prediction in time."""
        text, limit = request.text(), self._settings.default_max_tokens
        if not text:
            return None
        query = PredictionRequest(
            "", text, limit, self._settings.model or model, request.temperature, messages=request.conversation
        )
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                [prediction] = await self._predictor.predict([query], timeout_s=self._settings.timeout_s)
        except (TailcastError, TimeoutError) as error:
            if time.monotonic() - self._reminded_s >= REMINDER_S:
                self._reminded_s = time.monotonic()
                logger.warning(
                    "quota is reserved without predictions: %s", str(error) or "the predictor is late"
                )
            return None
        if prediction.length is None:
            return None
        context = RequestContext(
            served_model=model,
            tenant=tenant,
            prompt_tokens=prediction.prompt_tokens,
            system_prompt=prompt_key(request.messages),
            embedding=prediction.embedding,
        )
        return context, prediction.length

    async def async_log_success_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:  # fmt: skip
        """Called by LiteLLM after a request has received its whole output."""
        pending = self._pending.pop(str(kwargs.get("litellm_call_id")), None)
        tokens = getattr(getattr(response_obj, "usage", None), "completion_tokens", None)
        choices = getattr(response_obj, "choices", None)
        if pending is None or not tokens or not choices:
            return
        context, length = pending
        finished = is_finished(choices[0].finish_reason or "")
        if finished is None:  # a filter, or an error
            return
        outcome = Outcome(output_tokens=tokens, finished=finished, prediction=length)
        try:
            self._correction.observe(context, outcome)
        except InputError as error:
            logger.debug("a length is not learned: %s", error)

    async def async_log_failure_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:  # fmt: skip
        """Called by LiteLLM for a request that failed."""
        self._pending.pop(str(kwargs.get("litellm_call_id")), None)


@cache
def callback_class() -> Any:
    """`QuotaCallback`, derived from LiteLLM's CustomLogger. `MissingExtraError` if LiteLLM is not installed; `InputError`
    if its version is untested."""
    try:
        version = metadata.version("litellm")
    except metadata.PackageNotFoundError as error:
        raise MissingExtraError("litellm", "litellm") from error
    check_version("LiteLLM", version, SUPPORTED)
    from litellm.integrations.custom_logger import CustomLogger

    # The proxy only calls hooks that are defined in the class itself, not inherited ones.
    hooks = {name: value for name, value in vars(QuotaCallback).items() if name.startswith("async_")}
    return type("TailcastQuotaCallback", (QuotaCallback, CustomLogger), {"__module__": __name__, **hooks})


def __getattr__(name: str) -> Any:
    if name == "callback":
        callback = globals()[name] = callback_class()()
        return callback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
