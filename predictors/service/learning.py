"""Online calibration of a service: predictions are corrected by the true lengths that its clients report."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictors.hosting.live_page import MAX_ENDED, EndedRequest
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.messages import CheckedRequest, PipelineResult
from predictors.service.pipeline import MAX_INLINE_CHARS
from predictors.tiny import TinyPredictor
from scheduler_core.adapters.live_calibration import LiveCalibration
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.correction import MAX_NAME_CHARS, RequestContext
from scheduler_core.prediction.outcome import Outcome, is_finished
from scheduler_core.prediction.predictions import Embedding, Prediction
from scheduler_core.prediction.prompt_text import messages_of, prompt_key
from scheduler_core.prediction.session import request_embedding

logger = logging.getLogger(__name__)

#: Maximum number of predictions that wait for their true length; the oldest ones are forgotten.
MAX_OPEN = 20_000
#: Number of observations that are predicted at the same time.
AT_ONCE = 64
MAX_TOKENS = 2**53


class PromptEmbedder:
    """Embeddings of prompts by the shipped predictor `tiny`, which is loaded at the first call."""

    def __init__(self) -> None:
        self._predictor: TinyPredictor | None = None
        self._has_failed = False

    async def embed(self, prompt: object) -> Embedding | None:
        """The embedding [64] of a text; None for token ids, and if it fails. Long texts are embedded in a thread."""
        if not isinstance(prompt, str) or self._has_failed:
            return None
        try:
            if self._predictor is None or len(prompt) > MAX_INLINE_CHARS:
                return await asyncio.to_thread(self._embed, prompt)
            return self._embed(prompt)
        except Exception as error:  # no failure of the memory may fail a prediction
            if self._predictor is None or not isinstance(error, TailcastError):  # not of this prompt alone
                self._has_failed = True
                logger.exception("prompts cannot be embedded; predictions continue without a memory")
            return None

    def _embed(self, prompt: str) -> Embedding | None:
        predictor = self._predictor
        if predictor is None:
            predictor = self._predictor = TinyPredictor()
        return predictor.embedding(prompt)


class OpenPrediction(NamedTuple):
    """A prediction that waits for its true length: uncorrected, and what the correction uses of its request. The embedding is
    in half precision; `artifact` is the name of the artifact that made it, `served_model` that of the request."""

    result: PipelineResult
    context: RequestContext
    embedding: NDArray[np.float16] | None
    artifact: str
    served_model: str | None

    def full_context(self) -> RequestContext:
        """The context with its embedding."""
        if self.embedding is None:
            return self.context
        return replace(self.context, embedding=self.embedding.astype(np.float32))


class Learner:
    """Corrects the predictions of a service, and learns from observed lengths in the thread of `calibration`."""

    def __init__(self, calibration: LiveCalibration) -> None:
        self.calibration = calibration
        self._open: OrderedDict[str, OpenPrediction] = OrderedDict()
        #: Whether lengths have been observed, so that embeddings are of use.
        self.is_active = bool(calibration.calibration.served_models)
        #: The latest observed requests, as predicted just before, for the live page; and whether some of all had a tenant.
        self.ended: deque[EndedRequest] = deque(maxlen=MAX_ENDED)
        self.has_tenants = calibration.calibration.num_scopes > 1

    def add(
        self,
        request_id: str,
        result: PipelineResult,
        context: RequestContext,
        artifact: str = "",
        served_model: str | None = None,
    ) -> None:
        """Keeps a prediction until its length is observed; one without an id is not kept. See `OpenPrediction`."""
        if not request_id or result.prediction.length is None:
            return
        embedding = None if context.embedding is None else context.embedding.astype(np.float16)
        context = replace(context, embedding=None)
        self._open[request_id] = OpenPrediction(result, context, embedding, artifact, served_model)
        self._open.move_to_end(request_id)
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def get(self, request_id: str, tenant: str = "") -> OpenPrediction | None:
        """The open prediction of an id. InputError if it is that of another tenant; an empty tenant is not checked."""
        open_prediction = self._open.get(request_id)
        if open_prediction is not None and tenant not in ("", open_prediction.context.tenant):
            raise InputError("tenant", tenant, "the tenant of the prediction with this request_id")
        return open_prediction

    def corrected(self, prediction: Prediction, context: RequestContext) -> Prediction:
        """The prediction as corrected by the lengths observed until now."""
        corrected = self.calibration.correct(context, prediction)
        assert corrected is not None
        return corrected

    def observe(self, observation: pb.Observation, prediction: Prediction, context: RequestContext) -> None:
        """Queues an observation; InputError if its prediction has no length, TailcastError if the queue is full."""
        if prediction.length is None:
            raise InputError(
                "request", "a request of an artifact without the length head", "another artifact"
            )
        outcome = _outcome(observation, prediction, context)
        used = self.corrected(prediction, context).length
        if not self.calibration.observe(context, outcome):
            raise TailcastError("queue: too many observations are waiting; try again later")
        if (ended := EndedRequest.of(context.served_model, used, outcome)) is not None:
            self.ended.append(ended)
        self.has_tenants = self.has_tenants or bool(context.tenant)
        self._open.pop(observation.request_id, None)
        self.is_active = True
        self.calibration.publish_if_due()

    def close(self) -> None:
        """Learns what is queued and writes the state; blocks."""
        self.calibration.close()


def context_of(
    request: pb.PredictRequest,
    checked: CheckedRequest,
    result: PipelineResult,
    embedding: Embedding | None,
    scope: str,
) -> RequestContext:
    """What the correction uses of a request; `scope` precedes the served model, for artifacts other than the default."""
    messages = messages_of(request.messages.messages)
    return RequestContext(
        served_model=(scope + (checked.served_model or ""))[:MAX_NAME_CHARS],
        tenant=request.tenant,
        prompt_tokens=None if result.truncated else result.prompt_tokens or None,
        system_prompt=request.system_prompt_key or prompt_key(messages),
        embedding=request_embedding(embedding, messages),
    )


def _outcome(observation: pb.Observation, prediction: Prediction, context: RequestContext) -> Outcome:
    """The outcome of an observation; InputError for invalid numbers, and if it is unknown how the output ended."""
    max_tokens = observation.max_tokens if observation.HasField("max_tokens") else None
    for name, value in (("output_tokens", observation.output_tokens), ("max_tokens", max_tokens)):
        if value is not None and not 1 <= value < MAX_TOKENS:
            raise InputError(name, value, "integers from 1 to 2^53")
    reason = observation.finish_reason
    finished = observation.finished if observation.HasField("finished") else is_finished(reason)
    if finished is None and max_tokens is None:
        field, allowed = "finished, finish_reason, max_tokens", "at least one of them, and a known reason"
        raise InputError(field, reason or "none of them", allowed)
    outcome = Outcome(
        output_tokens=observation.output_tokens,
        max_tokens=max_tokens,
        finished=finished,
        finish_reason=reason,
        prediction=prediction.length,
        prompt_tokens=context.prompt_tokens,
        request_id=observation.request_id or None,
    )
    if not outcome.has_length:
        raise InputError("finish_reason", reason, "a reason that ends an output, such as stop or length")
    return outcome
