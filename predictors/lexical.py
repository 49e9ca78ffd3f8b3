"""Lexical features of a prompt: what can be counted in its text in some tens of microseconds, with numpy alone.

They feed gradient-boosted trees, the cheap length predictor and the fallback where no encoder is affordable. All work
is on UTF-8 bytes: one histogram of bytes, and one pass over lower-case words.

| features | meaning |
|---|---|
| log_chars, log_words, log_lines | ln(1 + count) of characters, words (runs of letters and digits), lines |
| log_first_line, log_last_line | ln(1 + bytes) of the first and the last line that is read |
| mean_word, distinct_words | mean bytes of a word; share of words that occur for the first time |
| digits, capitals, punctuation, spaces, braces | share of bytes: digits, A-Z, other ASCII marks, white space, ()[]{}<>=;_ |
| latin_extended, cyrillic_greek, arabic_hebrew, indic, cjk, hangul, emoji | share of characters of these scripts, by the first byte of a character |
| questions, exclamations, colons, quotes | ln(1 + count) of ? ! : and quotation marks |
| ends_question, ends_colon | 1 if the text ends so, white space aside |
| fences, indents, bullets, turns, links | ln(1 + count) of ```; indented lines; list items; speaker labels; http |
| first_question, first_command | 1 if the first word asks (what, why, ...) or commands (write, list, ...) |
| asks_list, asks_text, asks_explanation, asks_summary, asks_translation, asks_class, asks_code, asks_rewrite, asks_comparison, asks_number | 1 if a word of that kind occurs anywhere |
| asks_fact, asks_how | 1 if who, when, where, which; or how, why occur |
| says_short, says_long, says_steps | 1 if a word for a short or a long answer, or "step by step", occurs |
| number, number_words, number_sentences, number_items | ln(1 + n) of the first number among the first 24 words; and of the number before a word such as words, sentences or paragraphs, examples or steps; 0 if none |
| yes_no, choices, structured | 1 if it asks for yes or no (true or false, one word); lists options a) b) c); wants JSON, a table and the like |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError

#: Changes whenever a feature's name, order or value changes; trees fit the version they were trained with only.
FEATURE_VERSION = 1
MAX_CHARS = 20_000

#: Words that speak for a kind of answer, lower case, in ASCII.
_KINDS: dict[str, str] = {
    "asks_list": "list enumerate name give suggest provide generate brainstorm ideas examples",
    "asks_text": "story essay poem article blog letter email speech song lyrics paragraph script novel review report",
    "asks_explanation": "explain describe discuss elaborate outline tell",
    "asks_summary": "summarize summarise summary summarized tldr shorten condense",
    "asks_translation": "translate translation translated",
    "asks_class": "classify categorize categorise identify label sentiment detect determine extract",
    "asks_code": "code python function implement program class algorithm sql javascript java html api solution",
    "asks_rewrite": "rewrite rephrase edit correct fix paraphrase convert replace reword transform",
    "asks_comparison": "compare contrast difference differences versus vs pros cons advantages",
    "asks_number": "calculate compute solve find many much sum total average",
    "asks_fact": "who when where which whose",
    "asks_how": "how why",
    "says_short": "brief briefly short concise concisely shortly single only just simple quick",
    "says_long": "detailed detail details comprehensive thorough long depth extensive elaborate complete full",
    "structured": "json xml yaml csv table markdown tabular",
}
_QUESTION_WORDS = frozenset(
    b"what who when where which whose why how is are was were do does did can could should would will".split()
)
_COMMANDS = frozenset(
    b"write list explain describe summarize summarise translate classify generate create give name identify "
    b"rewrite edit find make design compose suggest provide discuss compare calculate convert construct "
    b"develop implement tell outline come imagine act complete fix correct analyze analyse evaluate".split()
)
_UNITS: dict[str, frozenset[bytes]] = {
    "number_words": frozenset(b"word words characters tokens letters".split()),
    "number_sentences": frozenset(b"sentence sentences line lines paragraph paragraphs page pages".split()),
    "number_items": frozenset(
        b"examples example items item points point steps step ways ideas reasons tips bullet bullets questions "
        b"things benefits options names facts applications strategies titles features".split()
    ),
}
_NUMBER_WORDS: dict[bytes, int] = {
    word: value
    for value, word in enumerate(
        b"one two three four five six seven eight nine ten eleven twelve".split(), start=1
    )
} | {b"twenty": 20, b"fifty": 50, b"hundred": 100, b"single": 1, b"couple": 2}
_EARLY_WORDS = 24

_LEADING: tuple[str, ...] = (
    "log_chars",
    "log_words",
    "log_lines",
    "log_first_line",
    "log_last_line",
    "mean_word",
    "distinct_words",
)
_SHARES: tuple[str, ...] = ("digits", "capitals", "punctuation", "spaces", "braces")
_SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "latin_extended": ((0xC3, 0xC9),),
    "cyrillic_greek": ((0xCD, 0xD4),),
    "arabic_hebrew": ((0xD6, 0xDB),),
    "indic": ((0xE0, 0xE0),),
    "cjk": ((0xE3, 0xE9),),
    "hangul": ((0xEA, 0xED),),
    "emoji": ((0xF0, 0xF0),),
}
_COUNTS: tuple[str, ...] = ("questions", "exclamations", "colons", "quotes")
_REST: tuple[str, ...] = (
    "ends_question",
    "ends_colon",
    "fences",
    "indents",
    "bullets",
    "turns",
    "links",
    "first_question",
    "first_command",
    *_KINDS,
    "says_steps",
    "number",
    *_UNITS,
    "yes_no",
    "choices",
)
#: Names of the features in the order of the columns.
FEATURE_NAMES: tuple[str, ...] = (*_LEADING, *_SHARES, *_SCRIPTS, *_COUNTS, *_REST)

_VOCABULARIES = tuple(frozenset(words.encode().split()) for words in _KINDS.values())
_UNIT_SETS = tuple(_UNITS.values())
_ALL_UNITS = frozenset().union(*_UNIT_SETS)
_WORD_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789'")


def _words_table() -> bytes:
    """Bytes to what words are made of: lower-case letters, digits, apostrophes and all beyond ASCII; else a space."""
    table = bytearray(b" " * 128 + bytes(range(128, 256)))
    for byte in range(128):
        lower = bytes([byte]).lower()[0]
        if lower in _WORD_BYTES:
            table[byte] = lower
    return bytes(table)


def _classes() -> NDArray[np.float64]:
    """Byte -> counted in which of the shares, scripts and counts [256, C]."""
    columns = {name: np.zeros(256) for name in (*_SHARES, *_SCRIPTS, *_COUNTS)}
    columns["digits"][list(b"0123456789")] = 1
    columns["capitals"][ord("A") : ord("Z") + 1] = 1
    columns["spaces"][list(b" \t\n\r\v\f")] = 1
    columns["braces"][list(b"()[]{}<>=;_")] = 1
    columns["punctuation"][list(b"!\"#$%&'*+,-./:?@\\^`|~")] = 1
    for name, ranges in _SCRIPTS.items():
        for first, last in ranges:
            columns[name][first : last + 1] = 1
    columns["questions"][ord("?")] = 1
    columns["exclamations"][ord("!")] = 1
    columns["colons"][ord(":")] = 1
    columns["quotes"][list(b"\"'")] = 1
    return np.stack(list(columns.values()), axis=1)


_TABLE = _words_table()
_CLASSES = _classes()
_AT_SHARES = len(_LEADING)
_AT_COUNTS = _AT_SHARES + len(_SHARES) + len(_SCRIPTS)
_AT_REST = _AT_COUNTS + len(_COUNTS)


class LexicalFeatures:
    """Prompts to features; without state, so that one object serves all threads."""

    names = FEATURE_NAMES
    version = FEATURE_VERSION

    def extract(self, prompts: Sequence[str], max_chars: int = MAX_CHARS) -> NDArray[np.float32]:
        """Features float32 [N, F] of N prompts, F = len(FEATURE_NAMES); all finite, for any text.

        Args:
            prompts: N texts; any Unicode, lone surrogates and the empty text included.
            max_chars: Of a longer text the first and the last half of so many characters are read. Its number of
                characters still counts in full.

        Raises:
            InputError: `max_chars` is below 2.
        """
        if max_chars < 2:
            raise InputError("max_chars", max_chars, "a whole number of at least 2")
        features = np.zeros((len(prompts), len(FEATURE_NAMES)))
        histograms = np.empty((len(prompts), 256))
        for row, prompt in enumerate(prompts):
            text = prompt
            if len(prompt) > max_chars:
                half = max_chars // 2
                text = prompt[:half] + "\n" + prompt[-half:]
            data = text.encode("utf-8", "surrogatepass")
            histograms[row] = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
            features[row, :_AT_SHARES], features[row, _AT_REST:] = _read(data, len(prompt))
        counts = histograms @ _CLASSES
        sizes = np.maximum(histograms.sum(axis=1, keepdims=True), 1)
        chars = np.maximum(sizes - histograms[:, 0x80:0xC0].sum(axis=1, keepdims=True), 1)
        num_shares, num_scripts = len(_SHARES), len(_SCRIPTS)
        features[:, _AT_SHARES : _AT_SHARES + num_shares] = counts[:, :num_shares] / sizes
        scripts = counts[:, num_shares : num_shares + num_scripts]
        features[:, _AT_SHARES + num_shares : _AT_COUNTS] = scripts / chars
        features[:, _AT_COUNTS:_AT_REST] = np.log1p(counts[:, num_shares + num_scripts :])
        return features.astype(np.float32)


def _read(data: bytes, num_chars: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The leading features and the rest, of a text's bytes."""
    lower = data.translate(_TABLE)
    words = lower.split()
    vocabulary = set(words)
    num_words = len(words)
    num_lines = data.count(b"\n") + 1
    stripped = data.strip()
    first_line = stripped.find(b"\n")
    leading = (
        math.log1p(num_chars),
        math.log1p(num_words),
        math.log1p(num_lines),
        math.log1p(first_line if first_line >= 0 else len(stripped)),
        math.log1p(len(stripped) - 1 - stripped.rfind(b"\n")),
        (len(lower) - lower.count(b" ")) / num_words if num_words else 0.0,
        len(vocabulary) / num_words if num_words else 0.0,
    )
    several = num_lines > 1
    first = words[0] if words else b""
    rest = (
        float(stripped.endswith(b"?")),
        float(stripped.endswith(b":")),
        math.log1p(data.count(b"```")),
        math.log1p(data.count(b"\n    ")) if several else 0.0,
        math.log1p(data.count(b"\n- ") + data.count(b"\n* ") + data.count(b"\n1.")) if several else 0.0,
        math.log1p(_turns(data)) if b"user" in vocabulary or b"human" in vocabulary else 0.0,
        math.log1p(data.count(b"http")),
        float(first in _QUESTION_WORDS),
        float(first in _COMMANDS),
        *[0.0 if vocabulary.isdisjoint(kind) else 1.0 for kind in _VOCABULARIES],
        float(b"step" in vocabulary and b"step by step" in lower),
        _first_number(words),
        *_numbers_of_units(words, vocabulary),
        float(_wants_a_word(lower, vocabulary)),
        float((b"a)" in data or b"A)" in data) and (b"b)" in data or b"B)" in data)),
    )
    return leading, rest


