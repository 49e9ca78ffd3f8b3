"""Tokenization of prompts as in training, in bounded time for texts of any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError, TailcastError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from predictors.manifest import TruncationSide

# A prompt is first clipped to this many characters per token of max_length; English has about 4.
FIRST_CHARS_PER_TOKEN = 16
# The limit is doubled while the text has too few tokens, up to this value; further characters are ignored.
MAX_CHARS_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Token ids of a prompt, int64 [tokens], including special tokens, and whether it was truncated."""

    ids: NDArray[np.int64]
    truncated: bool

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


def keep_ends(ids: NDArray[Any], max_length: int) -> NDArray[Any]:
    """Truncates token ids [n] in the middle; keeps the first half (rounded up) and the last half."""
    if len(ids) <= max_length:
        return ids
    last = max_length // 2
    return np.concatenate([ids[: max_length - last], ids[len(ids) - last :]])


class PromptTokenizer:
    """Truncating tokenizer of one artifact; thread-safe, and releases the GIL.

    `path` is a tokenizer.json. Prompts of more than `max_length` tokens, including special ones, are
    truncated on the left, right or in the middle. InputError if only special tokens remain.
    """

    def __init__(self, path: Path, *, max_length: int, truncation_side: TruncationSide) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except BaseException as error:  # Exception for a malformed file, or pyo3's PanicException
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            allowed = f"a tokenizer file of the package tokenizers ({' '.join(str(error).split())})"
            raise InputError(f"artifact file {path.name}", str(path), allowed) from error
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary_size: int = max(ids, default=-1) + 1
        special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if max_length <= special:
            raise InputError("max_length", max_length, f"more than the {special} special tokens")
        self.max_length = max_length
        self.truncation_side: TruncationSide = truncation_side
        self._tokenizer.no_padding()
        if truncation_side == "middle":
            self._tokenizer.no_truncation()
        else:
            self._tokenizer.enable_truncation(max_length, direction=truncation_side)

    def __call__(self, prompts: Sequence[str]) -> list[TokenizedPrompt]:
        """Token ids of each prompt; TailcastError if the tokenizer fails on a text. Equals truncation of the
        tokenized text if the tokenizer splits at white space; at most 64 characters per token are used."""
        encode = self._encode_ends if self.truncation_side == "middle" else self._encode
        try:
            return [encode(prompt) for prompt in prompts]
        except Exception as error:  # the binding raises plain Exception
            raise TailcastError(f"the tokenizer failed: {' '.join(str(error).split())}") from error

    def _encode(self, prompt: str) -> TokenizedPrompt:
        limit = FIRST_CHARS_PER_TOKEN * self.max_length
        last = MAX_CHARS_PER_TOKEN * self.max_length
        while True:
            text = _clip(prompt, limit, self.truncation_side)
            # encode() holds the GIL; encode_batch_fast() releases it.
            [encoding] = self._tokenizer.encode_batch_fast([text])
            is_clipped = len(text) < len(prompt)
            if not is_clipped or len(encoding.ids) >= self.max_length or limit >= last:
                truncated = is_clipped or bool(encoding.overflowing)
                return TokenizedPrompt(np.asarray(encoding.ids, dtype=np.int64), truncated)
            limit *= 2

    def _encode_ends(self, prompt: str) -> TokenizedPrompt:
        first, last = self.max_length - self.max_length // 2, self.max_length // 2
        limit = FIRST_CHARS_PER_TOKEN * first
        text = prompt
        while len(prompt) > 2 * limit:
            ends = [_clip(prompt, limit, "right"), _clip(prompt, limit, "left")]
            head, tail = (encoding.ids for encoding in self._tokenizer.encode_batch_fast(ends))
            # Special tokens and parts of split words at the inner ends must not be kept.
            if min(len(head), len(tail)) > self.max_length and max(map(len, ends)) < limit:
                return TokenizedPrompt(np.asarray([*head[:first], *tail[-last:]], dtype=np.int64), True)
            if limit >= MAX_CHARS_PER_TOKEN * first:
                text = "".join(ends)
                break
            limit *= 2
        [encoding] = self._tokenizer.encode_batch_fast([text])
        ids = np.asarray(encoding.ids, dtype=np.int64)
        truncated = len(text) < len(prompt) or len(ids) > self.max_length
        return TokenizedPrompt(keep_ends(ids, self.max_length), truncated)


def _clip(prompt: str, limit: int, dropped: TruncationSide) -> str:
    """At most `limit` characters of the end that is not dropped, split between words if possible."""
    if len(prompt) <= limit:
        return prompt
    if dropped == "right":
        text = prompt[:limit]
        gap = max(text.rfind(" "), text.rfind("\n"))
        return text[:gap] if gap > limit // 2 else text
    text = prompt[-limit:]
    gaps = [gap for gap in (text.find(" "), text.find("\n")) if gap >= 0]
    return text[min(gaps) :] if gaps and min(gaps) < limit // 2 else text
