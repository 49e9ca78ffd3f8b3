"""The exact length of an output: from the server's counts, or from its text if that agrees with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from data_gen.openai.options import OpenAIOptions
from data_gen.openai.responses import ResponseChoice, ResponseError, ServerResponse
from scheduler_core.errors import InputError, MissingExtraError

NO_COUNT = "no_token_count"
MISMATCH = "tokenizer_mismatch"


def load_tokenizer(path: str) -> Callable[[str], int]:
    """Counts the tokens of a text, by a folder as transformers saves it, or a bare tokenizer.json.

    Raises:
        InputError: There is no such tokenizer.
        MissingExtraError: The library that reads it is not installed.
    """
    try:
        if Path(path).is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(path)
            return lambda text: len(fast.encode(text, add_special_tokens=False).ids)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
    except ImportError as error:
        raise MissingExtraError(error.name or "tokenizers", "gen") from error
    except Exception as error:  # The readers raise bare exceptions.
        reason = " ".join(str(error).split())[:200]
        raise InputError("tokenizer", path, f"a tokenizer folder or a tokenizer.json ({reason})") from error


class TokenCounter:
    """Counts the tokens of every choice of a response, or raises why they cannot be known.

    Args:
        options: Where lengths come from.
        max_tokens: Longest output.
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
        self._local = load_tokenizer(options.tokenizer) if options.tokenizer else None

    async def count(self, response: ServerResponse) -> list[int]:
        """Lengths in the order of the choices, end markers included.

        Raises:
            ResponseError: no_token_count or tokenizer_mismatch.
        """
        choices, total = response.choices, response.completion_tokens
        if len(choices) == 1 and total:
            return [total]
        listed = [choice.listed_tokens for choice in choices if choice.listed_tokens]
        if len(listed) == len(choices):
            agreed = _agreeing(listed, choices, total)
            if agreed is not None:
                return agreed
        return await self._from_texts(choices, total)

    async def _from_texts(self, choices: Sequence[ResponseChoice], total: int | None) -> list[int]:
        options = self._options
        by_server = options.count_by == "server_tokenizer"
        if not by_server and self._local is None:
            missing = "no usage" if total is None else f"usage of {total} tokens over {len(choices)} choices"
            raise ResponseError(NO_COUNT, f"the server gave {missing} and no list of tokens", retry=False)
        if not by_server and options.count_by != "tokenizer" and not options.approximate_counts:
            raise ResponseError(
                NO_COUNT, "the server did not count, and approximate_counts is off", retry=False
            )
        counts = []
        for choice in choices:
            if by_server:
                counts.append(await self._on_server(choice.text))
            else:
                assert self._local is not None
                counts.append(self._local(choice.text))
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
            raise ResponseError(
                NO_COUNT, "the server gave no usage to check the count of the text against", retry=False
            )
        self._counters[MISMATCH] += 1
        raise ResponseError(MISMATCH, f"the texts have {sum(marked)} tokens, usage says {total}", retry=False)


def _agreeing(listed: list[int], choices: Sequence[ResponseChoice], total: int | None) -> list[int] | None:
    """Listed lengths that add up to `total`; engines differ in whether they list the end marker."""
    if total is None or sum(listed) == total:
        return listed
    marked = [count + (choice.finish_reason == "stop") for count, choice in zip(listed, choices, strict=True)]
    return marked if sum(marked) == total else None
