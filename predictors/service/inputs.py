"""What came in, checked: a request message to what the pipeline takes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from predictors.artifact import Artifact
from predictors.conversation import conversation_text
from predictors.manifest import checked_temperature
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.pipeline import PredictionPipeline, TokenIds
from scheduler_core.errors import InputError

MAX_QUANTILE_LEVELS = 100
MAX_REQUEST_ID_CHARS = 1024
MAX_MESSAGES = 4096
MAX_TEMPERATURE = 100.0  # far above what any engine samples with; beyond it the model's numbers overflow


class Asked(NamedTuple):
    """A request that was found right."""

    prompt: str | TokenIds
    served_model: str | None
    temperature: float | None
    knows_model: bool


class RequestReader:
    """Checks requests for one artifact.

    Args:
        pipeline: What predicts.
        max_prompt_chars: Longest prompt; None: any.
    """

    def __init__(self, pipeline: PredictionPipeline, max_prompt_chars: int | None) -> None:
        self._pipeline = pipeline
        self._artifact: Artifact = pipeline.runtime.artifact
        self._max_prompt_chars = max_prompt_chars

    def read(self, request: pb.PredictRequest) -> Asked:
        """The request's input and conditions.

        Raises:
            InputError: The first field that is wrong.
        """
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            raise InputError(
                "request_id",
                f"{len(request.request_id)} characters",
                f"at most {MAX_REQUEST_ID_CHARS} of them",
            )
        kind = request.WhichOneof("input")
        if kind == "token_ids":
            prompt: str | TokenIds = self._ids(request.token_ids)
        elif kind == "messages":
            prompt = self._text("messages", self._message_text(request.messages))
        else:
            prompt = self._text("prompt", request.prompt)
        served_model = request.served_model or None
        knows_model = self._pipeline.knows(served_model)
        temperature = request.temperature if request.HasField("temperature") else None
        if checked_temperature(temperature) > MAX_TEMPERATURE:
            raise InputError("temperature", temperature, f"0 to {MAX_TEMPERATURE:g}, or unset")
        self._check_numbers(request)
        return Asked(prompt, served_model, temperature, knows_model)

    def _text(self, field: str, text: str) -> str:
        if not text or text.isspace():
            raise InputError(field, text[:20], "a text that is not empty")
        if self._max_prompt_chars is not None and len(text) > self._max_prompt_chars:
            raise InputError(field, f"{len(text)} characters", f"at most {self._max_prompt_chars}")
        return text

    def _message_text(self, chat: pb.ChatMessages) -> str:
        """What the artifact was trained to read of a conversation."""
        if len(chat.messages) > MAX_MESSAGES:
            raise InputError("messages", f"{len(chat.messages)} messages", f"at most {MAX_MESSAGES} of them")
        last = _last_user_message(chat)
        if not self._artifact.manifest.conversations:
            return last
        return conversation_text((message.role, message.content) for message in chat.messages)

    def _ids(self, token_ids: pb.TokenIds) -> TokenIds:
        max_length = self._artifact.manifest.max_length
        size = self._pipeline.runtime.tokenizer.vocabulary_size
        if max_length is None or size is None:
            raise InputError("token_ids", "token ids", "a prompt: this artifact reads texts, not tokens")
        if not 1 <= len(token_ids.ids) <= max_length:
            raise InputError("token_ids", f"{len(token_ids.ids)} ids", f"1 to {max_length} of them")
        ids = np.array(token_ids.ids, dtype=np.int64)
        wrong = ids[(ids < 0) | (ids >= size)]
        if len(wrong):
            raise InputError("token_ids", int(wrong[0]), f"0 to {size - 1}")
        return TokenIds(ids)

    def _check_numbers(self, request: pb.PredictRequest) -> None:
        if request.HasField("max_tokens") and request.max_tokens < 1:
            raise InputError("max_tokens", request.max_tokens, "an integer >= 1, or unset")
        if request.HasField("cvar_level") and not 0 <= request.cvar_level < 1:
            raise InputError("cvar_level", request.cvar_level, "a number in [0, 1)")
        if len(request.quantile_levels) > MAX_QUANTILE_LEVELS:
            raise InputError(
                "quantile_levels", f"{len(request.quantile_levels)} levels", f"at most {MAX_QUANTILE_LEVELS}"
            )
        for level in request.quantile_levels:
            if not 0 < level < 1:
                raise InputError("quantile_levels", level, "numbers in (0, 1)")
        if request.HasField("declared_tier"):
            levels = self._artifact.manifest.urgency_levels
            highest = len(levels) - 1 if levels else math.inf
            if not 0 <= request.declared_tier <= highest:
                allowed = f"0 to {highest}" if levels else "an integer >= 0"
                raise InputError("declared_tier", request.declared_tier, allowed)
        if request.HasField("timeout_s") and not request.timeout_s > 0:
            raise InputError("timeout_s", request.timeout_s, "seconds > 0, or unset")


def _last_user_message(chat: pb.ChatMessages) -> str:
    """Of a conversation, the message that will be answered."""
    if not chat.messages or chat.messages[-1].role != "user":
        role = chat.messages[-1].role if chat.messages else "no message"
        raise InputError("messages", role, "a conversation whose last message has the role user")
    content: str = chat.messages[-1].content
    return content
