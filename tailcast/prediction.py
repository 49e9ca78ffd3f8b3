"""Blocking Python API for output lengths, with an artifact in this process or a running service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.predictions import DEFAULT_MAX_TOKENS, LengthPrediction
from tailcast.output_length import OutputLength

if TYPE_CHECKING:
    from predictors.client import ClientSettings, SyncPredictor
    from predictors.runtime import ArtifactRuntime

#: A text, or OpenAI messages with role and content, the last one of role user.
Prompt = str | Sequence[Mapping[str, object]]


class LengthPredictor(ABC):
    """A predictor of output lengths, created by `load` or `connect`; can be used as a context manager."""

    #: Whether all messages of a conversation are the prompt, not only the last one.
    conversations = False

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
        """The text of a prompt to predict from; InputError if it is empty or invalid."""
        from predictors.tokenizer import content_text, conversation_text

        if isinstance(prompt, str):
            text = prompt
        else:
            messages: Any = prompt
            if not isinstance(messages, Sequence) or not all(isinstance(item, Mapping) for item in messages):
                raise InputError("prompt", prompt, "a text, or a list of messages with role and content")
            turns = [(str(message.get("role")), content_text(message.get("content"))) for message in messages]
            last = turns[-1][0] if turns else None
            if last != "user":
                raise InputError("messages", last, "a last message of role user")
            text = conversation_text(turns) if self.conversations else turns[-1][1]
        if not text.strip():
            raise InputError("prompt", text[:20], "a non-empty text")
        return text

    @abstractmethod
    def predictions(
        self, texts: Sequence[str], models: Sequence[str | None], temperatures: Sequence[float | None]
    ) -> list[LengthPrediction]:
        """Predictions of N texts with their models and temperatures; errors as in `predict`."""

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
        self.conversations = manifest.conversations
        self._runtime = runtime
        self._artifact = (manifest.artifact_id, manifest.artifact_version)

    def predictions(
        self, texts: Sequence[str], models: Sequence[str | None], temperatures: Sequence[float | None]
    ) -> list[LengthPrediction]:
        from predictors.runtime import check_range

        rows = self._runtime.predict(texts, models, temperatures).rows()
        check_range(rows)
        return [row.length(*self._artifact) for row in rows]  # type: ignore[misc]


class _ServicePredictor(LengthPredictor):
    """Uses a `SyncPredictor`; sends only the last message of a conversation."""

    def __init__(self, client: SyncPredictor) -> None:
        self._client = client

    def predictions(
        self, texts: Sequence[str], models: Sequence[str | None], temperatures: Sequence[float | None]
    ) -> list[LengthPrediction]:
        from scheduler_core.predictor import PredictionRequest

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
        prompt: Prompt text, or a list of OpenAI messages.
        max_tokens: Maximum number of output tokens; None: `scheduler_core.predictions.DEFAULT_MAX_TOKENS`.
        model: Name of the LLM; None: unknown.
        temperature: Sampling temperature of the LLM, >= 0; None: unknown.
        predictor: "pretrained", "tiny", an artifact folder, or grpc://HOST:PORT; stays open for later calls.

    Raises:
        InputError: The prompt is empty or invalid, or the model or temperature is not supported.
        TailcastError: The predictor fails or cannot be opened or reached.
    """
    return _opened(predictor).predict(prompt, max_tokens=max_tokens, model=model, temperature=temperature)
