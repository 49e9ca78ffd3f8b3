"""Conversations of the training data: messages and options of the public sets' prompts, and copies of bare prompts with
system prompts and options.

The sets store a request as one text. `request_of` restores its messages, as far as the set has them: the models' own turns
were left out of all sets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from scheduler_core.prediction.api_request import read_request
from scheduler_core.prediction.prompt_text import SYSTEM, TOOL, USER, Message, user_text

Conversation = tuple[Message, ...]
#: Stands for an answer of the model in the sets' prompts.
OMITTED = "\n\n[assistant turn omitted]\n\n"
_TOOL_RESULT = "[tool result]"
#: Set -> the tools that each of its requests has, by the set's public code.
_TOOLS = {
    "tau_bench_airline": (
        *("book_reservation", "calculate", "cancel_reservation", "get_reservation_details"),
        *("get_user_details", "list_all_airports", "search_direct_flight", "search_onestop_flight"),
        *("send_certificate", "think", "transfer_to_human_agents", "update_reservation_baggages"),
        *("update_reservation_flights", "update_reservation_passengers"),
    ),
}
_SEND_MESSAGE = "send_message_to_human"
_SYSTEM_AND_USER = re.compile(r"\s*System[^\n]{0,40}?:?[ \n](.*?)\n+\s*User[^\n]{0,20}:?\n(.*)", re.DOTALL)
_QUESTION = re.compile(r"\n\n(?=Given the family relationships:|Biorąc pod uwagę poniższe)")
#: Mistral Medium is the name of a model.
_EFFORT = re.compile(r"(?<!istral)[:-](low|medium|high|xhigh)(?:-long)?$")
_THINKING = re.compile(r"[:-]?(no)?(?:think|thk)(?:ing)?(?:-\d+k)?$|-thinking-")
#: System prompts that many applications send, and that hardly change an answer.
NEUTRAL = (
    "You are a helpful assistant.",
    "You are a helpful, respectful and honest assistant.",
    "You are an AI assistant that helps people find information.",
    "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2023-10\nCurrent date: 2024-05-13",
    "You are a knowledgeable assistant. Answer the user's questions accurately.",
    "You are a friendly chatbot.",
    "You are an assistant for a software company. Be polite. If you do not know the answer, say so.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "A chat between a curious user and an artificial intelligence assistant.",
    "You are a professional assistant who supports our customers.",
    "Du bist ein hilfreicher Assistent.",
    "Eres un asistente útil.",
    "あなたは役に立つアシスタントです。",
    "你是一个乐于助人的助手。",
    "Tu es un assistant utile.",
)
#: Limits for the lengths of copies with the option min_tokens.
_MIN_TOKENS = (16, 1_000)


def conversation_of(dataset: str, prompt: str, model: str, system_prompt: str | None = None) -> Conversation:
    """The messages of a row of a public set; its options are the first.

    Args:
        dataset: Name of the set's file.
        prompt: Its text.
        model: Name of the served model in the set, which may tell how much it thinks.
        system_prompt: System prompt, if the set has it as a column.
    """
    turns = [(TOOL if text.startswith(_TOOL_RESULT) else USER, text) for text in prompt.split(OMITTED)]
    messages = [(role, text.removeprefix(_TOOL_RESULT).strip()) for role, text in turns]
    tools: Sequence[str] = _TOOLS.get(dataset, ())
    if dataset == "ai_independence_bench" and len(messages) > 1:
        messages[0] = (SYSTEM, messages[0][1])
        tools = (_SEND_MESSAGE,) if _SEND_MESSAGE in messages[0][1] else ()
    elif dataset == "hallucin_pm" and (match := _SYSTEM_AND_USER.fullmatch(prompt)):
        messages = [(SYSTEM, match[1].strip()), (USER, match[2].strip())]
    elif dataset == "farel_bench" and len(parts := _QUESTION.split(prompt, maxsplit=1)) == 2:
        messages = [(SYSTEM, parts[0]), (USER, parts[1])]
    if system_prompt is not None:
        messages.insert(0, (SYSTEM, system_prompt.strip()))
    if len(messages) == 1:
        messages = [(USER, prompt)]  # as it is
    options = thinking(model)
    if tools:
        options["tools"] = [{"type": "function", "function": {"name": name}} for name in tools]
    return conversation(messages, options)


def conversation(messages: Sequence[tuple[str, str]], options: Mapping[str, Any]) -> Conversation:
    """The messages that have a text, after the options in OpenAI's names."""
    body: dict[str, Any] = dict(options)
    body["messages"] = [{"role": role, "content": text} for role, text in messages if text]
    return read_request(body).conversation


def is_bare(messages: Conversation) -> bool:
    """Whether a conversation is a single user message without options."""
    return len(messages) == 1 and messages[0].role == USER


def thinks(model: str) -> bool:
    """Whether the name of a served model in a set says that it was run with thinking."""
    options = thinking(model)
    return bool(options) and options != {"chat_template_kwargs": {"enable_thinking": False}}


def thinking(model: str) -> dict[str, Any]:
    """Reasoning effort and thinking, where the name of a served model in a set says how it was run."""
    name = model.lower()
    if match := _EFFORT.search(name):
        return {"reasoning_effort": match[1]}
    if match := _THINKING.search(name):
        return {"chat_template_kwargs": {"enable_thinking": not match[1]}}
    return {}


def columns(conversations: Sequence[Conversation]) -> dict[str, list[Any]]:
    """Columns `prompt` (last user text) and `messages` (None for a bare prompt) of a training file."""
    return {
        "prompt": [user_text(messages) for messages in conversations],
        "messages": [
            None if is_bare(messages) else [{"role": role, "content": text} for role, text in messages]
            for messages in conversations
        ],
    }


def with_options(rows: pd.DataFrame, number: int, seed: int) -> pd.DataFrame:
    """Copies of rows with bare prompts, as requests with a neutral system prompt or an option: their lengths are those of
    the bare prompt, but at least min_tokens where that is the option.

    Args:
        rows: Rows with `prompt_id`, `prompt`, `output_tokens` and `finished`.
        number: Maximum number of prompts to copy.
        seed: Seed of the choice of prompts, system prompts and options.
    """
    rng = np.random.default_rng(seed)
    ids = rows.prompt_id.unique()
    chosen = set(rng.permutation(ids)[:number].tolist())
    parts = []
    for prompt_id, group in rows[rows.prompt_id.isin(chosen)].groupby("prompt_id", sort=True):
        system = NEUTRAL[int(rng.integers(len(NEUTRAL)))] if rng.random() < 0.7 else ""
        options: dict[str, Any] = {}
        kind = rng.random()
        if kind < 0.25:
            options["min_tokens"] = int(np.exp(rng.uniform(*np.log(_MIN_TOKENS))))
        elif kind < 0.35:
            options["n"] = int(rng.integers(2, 9))
        elif kind < 0.45 or not system:
            options["stop"] = [str(rng.choice(["###", "</s>", "User:", "<|im_end|>", "\n\n\n"]))]
        least = options.get("min_tokens", 1)
        messages = conversation([(SYSTEM, system), (USER, group.prompt.iloc[0])], options)
        copies = group.assign(
            prompt_id=f"{prompt_id}-copy",
            **{name: values * len(group) for name, values in columns([messages]).items()},
        )
        copies["output_tokens"] = [np.maximum(values, least) for values in copies.output_tokens]
        parts.append(copies)
    return pd.concat(parts, ignore_index=True)
