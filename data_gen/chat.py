"""A prompt as the tokens that a model is given, for backends that run in this process."""

from __future__ import annotations

from typing import Any

from data_gen.prompts import Prompt


class TemplateError(ValueError):
    """The model's chat template does not take such a conversation, e.g. one with a system message."""


def prompt_token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, with the model's chat template if it has one, else of the texts one after the other.

    Args:
        tokenizer: A tokenizer of transformers.
        prompt: A single message or a conversation.

    Raises:
        TemplateError: The template refuses the conversation.
    """
    if tokenizer.chat_template is None:
        return list(tokenizer("\n\n".join(message.content for message in prompt.chat))["input_ids"])
    import jinja2

    messages = [{"role": message.role, "content": message.content} for message in prompt.chat]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise TemplateError(str(error)) from error
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
