"""Name resolution and prompt tokenization for models that run in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_gen.backend import SampleFailure, SamplingSettings, Work, WorkResult
from scheduler_core.shell.files import PACKAGE_SCHEME, inside_package


def resolve_model(model: str) -> str:
    """Path or hub name of a model; `package:NAME/PATH` is a file or folder inside an installed package, InputError if it
    does not exist."""
    return str(inside_package(model, "model")) if model.startswith(PACKAGE_SCHEME) else model


def model_name(model: str) -> str:
    """Default name of the served model in samples: the last part of `model`."""
    return Path(model.rstrip("/")).name.removesuffix(".gguf")


def tokenize_within(
    tokenizer: Any, work: Work, settings: SamplingSettings, context_tokens: int
) -> tuple[list[int], WorkResult | None]:
    """Tokenizes a prompt with the chat template of the tokenizer, or without one, joined by blank lines.

    Returns the token ids, and failures if the chat template rejects the prompt or prompt and max_tokens exceed the context.
    """
    import jinja2

    messages = [{"role": message.role, "content": message.text} for message in work.prompt.chat]
    if tokenizer.chat_template is None:
        ids = list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])
    else:
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:  # e.g. it does not support system messages
            return [], _failed(work, None, "template", str(error))
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(ids) + settings.max_tokens <= context_tokens:
        return ids, None
    reason = f"{len(ids)} prompt + {settings.max_tokens} output tokens exceed the context of {context_tokens}"
    return ids, _failed(work, len(ids), "too_long", reason)


def _failed(work: Work, prompt_tokens: int | None, kind: str, reason: str) -> WorkResult:
    failures = tuple(SampleFailure(index, reason, kind) for index in work.indices)
    return WorkResult(work.prompt, prompt_tokens, (), failures)
