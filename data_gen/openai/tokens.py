"""How long an answer is, exactly: from the server's counts, or from its text if that agrees with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from data_gen.openai.options import OpenAIOptions
from data_gen.openai.wire import Choice, Reply, ReplyError
from data_gen.prompts import Prompt
from scheduler_core.errors import InputError, MissingExtraError

NO_COUNT = "no_token_count"
MISMATCH = "tokenizer_mismatch"


class LocalTokenizer:
    """The model's tokenizer on this machine: a folder as transformers saves it, or a bare tokenizer.json."""

    def __init__(self, path: str, template_options: dict[str, Any]) -> None:
        self._template_options = template_options
        self._fast: Any = None
        self._tokenizer: Any = None
        try:
            if Path(path).is_file():
                from tokenizers import Tokenizer

                self._fast = Tokenizer.from_file(path)
            else:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(path)
        except ImportError as error:
            raise MissingExtraError(error.name or "tokenizers", "gen") from error
        except Exception as error:  # The readers raise bare exceptions.
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                "tokenizer", path, f"a tokenizer folder or a tokenizer.json ({reason})"
            ) from error

    def count(self, text: str) -> int:
        """Tokens of a text without any that mark its ends."""
        if self._fast is not None:
            return len(self._fast.encode(text, add_special_tokens=False).ids)
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def count_prompt(self, prompt: Prompt, *, chat: bool) -> int | None:
        """Tokens of a prompt as the server should see it; None if that needs a chat template and there is none."""
        if not chat:
            if self._fast is not None:
                return len(self._fast.encode(prompt.text).ids)
            return len(self._tokenizer.encode(prompt.text))
        if self._fast is not None or self._tokenizer.chat_template is None:
            return None
        messages = [{"role": message.role, "content": message.content} for message in prompt.chat]
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._template_options
        )
        return len(self._tokenizer.encode(rendered, add_special_tokens=False))


class TokenCounter:
    """Finds the length of every answer of a reply, or says why it cannot be known.

    Args:
        options: Where lengths come from.
        max_tokens: Cap on an answer.
        on_server: Counts the tokens of a text by the server's tokenizer.
        counters: Gets tokenizer_mismatch and approximate_counts.
    """

    def __init__(
        self,
        options: OpenAIOptions,
        max_tokens: int,
        on_server: Callable[[str], Awaitable[int]],
        counters: Counter[str],
    ) -> None:
        self._options = options
        self._max_tokens = max_tokens
        self._on_server = on_server
        self._counters = counters
        template_options = options.body.get("chat_template_kwargs") or {}
        self._local = LocalTokenizer(options.tokenizer, template_options) if options.tokenizer else None

    def check_prompt(self, prompt: Prompt, prompt_tokens: int | None) -> None:
        """Counts a tokenizer_mismatch if the local tokenizer sees another prompt length than the server."""
        if self._local is None or prompt_tokens is None:
            return
        expected = self._local.count_prompt(prompt, chat=self._options.api == "chat")
        if expected is not None and expected != prompt_tokens:
            self._counters[MISMATCH] += 1

    async def count(self, reply: Reply) -> list[int]:
        """Lengths in the order of the choices, end markers included.

        Raises:
            ReplyError: no_token_count or tokenizer_mismatch.
        """
        choices, total = reply.choices, reply.completion_tokens
        if len(choices) == 1 and total:
            return [total]
        listed = [choice.counted for choice in choices if choice.counted]
        if len(listed) == len(choices):
            agreed = _agreeing(listed, choices, total)
            if agreed is not None:
                return agreed
        return await self._from_texts(choices, total)

    async def _from_texts(self, choices: Sequence[Choice], total: int | None) -> list[int]:
        options = self._options
        by_server = options.count_by == "server_tokenizer"
        if not by_server and self._local is None:
            missing = "no usage" if total is None else f"usage of {total} tokens over {len(choices)} answers"
            raise ReplyError(NO_COUNT, f"the server gave {missing} and no list of tokens", retry=False)
        if not by_server and options.count_by != "tokenizer" and not options.approximate_counts:
            raise ReplyError(NO_COUNT, "the server did not count, and approximate_counts is off", retry=False)
        counts = []
        for choice in choices:
            if by_server:
                counts.append(await self._on_server(choice.text))
            else:
                assert self._local is not None
                counts.append(self._local.count(choice.text))
        marked = [
            self._max_tokens if choice.finish_reason == "length" else count + 1
            for count, choice in zip(counts, choices, strict=True)
        ]
        if total is not None and sum(marked) == total:
            return marked
        if options.approximate_counts:
            self._counters["approximate_counts"] += len(choices)
            return marked
        if total is None:
            raise ReplyError(
                NO_COUNT, "the server gave no usage to check the count of the text against", retry=False
            )
        self._counters[MISMATCH] += 1
        raise ReplyError(MISMATCH, f"the texts have {sum(marked)} tokens, usage says {total}", retry=False)


def _agreeing(listed: list[int], choices: Sequence[Choice], total: int | None) -> list[int] | None:
    """Listed lengths that add up to `total`; engines differ in whether they list the end marker."""
    if total is None or sum(listed) == total:
        return listed
    marked = [count + (choice.finish_reason == "stop") for count, choice in zip(listed, choices, strict=True)]
    return marked if sum(marked) == total else None
