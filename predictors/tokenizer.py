"""Prompt text to token ids, exactly as the model was trained, in bounded time for texts of any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import TruncationSide
from scheduler_core.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A prompt is first cut to this many characters per token the model reads (English has about 4) ...
FIRST_CUT_CHARS_PER_TOKEN = 16
# ... and the cut is doubled while it yields too few tokens, up to this: what lies beyond is never looked at.
LAST_CUT_CHARS_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Token ids int64 [tokens], special tokens included, and whether the prompt had more of them."""

    ids: NDArray[np.int64]
    truncated: bool

    @property
    def values(self) -> NDArray[np.int64]:
        """What the model reads: the token ids."""
        return self.ids

    @property
    def num_tokens(self) -> int:
        """Tokens that are read."""
        return len(self.ids)


class PromptTokenizer:
    """Truncating tokenizer of one artifact; thread-safe, and other Python threads run while it works.

    Args:
        path: `tokenizer.json`.
        max_length: Most tokens of a prompt, special tokens included.
        truncation_side: The end of a longer prompt that is dropped.

    Raises:
        InputError: The file is not a tokenizer, or `max_length` leaves no room for a prompt's own tokens.
    """

    def __init__(self, path: Path, *, max_length: int, truncation_side: TruncationSide) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingExtraError("tokenizers", "serve") from error
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises plain Exception for any malformed file
            raise InputError(
                "tokenizer", str(path), f"a tokenizer.json that can be read ({error})"
            ) from error
        special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if max_length <= special:
            raise InputError("max_length", max_length, f"more than the {special} special tokens")
        self.max_length = max_length
        self.truncation_side: TruncationSide = truncation_side
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length, direction=truncation_side)

    def __call__(self, prompts: Sequence[str]) -> list[TokenizedPrompt]:
        """Token ids of each prompt.

        Equal to tokenising the whole text and truncating, as long as the tokenizer splits at white space; a text with
        more than 64 characters per token over its whole length is read only that far.
        """
        return [self._encode(prompt) for prompt in prompts]

    def _encode(self, prompt: str) -> TokenizedPrompt:
        limit = FIRST_CUT_CHARS_PER_TOKEN * self.max_length
        last = LAST_CUT_CHARS_PER_TOKEN * self.max_length
        while True:
            text = self._cut(prompt, limit)
            # encode() holds the interpreter lock, the batch form releases it.
            [encoding] = self._tokenizer.encode_batch_fast([text])
            is_cut = len(text) < len(prompt)
            if not is_cut or len(encoding.ids) >= self.max_length or limit >= last:
                truncated = is_cut or bool(encoding.overflowing)
                return TokenizedPrompt(np.asarray(encoding.ids, dtype=np.int64), truncated)
            limit *= 2

    def _cut(self, prompt: str, limit: int) -> str:
        """At most `limit` characters from the side that is kept, cut between words where there is a gap to cut at."""
        if len(prompt) <= limit:
            return prompt
        if self.truncation_side == "right":
            text = prompt[:limit]
            at = max(text.rfind(" "), text.rfind("\n"))
            return text[:at] if at > limit // 2 else text
        text = prompt[-limit:]
        gaps = [at for at in (text.find(" "), text.find("\n")) if at >= 0]
        return text[min(gaps) :] if gaps and min(gaps) < limit // 2 else text
