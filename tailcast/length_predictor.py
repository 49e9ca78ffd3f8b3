"""Blocking Python API for output lengths and urgency, with artifacts in this process or a running service."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from scheduler_core.errors import InputError, MissingExtraError, TailcastError, suggestion
from scheduler_core.prediction.api_request import ApiRequest, read_request
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.joint import Parts, merged
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import (
    DEFAULT_MAX_TOKENS,
    LengthPrediction,
    MissingPart,
    Prediction,
)
from scheduler_core.prediction.predictor import (
    PREDICTORS,
    SERVICES,
    PredictionRequest,
    PredictorAddress,
    addresses,
)
from scheduler_core.prediction.prompt_text import Message, PromptForm, messages_of
from scheduler_core.prediction.service_access import NO_FILES, ServiceAccess
from tailcast.output_length import OutputLength

if TYPE_CHECKING:
    from predictors.client import ClientSettings, SyncPredictor
    from predictors.runtime import ArtifactRuntime
    from predictors.tiny import TinyPredictor

log = logging.getLogger(__name__)

#: Maximum number of unknown models that a predictor warns of.
_MAX_WARNINGS = 16
#: Codes of errors that no single request causes.
_OF_SERVICE = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
#: The predictor of both, length and urgency.
DEFAULT_PREDICTOR = "pretrained+urgency"
#: Predicts requests, each with all heads of one artifact.
Predict = Callable[[Sequence[PredictionRequest]], Sequence[Prediction]]
#: A text; messages of any chat API, as mappings or objects with role and content; or the body of a request with its options.
Prompt = str | Sequence[Mapping[str, object] | object] | Mapping[str, object]


class LengthCorrection(Protocol):
    """What a `LengthPredictor` does with true lengths."""

    def corrected(self, request: PredictionRequest, length: LengthPrediction) -> LengthPrediction:
        """The prediction of a request, corrected by the lengths observed before."""

    def observe(
        self, request: PredictionRequest, outcome: Outcome, predict: Callable[[], LengthPrediction]
    ) -> None:
        """Learns the length of a request; `predict` returns its uncorrected prediction. InputError for invalid numbers."""


class LengthPredictor:
    """A predictor of output lengths, created by `load` or `connect`; can be used as a context manager."""

    def __init__(
        self,
        predict: Predict,
        describe: Callable[[], Any],
        learner: LengthCorrection,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._predict, self._describe = predict, describe
        self._closing = ExitStack()
        self._closing.callback(close)
        self._learner = learner
        self._others: list[Predict] = []
        self._parts = Parts(())  # those of the others, for failures
        self._unknown_models: set[str] = set()

    @cached_property
    def _artifact(self) -> Any:
        """The `Manifest`, or the `GetMetadataResponse` of the service, which have the same fields. InputError if
        there is no length head."""
        artifact = self._describe()
        if "length" not in artifact.heads:
            raise _without_length(artifact)
        return artifact

    @property
    def conversations(self) -> bool:
        """Whether all messages of a conversation are the prompt, not only the last one of the user."""
        return self.form.conversations

    @cached_property
    def form(self) -> PromptForm:
        """What the predictor reads of a request."""
        if hasattr(self._artifact, "form"):
            form: PromptForm = self._artifact.form
            return form
        from predictors.client.messages import prompt_form

        return prompt_form(self._artifact)

    def predict(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        model: str | None = None,
        temperature: float | None = None,
        tenant: str = "",
    ) -> OutputLength:
        """The output length of a prompt, corrected by the lengths that were observed, and its urgency; arguments and errors
        as in `tailcast.predict`. What is observed for one `tenant` does not change the predictions of others."""
        body = read_request(prompt) if isinstance(prompt, Mapping) else ApiRequest()
        limit = next((each for each in (max_tokens, body.max_tokens) if each is not None), DEFAULT_MAX_TOKENS)
        temperature = body.temperature if temperature is None else temperature
        [prediction] = self.predictions(
            [self.text(prompt)], [model or body.model], [temperature], tenant, [_conversation(prompt)]
        )
        one = replace(body, num_outputs=1).prediction(prediction, limit)
        assert one is not None
        return OutputLength.of(one, limit)

    def observe(
        self,
        prompt: Prompt,
        output_tokens: int,
        *,
        finished: bool = True,
        max_tokens: int | None = None,
        model: str | None = None,
        temperature: float | None = None,
        tenant: str = "",
    ) -> None:
        """Tells the true length of an output, so that later predictions are corrected: in this process, or in the service.

        Args:
            prompt, model, temperature, tenant: As in `predict`.
            output_tokens: Tokens of the output, >= 1.
            finished: Whether it ended by itself. False: it is only known to be longer (truncated at max_tokens, aborted).
            max_tokens: The limit of the request, if it had one.

        Raises:
            InputError: A value is out of range.
            PredictorError: The service cannot be reached, or does not learn.
        """
        named = (model or "", temperature, tenant)
        request = PredictionRequest(
            "", self.text(prompt), DEFAULT_MAX_TOKENS, *named, messages=_conversation(prompt)
        )
        for name, value in (("output_tokens", output_tokens), ("max_tokens", max_tokens)):
            if value is not None and not (type(value) is int and 1 <= value < 2**53):
                raise InputError(name, value, "integers from 1 to 2^53")
        outcome = Outcome(output_tokens=output_tokens, finished=finished, max_tokens=max_tokens)
        self._learner.observe(request, outcome, lambda: self._first([request])[0][1])

    def text(self, prompt: Prompt) -> str:
        """The text of a prompt to predict from, see `prompt_text.PromptForm`; InputError if it is empty or invalid."""
        if isinstance(prompt, str):
            field, text = "prompt", prompt
        elif isinstance(prompt, Mapping):
            field, text = "prompt", read_request(prompt).text(self.form)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            field, text = "messages", self.form.text(messages_of(prompt))
        else:
            allowed = "a text, a list of messages with role and content, or the body of a request"
            raise InputError("prompt", prompt, allowed)
        if not text.strip():
            raise InputError(field, text[:20], "a non-empty text")
        return text

    def predictions(
        self,
        texts: Sequence[str],
        models: Sequence[str | None],
        temperatures: Sequence[float | None],
        tenant: str = "",
        conversations: Sequence[tuple[Message, ...]] = (),
    ) -> list[Prediction]:
        """Predictions of N texts with their models and temperatures; errors as in `predict`. `conversations` [N] are the
        messages of the texts, from which each artifact reads its own text (empty: the texts). If a joined artifact fails, its
        heads are missing (`Prediction.missing`)."""
        rows = zip(texts, models, temperatures, conversations or [()] * len(texts), strict=True)
        requests = [  # without ids, so that a service does not wait for their lengths
            PredictionRequest(
                "", text, DEFAULT_MAX_TOKENS, model or "", temperature, tenant, messages=messages
            )
            for text, model, temperature, messages in rows
        ]
        predicted = self._first(requests)
        for model in filter(None, models):
            self._warn(model)
        first = [
            replace(prediction, length=self._learner.corrected(request, length))
            for request, (prediction, length) in zip(requests, predicted, strict=True)
        ]
        columns = [self._joined(number, requests) for number in range(len(self._others))]
        return [merged(row) for row in zip(first, *columns, strict=True)]

    def _first(self, requests: Sequence[PredictionRequest]) -> list[tuple[Prediction, LengthPrediction]]:
        """Predictions of the artifact of lengths, with the uncorrected lengths."""
        try:
            predictions = self._predict(requests)
        except InputError as error:
            if error.field == "served_model":
                raise InputError("model", error.value, error.allowed) from error
            raise
        pairs = []
        for prediction in predictions:
            if prediction.length is None:
                missing = "; ".join(map(str, prediction.missing))
                raise TailcastError(missing) if missing else _without_length(self._describe())
            pairs.append((prediction, prediction.length))
        return pairs

    def _joined(
        self, number: int, requests: Sequence[PredictionRequest]
    ) -> Sequence[Prediction | MissingPart]:
        """Predictions of a joined artifact; those that fail are missing."""
        try:
            return self._others[number](requests)
        except Exception as error:  # of any kind, it must not cost the length
            if len(requests) == 1 or getattr(error, "code", None) in _OF_SERVICE:
                return [self._parts.missing(number, error)] * len(requests)
        return [self._joined(number, [request])[0] for request in requests]

    def _warn(self, model: str) -> None:
        """Logs once that a model is none of the artifact's served models, and is predicted as an unknown one."""
        unknown, served_models = self._unknown_models, self._artifact.served_models
        if not served_models or model in served_models or model in unknown or len(unknown) >= _MAX_WARNINGS:
            return
        unknown.add(model)
        text = (
            "model %r is none of the %d served models of the predictor and is predicted as an unknown one%s"
        )
        log.warning(text, model, len(served_models), suggestion(model, served_models))

    def join(self, predictor: str, access: ServiceAccess = NO_FILES) -> None:
        """Adds the heads of another artifact or service, such as urgency, to the predictions; raises as `load`, or `connect`
        with `access`."""
        address = PredictorAddress.of(predictor)
        if address.is_service:
            opened = _connect(address, access)
            predict = opened._predict
            self._closing.callback(opened.close)
        else:
            predict = _predict_with(_open(address.target))
        self._others.append(predict)
        self._parts = Parts((*self._parts.names, predictor))

    def close(self) -> None:
        """Closes connections, if any."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalCorrection:
    """Corrects predictions in this process, see `scheduler_core.prediction.correction`; thread-safe."""

    def __init__(self) -> None:
        self._correction = Correction()
        self._lock = threading.Lock()
        self._has_learned = False

    @cached_property
    def _embedder(self) -> TinyPredictor:
        from predictors.tiny import TinyPredictor

        return TinyPredictor()

    def corrected(self, request: PredictionRequest, length: LengthPrediction) -> LengthPrediction:
        """As in `LengthCorrection`; nothing is computed before the first observation."""
        if not self._has_learned:
            return length
        return self._correction.correct(self._context(request), length)

    def observe(
        self, request: PredictionRequest, outcome: Outcome, predict: Callable[[], LengthPrediction]
    ) -> None:
        """As in `LengthCorrection`."""
        outcome, context = replace(outcome, prediction=predict()), self._context(request)
        with self._lock:
            self._correction.observe(context, outcome)
        self._has_learned = True

    def _context(self, request: PredictionRequest) -> RequestContext:
        embedding = self._embedder.embedding(request.prompt)
        return RequestContext(served_model=request.served_model, tenant=request.tenant, embedding=embedding)


class RemoteCorrection:
    """Reports lengths to a service, which corrects its own predictions."""

    def __init__(self, client: SyncPredictor) -> None:
        self._client = client

    def corrected(self, request: PredictionRequest, length: LengthPrediction) -> LengthPrediction:
        """As in `LengthCorrection`; the service has corrected it."""
        return length

    def observe(
        self, request: PredictionRequest, outcome: Outcome, predict: Callable[[], LengthPrediction]
    ) -> None:
        """As in `LengthCorrection`; PredictorError if the service cannot be reached, or does not learn."""
        from predictors.client.messages import request_message
        from predictors.proto import predictor_v1_pb2 as pb

        observation = pb.Observation(
            request=request_message(request),
            output_tokens=outcome.output_tokens,
            max_tokens=outcome.max_tokens,
            finished=outcome.finished,
        )
        for refused in self._client.observe([observation]):
            raise InputError(refused.message)


def _conversation(prompt: Prompt) -> tuple[Message, ...]:
    """The messages of a prompt, with the options of its request; empty for a text."""
    if isinstance(prompt, str):
        return ()
    return read_request(prompt).conversation if isinstance(prompt, Mapping) else messages_of(prompt)


def _without_length(artifact: Any) -> InputError:
    allowed = f"an artifact with a length head; it has {', '.join(artifact.heads)}"
    return InputError("predictor", artifact.artifact_id, allowed)


def load(artifact: str | Path = DEFAULT_PREDICTOR) -> LengthPredictor:
    """Returns a predictor that runs artifacts in this process; needs the extra `predict`.

    Args:
        artifact: "pretrained" or "tiny" (shipped with tailcast), or an artifact folder; or one of these and others with
            further heads, joined by "+". The default also predicts urgency.

    Raises:
        InputError: An artifact is missing or invalid, or the first one has no length head.
    """
    parts = [] if isinstance(artifact, Path) else addresses(artifact)
    runtime = _open(parts[0] if parts else artifact)
    predictor = LengthPredictor(_predict_with(runtime), lambda: runtime.artifact.manifest, LocalCorrection())
    assert predictor._artifact
    for other in parts[1:]:
        predictor.join(other)
    return predictor


def _open(artifact: str | Path) -> ArtifactRuntime:
    try:
        from predictors.runtime import open_runtime

        return open_runtime(artifact)
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "a package", "predict") from error


def _predict_with(runtime: ArtifactRuntime) -> Predict:
    form = runtime.artifact.manifest.form

    def predict(requests: Sequence[PredictionRequest]) -> list[Prediction]:
        rows = [(each.text(form), each.served_model or None, each.temperature) for each in requests]
        return [runtime.prediction(row) for row in runtime.predict(*zip(*rows, strict=True)).rows()]

    return predict


def connect(address: str, settings: ClientSettings | None = None) -> LengthPredictor:
    """Returns a client of `serve-predictor` that connects at the first call; needs the extra `client`.

    Args:
        address: "host:port", "grpc://host:port", or with TLS "grpcs://host:port"; InputError for other formats.
        settings: Deadline, retries, encryption and token. None: the defaults, for grpcs:// with the CAs of the system.
    """
    from predictors.client import ClientSettings, SyncPredictor, TlsSettings

    scheme, separator, target = address.partition("://")
    if not separator or scheme not in SERVICES:
        target = address
    elif scheme == "grpcs":
        settings = settings or ClientSettings()
        settings = replace(settings, tls=settings.tls or TlsSettings())
    return _client_of(SyncPredictor(target, settings))


def _connect(address: PredictorAddress, access: ServiceAccess) -> LengthPredictor:
    from predictors.client import SyncPredictor

    return _client_of(SyncPredictor.of(address, access))


def _client_of(client: SyncPredictor) -> LengthPredictor:
    return LengthPredictor(client.predict, client.metadata, RemoteCorrection(client), client.close)


def open_length_predictor(predictor: str, access: ServiceAccess = NO_FILES) -> LengthPredictor:
    """Opens a predictor: "pretrained", "tiny", an artifact folder, or grpc://HOST:PORT (grpcs:// with TLS), and others joined
    by "+"; services with the files of `access`."""
    first, *others = addresses(predictor)
    address = PredictorAddress.of(first)
    if not address.is_service and address.scheme != "local":
        raise InputError("predictor", predictor, PREDICTORS)
    opened = _connect(address, access) if address.is_service else load(address.target)
    for other in others:
        opened.join(other, access)
    return opened


_opened = lru_cache(maxsize=4)(open_length_predictor)


def predict(
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    model: str | None = None,
    temperature: float | None = None,
    predictor: str = DEFAULT_PREDICTOR,
) -> OutputLength:
    """Predicts the output length and the urgency of a prompt, without running the LLM.

    Args:
        prompt: Prompt text, or a list of messages as in a request of any chat API: of any roles, with tool calls, images and
            null contents; or the body of such a request, with its tools and other options, and its own max_tokens, model
            and temperature. Of a conversation, the last text of the user is read, or all messages and the options if the
            predictor reads conversations.
        max_tokens: Maximum number of output tokens; None: `scheduler_core.prediction.predictions.DEFAULT_MAX_TOKENS`.
        model: Name of the LLM; None: unknown.
        temperature: Sampling temperature of the LLM, >= 0; None: unknown.
        predictor: "pretrained", "tiny", an artifact folder, or grpc://HOST:PORT (grpcs:// with TLS), and artifacts with other
            heads joined by "+"; stays open for later calls.

    Raises:
        InputError: The prompt is empty or invalid, or the model or temperature is not supported.
        TailcastError: The predictor fails or cannot be opened or reached.
    """
    return _opened(predictor).predict(prompt, max_tokens=max_tokens, model=model, temperature=temperature)
