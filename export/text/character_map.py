"""What a WordPiece tokenizer does to each character before it looks for words: drop, change, or set apart.

The tokenizer's own normalisation and pre-tokenisation are asked about every Unicode character, so that the graph has the
very same tables; that they treat characters one by one is what makes it possible, and what is checked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scheduler_core.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NO_MODEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
# A letter that no normalisation changes.
_LETTER = "a"
# Runs of at least so many characters with the same fate become one range of a pattern.
_LONG_RUN = 64
# A word that no normalisation changes, and how many characters are asked about at a time.
_MARK = "zz"
_BLOCK = 4096
_SURROGATES = range(0xD800, 0xE000)
# Planes 4 to 13, of which Unicode has given away nothing: two characters of each block are asked about.
_UNASSIGNED = range(0x40000, 0xE0000)
_PROBES = ("Ab c", "a\u0301\u0323B", "İẞ ΣΑΣ", "x\u00a0y\u3000z", "北京-한국", "\u200b a\ufeffb", "ÀÉ.no")


@dataclass(frozen=True, slots=True)
class CharacterMap:
    """The fate of every character but NUL.

    Attributes:
        dropped: Ranges, first and last code point, of characters that vanish.
        apart: Ranges of characters that become words of their own.
        changed: All other characters that do not stay as they are -> what they become; a space ends a word.
    """

    dropped: tuple[tuple[int, int], ...]
    apart: tuple[tuple[int, int], ...]
    changed: Mapping[str, str]

    def apply(self, text: str) -> str:
        """What the graph does, for checking."""
        return "".join(self._one(character) for character in text if character != "\0")

    def _one(self, character: str) -> str:
        code = ord(character)
        if any(first <= code <= last for first, last in self.dropped):
            return ""
        if any(first <= code <= last for first, last in self.apart):
            return f" {character} "
        return self.changed.get(character, character)


def character_map(tokenizer: Tokenizer) -> CharacterMap:
    """Asks the tokenizer about every character; takes seconds, once for each kind of normalisation.

    Raises:
        InputError: It does not treat characters one by one.
    """
    content = json.loads(tokenizer.to_str())
    left_out: dict[str, Any] = {
        "added_tokens": [],
        "model": _NO_MODEL,
        "post_processor": None,
        "decoder": None,
    }
    return _asked(json.dumps(content | left_out))


@functools.lru_cache(maxsize=8)
def _asked(content: str) -> CharacterMap:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content)
    dropped: list[tuple[int, int]] = []
    apart: list[tuple[int, int]] = []
    changed: dict[str, str] = {}
    fates = _fates(tokenizer)
    for first, last, fate in _runs(fates):
        is_long = last - first + 1 >= _LONG_RUN
        if fate == "dropped" and is_long:
            dropped.append((first, last))
        elif fate == "apart" and is_long:
            apart.append((first, last))
        else:
            changed |= {chr(code): fates[code] for code in range(first, last + 1)}
    found = CharacterMap(tuple(dropped), tuple(apart), changed)
    for probe in _PROBES:
        if found.apply(probe).split() != words_of(tokenizer, probe):
            raise InputError("tokenizer.json", probe, "normalisation that treats characters one by one")
    return found


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """The tokenizer's words, before it looks them up."""
    normalized = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [normalized]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]


def _fates(tokenizer: Tokenizer) -> dict[int, str]:
    """Code point -> what the character becomes; what stays as it is is left out."""
    found: dict[int, str] = {}
    for start in range(0, 0x110000, _BLOCK):
        step = _BLOCK - 1 if start in _UNASSIGNED else 1
        codes = [code for code in range(start, start + _BLOCK, step) if code and code not in _SURROGATES]
        if not codes:
            continue
        between = f" {_MARK} "
        text = between.join(f"{_LETTER}{chr(code)}{_LETTER}" for code in codes)
        words = " ".join(words_of(tokenizer, text)).split(between)
        if len(words) != len(codes):
            raise InputError(
                "tokenizer.json", chr(codes[0]), "normalisation that treats characters one by one"
            )
        found |= {
            code: word[1:-1]
            for code, word in zip(codes, words, strict=True)
            if word != f"{_LETTER}{chr(code)}{_LETTER}"
        }
    return found


def _runs(fates: Mapping[int, str]) -> Iterator[tuple[int, int, str]]:
    """(first, last, fate) of neighbours with the same fate: dropped, apart or changed."""
    first, last, current = 0, -1, ""
    for code in sorted(fates):
        becomes = fates[code]
        kinds = {"": "dropped", f" {chr(code)} ": "apart"}
        fate = kinds.get(becomes, "changed")
        if fate != current or code != last + 1:
            if current:
                yield first, last, current
            first, current = code, fate
        last = code
    if current:
        yield first, last, current
