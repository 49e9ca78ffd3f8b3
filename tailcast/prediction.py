"""Blocking Python API for output lengths, with an artifact in this process or a running service."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from scheduler_core.errors import InputError, MissingExtraError, suggestion
from scheduler_core.prediction.predictions import DEFAULT_MAX_TOKENS, LengthPrediction
from tailcast.output_length import OutputLength

if TYPE_CHECKING:
    from predictors.client import ClientSettings, SyncPredictor
    from predictors.proto.predictor_v1_pb2 import GetMetadataResponse
    from predictors.runtime import ArtifactRuntime

log = logging.getLogger(__name__)

#: Maximum number of unknown models that a predictor warns of.
_MAX_WARNINGS = 16
#: A text, or messages of any chat API, as mappings or objects with role and content.
Prompt = str | Sequence[Mapping[str, object] | object]


class LengthPredictor(ABC):
    """A predictor of output lengths, created by `load` or `connect`; can be used as a context manager."""

    #: Whether all messages of a conversation are the prompt, not only the last one of the user.
    conversations = False

    def __init__(self) -> None:
        self._unknown_models: set[str] = set()

    def predict(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        model: str | None = None,
        temperature: float | None = None,
    ) -> OutputLength:
        """The output length of a prompt; arguments and errors as in `tailcast.predict`."""
        [prediction] = self.predictions([self.text(prompt)], [model], [temperature])
        return OutputLength(prediction, DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens)

    def text(self, prompt: Prompt) -> str:
        """The text of a prompt to predict from, see `prompt_text.predictor_text`; InputError if it is empty or invalid."""
        from scheduler_core.prediction.prompt_text import messages_of, predictor_text

        if isinstance(prompt, str):
            field, text = "prompt", prompt
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            field, text = "messages", predictor_text(messages_of(prompt), conversations=self.conversations)
        else:
            raise InputError("prompt", prompt, "a text, or a list of messages with role and content")
        if not text.strip():
            raise InputError(field, text[:20], "a non-empty text")
        return text

    @abstractmethod
    def predictions(
        self, texts: Sequence[str], models: Sequence[str | None], temperatures: Sequence[float | None]
    ) -> list[LengthPrediction]:
        """Predictions of N texts with their models and temperatures; errors as in `predict`."""

    def _warn(self, model: str | None, served_models: Sequence[str]) -> None:
        """Logs once that a model is none of an artifact's `served_models`, which predicts it as an unknown one."""
        unknown = self._unknown_models
        if not model or not served_models or model in served_models or model in unknown:
            return
        if len(unknown) < _MAX_WARNINGS:
            unknown.add(model)
            text = "model %r is none of the %d served models of the predictor and is predicted as an unknown one%s"
            log.warning(text, model, len(served_models), suggestion(model, served_models))

    def close(self) -> None:  # noqa: B027  # no abstract method: artifacts need no cleanup
        """Closes connections, if any."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ArtifactPredictor(LengthPredictor):
    """Runs an artifact in the calling thread."""

    def __init__(self, runtime: ArtifactRuntime) -> None:
        manifest = runtime.artifact.manifest
        if "length" not in manifest.heads:
            allowed = f"an artifact with a length head; it has {', '.join(manifest.heads)}"
            raise InputError("predictor", manifest.artifact_id, allowed)
        super().__init__()
        self.conversations = manifest.conversations
        self._runtime = runtime
        self._manifest = manifest

    def predictions(
        self, texts: Sequence[str], models: Sequence[str | None], temperatures: Sequence[float | None]
    ) -> list[LengthPrediction]:
        from predictors.runtime import check_range

        try:
            rows = self._runtime.predict(texts, models, temperatures).rows()
        except InputError as error:
            if error.field == "served_model":
                raise InputError("model", error.value, error.allowed) from error
            raise
        check_range(rows)
        for model in models:
            self._warn(model, self._manifest.served_models)
        artifact = self._manifest.artifact_id, self._manifest.artifact_version
        return [row.length(*artifact) for row in rows]  # type: ignore[misc]


class _ServicePredictor(LengthPredictor):
    """Uses a `SyncPredictor`."""

    def __init__(self, client: SyncPredictor) -> None:
        super().__init__()
        self._client = client

    @cached_property
    def _metadata(self) -> GetMetadataResponse:
        return self._client.metadata()

    @property
    def conversations(self) -> bool:  # type: ignore[override]
        return self._metadata.conversations

    def predictions(
        self, texts: Sequence[str], models: Sequence[str | None], temperatures: Sequence[float | None]
    ) -> list[LengthPrediction]:
        from scheduler_core.prediction.predictor import PredictionRequest

        rows = zip(texts, models, temperatures, strict=True)
        requests = [
            PredictionRequest(str(number), text, DEFAULT_MAX_TOKENS, model or "", temperature)
            for number, (text, model, temperature) in enumerate(rows)
        ]
        lengths = []
        for prediction in self._client.predict(requests):
            if prediction.length is None:
                allowed = "a service of an artifact with a length head"
                raise InputError("predictor", self._client.address, allowed)
            lengths.append(prediction.length)
        for model in filter(None, models):
            self._warn(model, self._metadata.served_models)
        return lengths

    def close(self) -> None:
        self._client.close()


def load(artifact: str | Path = "pretrained") -> LengthPredictor:
    """Returns a predictor that runs an artifact in this process; needs the extra `predict`.

    Args:
        artifact: "pretrained" or "tiny" (shipped with tailcast), or an artifact folder.

    Raises:
        InputError: The artifact is missing or invalid, or has no length head.
    """
    try:
        from predictors.runtime import open_runtime

        return _ArtifactPredictor(open_runtime(artifact))
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "a package", "predict") from error


def connect(address: str, settings: ClientSettings | None = None) -> LengthPredictor:
    """Returns a client of `serve-predictor` that connects at the first call; needs the extra `client`.

    Args:
        address: "host:port" or "grpc://host:port"; InputError for other formats.
        settings: Deadline, retries, encryption and token.
    """
    from predictors.client import SyncPredictor

    return _ServicePredictor(SyncPredictor(address.removeprefix("grpc://"), settings))


def open_length_predictor(predictor: str) -> LengthPredictor:
    """Opens a predictor: "pretrained", "tiny", an artifact folder, or grpc://HOST:PORT."""
    return connect(predictor) if predictor.startswith("grpc://") else load(predictor)


_opened = lru_cache(maxsize=4)(open_length_predictor)


def predict(
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    model: str | None = None,
    temperature: float | None = None,
    predictor: str = "pretrained",
) -> OutputLength:
    """Predicts the output length of a prompt, without running the LLM.

    Args:
        prompt: Prompt text, or a list of messages as in a request of any chat API: of any roles, with tool calls, images and
            null contents. Of a conversation, the last text of the user is read, or all messages if the predictor reads
            conversations.
        max_tokens: Maximum number of output tokens; None: `scheduler_core.prediction.predictions.DEFAULT_MAX_TOKENS`.
        model: Name of the LLM; None: unknown.
        temperature: Sampling temperature of the LLM, >= 0; None: unknown.
        predictor: "pretrained", "tiny", an artifact folder, or grpc://HOST:PORT; stays open for later calls.

    Raises:
        InputError: The prompt is empty or invalid, or the model or temperature is not supported.
        TailcastError: The predictor fails or cannot be opened or reached.
    """
    return _opened(predictor).predict(prompt, max_tokens=max_tokens, model=model, temperature=temperature)
