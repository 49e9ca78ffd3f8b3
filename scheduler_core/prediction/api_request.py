"""Requests of generation APIs: the fields that predictors and policies use, from the body of any of them.

| API | prompt | limit of the output |
|---|---|---|
| OpenAI chat, Anthropic messages, Ollama chat | `messages`, `system` | `max_completion_tokens`, `max_tokens`, `options.num_predict` |
| OpenAI Responses | `input`, `instructions` | `max_output_tokens` |
| OpenAI completions, Ollama generate, llama.cpp | `prompt`: texts or token ids, one or several; `system` | `max_tokens`, `options.num_predict`, `n_predict` |
| Gemini | `contents`, `systemInstruction` | `maxOutputTokens` in `generationConfig` |
| SGLang, TGI and vLLM generate | `text`, `inputs`, `input_ids`, `token_ids` | `max_new_tokens`, `max_tokens` in `sampling_params` or `parameters` |

Reading never fails. A missing or malformed field has its default, because the engine reports it. Numbers may be texts, and
integers may have a fraction of 0, because servers accept both. A limit of 0 or below is no limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from scheduler_core.prediction.predictions import Prediction, requested_prediction
from scheduler_core.prediction.prompt_text import (
    LAST_TEXT,
    OPTIONS,
    SYSTEM,
    USER,
    Message,
    PromptForm,
    Read,
    content_text,
    is_list,
    member,
    messages_of,
)
from scheduler_core.prediction.request_options import options_text

#: Approximate number of characters per token, for prompts that are not tokenized.
CHARS_PER_TOKEN = 4
MAX_TOKENS = 2**31 - 1
#: Objects in a body that can have sampling parameters.
_NESTED = ("options", "sampling_params", "parameters", "generationConfig")
_LIMITS = (
    "max_completion_tokens",
    "max_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "n_predict",
    "num_predict",
    "maxOutputTokens",
)
_MINIMUMS = ("min_tokens", "min_new_tokens")
_PROMPTS = ("prompt", "text", "inputs", "input_ids", "token_ids", "prompt_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """The fields of a request for one or several outputs.

    Attributes:
        messages: Messages of a chat, first the system prompt; empty for texts and token ids.
        texts: Prompts of a text completion.
        num_prompt_ids: Total number of token ids, for prompts given as ids.
        options: Text of the options that change the length of the output, see `request_options`.
        num_other_chars: Characters of the definitions of tools and of the output's schema, which are a part of the prompt.
        model: Name of the served model; "" if the request has none.
        max_tokens: Maximum number of output tokens; None: no limit.
        min_tokens: Minimum number of output tokens.
        ignores_eos: Whether the output only ends at max_tokens.
        num_outputs: Number of outputs (`n`, `best_of`, several prompts); None if it is malformed.
        temperature, top_p: Sampling parameters; None: the engine's default.
        is_stream: Whether the output is streamed.
        include_usage: Whether the client asked for the token counts of a stream.
        priority: The client's own `priority`, an integer of 64 bits; None without one.
    """

    messages: tuple[Message, ...] = ()
    texts: tuple[str, ...] = ()
    num_prompt_ids: int = 0
    options: str = ""
    num_other_chars: int = 0
    model: str = ""
    max_tokens: int | None = None
    min_tokens: int = 0
    ignores_eos: bool = False
    num_outputs: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    is_stream: bool = False
    include_usage: bool = False
    priority: int | None = None

    @property
    def has_prompt(self) -> bool:
        """Whether the request has a prompt that was read."""
        return bool(self.messages or any(self.texts) or self.num_prompt_ids)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """What predictors read: the options, as a message of their role, and the messages, or the only text of a completion.
        Empty for token ids and for several prompts."""
        messages = self.messages or tuple(Message(USER, text) for text in self.texts if len(self.texts) == 1)
        return (Message(OPTIONS, self.options), *messages) if self.options and messages else messages

    def text(self, form: PromptForm = LAST_TEXT) -> str:
        """The text that a predictor of this form reads; empty for token ids and for several prompts."""
        return form.text(self.conversation)

    @property
    def forces_length(self) -> bool:
        """Whether the length of an output is not the model's alone, so that nothing can be learned from it."""
        return self.ignores_eos or self.min_tokens > 1

    @property
    def num_chars(self) -> int:
        """Characters of the prompt, without those given as token ids."""
        num_chars = self.num_other_chars + sum(map(len, self.texts))
        return num_chars + sum(len(message.text) for message in self.messages)

    def prompt_tokens(self) -> int:
        """Estimated tokens of the prompt, at least 1: token ids exactly, texts by `CHARS_PER_TOKEN`."""
        return max(1, self.num_prompt_ids + (1 + self.num_chars // CHARS_PER_TOKEN if self.num_chars else 0))

    def prediction(self, prediction: Prediction | None, max_tokens: int) -> Prediction | None:
        """The prediction for all outputs of this request, each of at most `max_tokens` tokens; see `requested_prediction`."""
        return requested_prediction(
            prediction,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignores_eos=self.ignores_eos,
            num_outputs=self.num_outputs or 1,
        )


def read_request(body: object) -> ApiRequest:
    """Reads the body of a request, a mapping or an object with attributes; see the table above."""
    read = _reader(body)
    sources = [body, *(inner for name in _NESTED if (inner := read(name)) is not None)]
    readers = [_reader(source) for source in sources]
    prompt: dict[str, Any] = {}
    messages, input_ = read("messages"), read("input")
    if not is_list(messages):
        messages = read("contents")
    num_prompts = 1
    if is_list(messages):
        items = [*messages]
        if items and all(is_list(item) for item in items):  # several conversations
            num_prompts = len(items)
            items = [message for item in items for message in item]
        prompt["messages"] = (*_system(read), *messages_of(items))
    elif isinstance(input_, str):
        prompt["messages"] = (*_system(read), Message(USER, input_))
    elif is_list(input_) and any(isinstance(item, dict | Mapping) for item in input_):
        prompt["messages"] = (*_system(read), *messages_of(input_))
    else:
        source = next((value for name in _PROMPTS if (value := read(name)) is not None), input_)
        texts, num_ids, num_prompts = _prompts(source)
        if texts and (system := _system(read)):
            prompt["messages"] = (*system, *(Message(USER, text) for text in texts))
        else:
            prompt |= {"texts": texts, "num_prompt_ids": num_ids}
    model, priority = read("model"), integer(read("priority"))
    stream_options = read("stream_options")
    min_tokens, num_outputs = _first(readers, _MINIMUMS) or 0, _num_outputs(readers, num_prompts)
    return ApiRequest(
        **prompt,
        options=options_text(
            sources, readers, min_tokens=min_tokens, num_outputs=(num_outputs or num_prompts) // num_prompts
        ),
        num_other_chars=_num_chars(read),
        model=model if isinstance(model, str) else "",
        max_tokens=_first(readers, _LIMITS),
        min_tokens=min_tokens,
        ignores_eos=any(each("ignore_eos") is True for each in readers),
        num_outputs=num_outputs,
        temperature=_number(readers, "temperature"),
        top_p=_number(readers, "top_p"),
        is_stream=read("stream") is True,
        include_usage=member(stream_options, "include_usage") is True,
        priority=priority if priority is not None and -(2**63) <= priority < 2**63 else None,
    )


def integer(value: object) -> int | None:
    """The integer of a JSON value: a number without a fraction, or its decimal text. None for other values."""
    if isinstance(value, str):
        text = value.strip()
        digits = text[1:] if text[:1] in ("+", "-") else text
        return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if type(value) is int else None


def _reader(source: object) -> Read:
    return source.get if isinstance(source, dict) else partial(member, source)


def _first(readers: list[Read], names: Iterable[str]) -> int | None:
    """The first of these members that is a number of tokens."""
    for read in readers:
        for name in names:
            value = read(name)
            if value is not None and (number := integer(value)) is not None and 1 <= number <= MAX_TOKENS:
                return number
    return None


def _num_outputs(readers: list[Read], num_prompts: int) -> int | None:
    """Outputs of a request: the larger of `n` and `best_of` for each prompt; None if one of them is malformed."""
    largest = 1
    for value in (read(name) for read in readers for name in ("n", "best_of")):
        if value is None or value is True:
            continue
        number = integer(value)
        if number is None or number < 1:
            return None
        largest = max(largest, number)
    return largest * num_prompts


def _number(readers: list[Read], name: str) -> float | None:
    """The first member of that name that is a finite number >= 0."""
    for value in (read(name) for read in readers):
        if value is None:
            continue
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if 0 <= number < math.inf:
            return number
    return None


def _system(read: Read) -> tuple[Message, ...]:
    """The system prompt of a body, if it is not one of the messages."""
    texts = (
        content_text(read(name))
        for name in ("system", "instructions", "systemInstruction", "system_instruction")
    )
    return tuple(Message(SYSTEM, text) for text in texts if text)


def _prompts(value: object) -> tuple[tuple[str, ...], int, int]:
    """Texts, total number of token ids, and number of prompts of a text completion."""
    if isinstance(value, str):
        return (value,), 0, 1
    if not is_list(value):
        return (), 0, 1
    items: list[Any] = [*value]  # type: ignore[misc]
    if all(type(item) is int for item in items):
        return (), len(items), 1
    texts = tuple(item for item in items if isinstance(item, str))
    num_ids = sum(len([*item]) for item in items if is_list(item))
    return texts, num_ids, max(1, len(items))


def _num_chars(read: Read) -> int:
    """Characters of definitions that are inserted into the prompt."""
    names = ("tools", "functions", "response_format", "format")
    values = [value for name in names if isinstance(value := read(name), list | dict)]
    try:
        return sum(len(json.dumps(value, ensure_ascii=False)) for value in values)
    except (ValueError, TypeError, RecursionError):
        return 0