def _turns(data: bytes) -> int:
    lower = data.lower()
    return lower.count(b"user:") + lower.count(b"human:") + lower.count(b"assistant:")


def _number(word: bytes) -> int:
    """A number of up to six digits, or a number's name; 0 for anything else."""
    if word.isdigit():
        return int(word) if len(word) <= 6 else 0
    return _NUMBER_WORDS.get(word, 0)


def _first_number(words: list[bytes]) -> float:
    for word in words[:_EARLY_WORDS]:
        value = _number(word)
        if value:
            return math.log1p(value)
    return 0.0


def _numbers_of_units(words: list[bytes], vocabulary: set[bytes]) -> list[float]:
    """ln(1 + n) of the first "n UNIT" (or "n OTHER UNIT") for each kind of unit."""
    found = [0.0] * len(_UNIT_SETS)
    if vocabulary.isdisjoint(_ALL_UNITS):
        return found
    for at, word in enumerate(words):
        if word in _ALL_UNITS:
            value = _number(words[at - 1]) if at else 0
            if not value and at > 1:
                value = _number(words[at - 2])
            for kind, units in enumerate(_UNIT_SETS):
                if value and word in units and not found[kind]:
                    found[kind] = math.log1p(value)
    return found


def _wants_a_word(lower: bytes, vocabulary: set[bytes]) -> bool:
    if b"or" in vocabulary and (b"yes or no" in lower or b"true or false" in lower):
        return True
    return b"word" in vocabulary and (b"one word" in lower or b"single word" in lower)
