"""Tokenization of prompts as in training, in bounded time for texts of any length."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.requested_amount import with_amount
from scheduler_core.shell.files import existing_file
from scheduler_core.shell.json_text import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TruncationSide = Literal["left", "right", "middle"]
TRUNCATION_SIDES: tuple[str, ...] = get_args(TruncationSide)
# A prompt is first clipped to this many characters per token of max_length; English has about 4.
FIRST_CHARS_PER_TOKEN = 16
# The limit is doubled while the text has too few tokens, up to this value; further characters are ignored.
MAX_CHARS_PER_TOKEN = 64
#: Maximum factor by which the replacements of a tokenizer may lengthen a text.
MAX_EXPANSION = 256
_MAX_REPEATS = 10
_CHARACTER = re.compile(r"\\[pPx]\{[^}]*\}|\\.|[^\\]", re.DOTALL)
_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]*)(,?)([0-9]*)\}")


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
    truncated on the left, right or in the middle. InputError if only special tokens remain, if a regular
    expression may take exponential time (see `is_ambiguous`), or if replacements lengthen a text more than
    `MAX_EXPANSION` times. With `amounts`, texts are those `with_amount`. A regular expression of quadratic time is not noticed; prompts are clipped.
    """

    def __init__(
        self, path: Path, *, max_length: int, truncation_side: TruncationSide, amounts: bool = False
    ) -> None:
        from tokenizers import Tokenizer

        _check_work(path)
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
        self.amounts = amounts
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
            return [encode(with_amount(prompt) if self.amounts else prompt) for prompt in prompts]
        except BaseException as error:  # plain Exception, or pyo3's PanicException: too much backtracking
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
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


def _check_work(path: Path) -> None:
    """Raises InputError if the time or memory to tokenize a short text is not bounded, or there is no such file."""
    field = f"artifact file {path.name}"
    try:
        content = parse_json(existing_file(path, field).read_bytes())
    except InputError:
        raise
    except ValueError:  # the package tokenizers says what is wrong
        return
    parts = [content.get("normalizer"), content.get("pre_tokenizer")] if isinstance(content, dict) else []
    expansion = 1
    for step in _steps(parts):
        pattern = step.get("Regex")
        if isinstance(pattern, str) and is_ambiguous(pattern):
            allowed = "regular expressions without repeated groups that match a text in several ways"
            raise InputError(field, pattern, allowed)
        expansion *= _expansion(step)
        if expansion > MAX_EXPANSION:
            allowed = f"replacements that lengthen a text at most {MAX_EXPANSION} times"
            raise InputError(field, str(step.get("type")), allowed)


def _steps(value: object) -> Iterator[dict[str, Any]]:
    """All mappings in a part of a tokenizer.json."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _steps(item)


def _expansion(step: dict[str, Any]) -> int:
    """Maximum factor by which a step lengthens a text. Normal forms and case mappings, which repeat without effect,
    count as 1."""
    match step:
        case {"type": "Replace", "content": str(text)} | {"type": "Prepend", "prepend": str(text)}:
            return max(1, len(text))
        case {"type": "ByteLevel"}:
            return 4
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            try:
                data = base64.b64decode(encoded)
            except ValueError:  # the package tokenizers says what is wrong
                return 1
            texts = data[4 + int.from_bytes(data[:4], "little") :]
            return max(1, *map(len, texts.split(b"\0")))
    return 1


def is_ambiguous(pattern: str) -> bool:
    """Whether a regular expression repeats a group that has an alternative or a repetition of varying length itself, as in
    `(a+)+` and `(a|aa)*`, the usual cause of exponential backtracking."""
    varies = [False]  # for each open group
    position = 0
    while position < len(pattern):
        closed = False
        character = _CHARACTER.match(pattern, position)
        if character is None:  # a backslash at the end
            return False
        position = character.end()
        match character[0]:
            case "[":
                position = _class_end(pattern, position)
            case "(":
                varies.append(False)
                position += pattern.startswith("?", position)
                continue
            case ")" if len(varies) > 1:
                closed = varies.pop()
                varies[-1] |= closed
            case "|":
                varies[-1] = True
                continue
        quantifier = _QUANTIFIER.match(pattern, position)
        if quantifier is None:
            continue
        position = quantifier.end()
        low, comma, high = quantifier.groups()
        most = {"?": 1, "*": None, "+": None}.get(quantifier[0], int(high or low or 0))
        if comma and not high:
            most = None
        if closed and (most is None or most >= _MAX_REPEATS):
            return True
        varies[-1] |= low is None or bool(comma)
    return False


def _class_end(pattern: str, position: int) -> int:
    """Position after a character class whose opening bracket is before `position`; classes may be nested."""
    position += pattern.startswith("^", position)
    position += pattern.startswith("]", position)
    while (character := _CHARACTER.match(pattern, position)) is not None:
        position = character.end()
        if character[0] == "]":
            break
        if character[0] == "[":
            position = _class_end(pattern, position)
    return position
