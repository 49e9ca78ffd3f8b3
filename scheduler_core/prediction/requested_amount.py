"""The amount of output that a prompt asks for ("in 100 words", "10 Ideen", 「400字で」, "briefly"), as a tag in front of it.

Small encoders read numbers badly: "50 facts" and "5 facts" differ for them in one word piece of many. `with_amount` writes
what is asked for once, in the same few words for all languages and spellings, so that a predictor can learn it from few
examples. English, German, Spanish and Japanese; a few words of French and Chinese.

| in the prompt | tag |
|---|---|
| 500 words, five hundred words, a 500-word essay, fünfhundert Wörter, 500 palabras | [words 500] |
| 280 characters, 400字, 1,000 tokens, two pages, a 5-minute speech | [words N], by `WORDS_PER_UNIT` |
| one sentence, 2-3 short paragraphs, 4 Zeilen | [sentences 1], [paragraphs 2], [lines 4] |
| list 10 animals, fünf Tipps, 5つ | [items 10], [items 5] |
| only yes or no, in one word, a single letter | [words 1] |
| yes or no? | [choice] |
| briefly, TL;DR, kurz; in detail, ausführlich, 詳しく | [brief], [detailed], also after another tag: [items 5 brief] |
| write a haiku, an essay, a title | [haiku], [essay], [title] |

Numbers in code and in problems ("a list of 5 numbers", "3 apples") are left alone where that can be told from the words
around them; the predictor learns the rest.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from scheduler_core.prediction.amount_words import (
    ARTICLES,
    ASKERS,
    BEFORE_ARTICLE,
    BETWEEN,
    BLOCKS,
    BOOKS,
    BRIEF,
    CHOICES,
    CODE,
    DETAILED,
    EACH,
    FORMS,
    GIVEN,
    LETTERS,
    LIMITS,
    LIST_VERBS,
    MEASURES,
    NUMBERS,
    ONLY,
    UNITS,
    VAGUE,
    WRITES,
)

#: Words of the output per unit that is asked for, so that they have one scale in tags: tokens, pages, minutes of a speech,
#: characters of alphabets, and of Japanese and Chinese (ideographs; about a token each).
WORDS_PER_UNIT: Final[Mapping[str, float]] = {
    "words": 1.0,
    "tokens": 0.75,
    "pages": 400.0,
    "minutes": 130.0,
    "characters": 1 / 6,
    "ideographs": 0.6,
}
#: Words of typical units, to find the largest of several amounts.
_SIZES: Final[Mapping[str, float]] = {
    **WORDS_PER_UNIT,
    "sentences": 20,
    "paragraphs": 80,
    "lines": 10,
    "items": 20,
}
#: Numbers in tags; others are rounded to the next of them in logarithms. Mostly numbers that people ask for.
_LEVELS: Final = (
    *(1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700),
    *(1_000, 1_500, 2_000, 3_000, 5_000, 7_000, 10_000, 20_000),
)
_MIDDLES: Final = [(low * high) ** 0.5 for low, high in pairwise(_LEVELS)]
#: Characters that are read at the beginning and at the end of the system prompt and of the last user message, and on each
#: side of a word.
_END_CHARACTERS: Final = 1_500
_WINDOW: Final = 80
#: Units in prompts about code -> numbers that ask for an amount without a word that limits.
_IN_CODE: Final[Mapping[str, float]] = {"words": 50, "tokens": 50, "sentences": 3, "paragraphs": 2}
#: Larger numbers ask for no amount, and a list has fewer items.
_LARGEST: Final = 10_000_000
_MOST_ITEMS: Final = 1_000

_TAG = re.compile(r"\[[a-z]+(?: \d+)?(?: brief| detailed)?\] ")
_ROLE = re.compile(r"(?:options|system|user|assistant|tool): ")
_NEXT_ROLE = re.compile(r"\n\n(?:assistant|tool|user): ")
_DIGIT = re.compile(r"[0-9]")
_TOKEN = re.compile(r"\d{1,3}(?:[.,'\u00a0\u202f]\d{3})+(?!\d)|\d+(?:\.\d+)?|[^\W\d_]+|[^\w\s,\"'*_()]|\n")
_THOUSANDS = re.compile(r"[.,'\u00a0\u202f](?=\d{3}(?!\d))")
_STOPS = frozenset(".!?;:\n")
_RANGES = frozenset(("-", "–", "—", "~", "to", "or", "bis", "a", "o", "oder", "à", "and", "und", "y", "et"))
_OF = ("of", "de", "von", ":")
#: Punctuation -> space, to split an ASCII text into its words; full-width digits -> digits.
_SPACES = {ord(character): " " for character in ".,:;!?\"'()[]{}*_-/<>=+"}
_WORD = re.compile(r"[^\W\d_]+")
_LATIN = re.compile(r"[a-z]{2}")
_FULL_WIDTH_DIGIT = re.compile("[\uff10-\uff19]")
_SPEECHES = ("speech", "talk", "presentation", "rede", "discurso")
_FULL_WIDTH = {0xFF10 + digit: str(digit) for digit in range(10)} | {0xFF0C: ","}
_UNIT_WORDS, _NUMBER_WORDS, _FORM_WORDS = frozenset(UNITS), frozenset(NUMBERS), frozenset(FORMS)
#: Number words that may be in front of things.
_COUNTS = _NUMBER_WORDS - VAGUE
_CHOICE = re.compile(
    r"\b(?:yes\s?(?:or|/)\s?no|true\s?(?:or|/)\s?false|ja\s?(?:oder|/)\s?nein|s[ií]\s?(?:o|/)\s?no|oui\s?(?:ou|/)\s?non)\b"
)
_LETTER = re.compile(
    r"\b(?:in|with|only|just|as|be|output|say|give|use|using|return)(?: only| just| exactly| me| a| the| by)* "
    r"(?:single|one|1)[- ](?:letter|word|number|digit)\b(?! or)|\bone[- ]word (?:answer|reply|response)|"
    r"\b(?:the letter|letter only|word only)\b(?= only|[.:]|$)|"
    r"\b(?:in|mit|als|nur)(?: nur)? (?:einem|einer|ein|einen)(?: einzigen)? (?:buchstaben?|wort|zahl)\b|"
    r"\b(?:con|en|solo|sólo) (?:solo |sólo )?una (?:sola |única )?(?:letra|palabra)\b|\ben un (?:seul )?mot\b"
)

_CJK = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
_CJK_UNITS = {
    word: unit
    for unit, words in {
        "ideographs": "文字 字 个字 個字",
        "words": "単語 語 ワード",
        "sentences": "文章 文 センテンス 句话 句",
        "paragraphs": "段落 パラグラフ 段",
        "lines": "行",
        "pages": "ページ 頁 页",
        "tokens": "トークン",
        "minutes": "分間の",
        "items": "個 つ 点 項目 選 案 例 問 通り 種類 箇条 ヶ条 个 条 种 问",
    }.items()
    for word in words.split()
}
_CJK_NUMBER = "[0-9][0-9,.]*[万千]?|[一二三四五六七八九十百千万両两]+"
_CJK_AMOUNT = re.compile(
    rf"(?<![第0-9])({_CJK_NUMBER})(?:(?:字|文字)?(?:[~〜\-ー–―]|から)({_CJK_NUMBER}))?(?:つの(?=段落|文))?"
    rf"({'|'.join(sorted(_CJK_UNITS, key=len, reverse=True))})(?!目|の数字|の整数|書)"
)
#: Words after, and in Chinese before, an amount that is asked for.
_CJK_ASKS = re.compile(
    "書|挙|あげ|教え|述べ|説明|まとめ|要約|提案|答え|回答|作|考え|紹介|列挙|リスト|くださ|下さ|お願い|以内|以上|程度|左右|写|列|介绍|给|说明|请|总结"
)
_CJK_ASKS_BEFORE = re.compile("(?:请|用|写|列出|给出|举|介绍)[^。，？！\n]{0,6}$")
_CJK_WRITES = ("書", "作って", "作成", "考えて", "執筆", "写", "お願い")
_CJK_DETAILS = {
    **dict.fromkeys(("簡潔", "手短", "短く", "短い", "簡単に", "简短", "简要", "简洁"), "brief"),
    **dict.fromkeys(("詳しく", "詳細", "徹底", "くわしく", "详细", "深入"), "detailed"),
}
_CJK_FORMS = {
    word: form
    for form, words in {
        "haiku": "俳句",
        "title": "タイトル 題名 标题",
        "tweet": "ツイート",
        "essay": "エッセイ 小論文 作文",
        "report": "レポート 報告書",
        "story": "物語 小説 故事 短編",
        "email": "メール",
        "article": "ブログ 記事",
        "speech": "スピーチ",
        "poem": "詩",
    }.items()
    for word in words.split()
}
_CJK_CHOICES = ("はいかいいえ", "「はい」か「いいえ」", "はいまたはいいえ", "是或否", "是还是否", "是或不是")
_CJK_WORD = ("一言で", "一語で", "1語で", "一単語で", "一个词", "一个字")
_CJK_ONLY = ("だけ", "のみ", "只")
_CJK_CODE = ("コード", "関数", "プログラム", "代码", "函数")
_CJK_DIGITS = {digit: value for value, digit in enumerate("〇一二三四五六七八九")} | {"両": 2, "两": 2}
_CJK_POWERS = {"十": 10, "百": 100, "千": 1_000}
_CJK_PARTS = re.compile(r"[0-9][0-9,.]*|\D")


class RequestedAmount(NamedTuple):
    """The amount of output that a prompt asks for.

    Attributes:
        unit: words, tokens, characters, ideographs (Japanese and Chinese characters), pages, minutes, sentences,
            paragraphs, lines, items; choice; a form of text (title, haiku, essay, ...); "" with only a detail.
        number: Number of units; the geometric mean of a range. None for a choice, a form or only a detail.
        detail: brief, detailed, or "".
    """

    unit: str
    number: float | None = None
    detail: str = ""


def with_amount(text: str) -> str:
    """The text with the tag of the amount that it asks for in front; unchanged if it asks for none or has a tag."""
    if text.startswith("[") and _TAG.match(text):
        return text
    amount = requested_amount(text)
    return text if amount is None else f"{_tag(amount)} {text}"


def requested_amount(text: str) -> RequestedAmount | None:
    """The amount that a prompt or the text of a conversation (`prompt_text.PromptForm`) asks for: in the last message of the
    user, or else in the system prompt, whose numbers also come before a form or a detail. None if it asks for none."""
    amounts = [amount for part in _parts(text) if (amount := _amount(part)) is not None]
    return next((amount for amount in amounts if amount.number is not None), amounts[0] if amounts else None)


def _tag(amount: RequestedAmount) -> str:
    unit, number = amount.unit, amount.number
    if number is not None:
        if unit in WORDS_PER_UNIT:
            unit, number = "words", number * WORDS_PER_UNIT[unit]
        unit = f"{unit} {_LEVELS[bisect(_MIDDLES, number)]}"
    return f"[{' '.join(filter(None, (unit, amount.detail)))}]"


def _parts(text: str) -> list[str]:
    """The last message of the user, and the system prompt of a conversation, without their middles."""
    if not _ROLE.match(text):
        return [_ends(text)]
    parts = []
    for role in ("user: ", "system: "):
        start = text.rfind(f"\n\n{role}") + 2
        if start == 1 and not text.startswith(role):
            continue
        begin = max(start, 0) + len(role) if start > 1 else len(role)
        end = _NEXT_ROLE.search(text, begin)
        parts.append(_ends(text[begin : end.start() if end else len(text)]))
    return parts


def _ends(text: str) -> str:
    if len(text) <= 2 * _END_CHARACTERS:
        return text
    return f"{text[:_END_CHARACTERS]}\n{text[-_END_CHARACTERS:]}"


def _amount(text: str) -> RequestedAmount | None:
    lower = text.lower()
    if not lower.isascii():
        if _FULL_WIDTH_DIGIT.search(lower):
            lower = lower.translate(_FULL_WIDTH)
        if _CJK.search(lower):
            amount = _cjk_amount(lower)
            if amount is not None or not _LATIN.search(lower):
                return amount
        words = set(_WORD.findall(lower))
    else:
        words = set(lower.translate(_SPACES).split())
    code = not CODE.isdisjoint(words) or "```" in lower
    detail = "" if BRIEF.isdisjoint(words) else "brief"
    detail = detail or ("" if DETAILED.isdisjoint(words) else "detailed")
    amounts = _counted(lower, words, code)
    if amounts:
        unit, number = _whole(amounts, words)
        return RequestedAmount(unit, number, detail)
    if code:
        return None
    if not LETTERS.isdisjoint(words) and _LETTER.search(lower):
        return RequestedAmount("words", 1)
    if not CHOICES.isdisjoint(words) and _CHOICE.search(lower):
        return RequestedAmount("choice") if ONLY.isdisjoint(words) else RequestedAmount("words", 1)
    form = "" if WRITES.isdisjoint(words) else _form(lower, words)
    return RequestedAmount(form, None, detail) if form or detail else None


def _counted(text: str, words: set[str], code: bool) -> list[tuple[str, float]]:
    """Units and numbers that are asked for, in the order of the text."""
    has_digits = _DIGIT.search(text) is not None
    amounts: dict[int, tuple[str, float]] = {}
    if has_digits or not words.isdisjoint(_NUMBER_WORDS) or "hundert" in text or "tausend" in text:
        for word in words & _UNIT_WORDS:
            for start, end in _places(text, word):
                before = _TOKEN.findall(text[max(0, start - _WINDOW) : start])
                number = _number_before(before, UNITS[word], text[end : end + 16], code)
                if number is not None:
                    amounts[start] = "items" if UNITS[word] == "steps" else UNITS[word], number
        has_counts = not words.isdisjoint(_COUNTS)
        if not code and (has_digits or has_counts):
            starts = [span for word in words & LIST_VERBS for span in _places(text, word)]
            for start, end in [span for span in starts if _is_imperative(text, span[0])] or [(0, 0)]:
                after = text[end : end + _WINDOW]
                if (has_counts or _DIGIT.search(after)) and (end or len(text) <= _WINDOW):
                    number = _number_after(_TOKEN.findall(after), at_start=end == 0)
                    if number is not None:
                        amounts.setdefault(start, ("items", number))
    return [amounts[start] for start in sorted(amounts)]


def _places(text: str, word: str) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of the places of a word in a text, at most 8."""
    end = 0
    for _ in range(8):
        start = text.find(word, end)
        if start < 0:
            return
        end = start + len(word)
        if not (text[start - 1 : start].isalpha() or text[end : end + 1].isalpha()):
            yield start, end


def _is_imperative(text: str, start: int) -> bool:
    """Whether a verb at `start` tells the model what to do: "please list", not "she has to make"."""
    before = text[max(0, start - 24) : start].rstrip()
    if not before[-1:].isalpha():
        return True
    last = before.split()[-2:]
    imperative = last[-1] in ASKERS or (last[-1] == "to" and last[0] in ASKERS)
    return imperative or " ".join(last) in ("as a", "als eine", "como una")


def _whole(amounts: Sequence[tuple[str, float]], words: set[str]) -> tuple[str, float]:
    """The amount of the whole output: "3 paragraphs of 100 words each" are 300 words; or else the largest."""
    (first, count), (unit, number) = amounts[0], amounts[-1]
    if first != unit and not EACH.isdisjoint(words) and number * count <= _LARGEST:
        return unit, number * count
    return max(amounts, key=lambda amount: amount[1] * _SIZES[amount[0]])


def _number_before(tokens: list[str], unit: str, after: str, code: bool) -> float | None:
    """The number before a unit: "100 to 150 English words", "in a sentence", "two-paragraph"; None without one, or if it
    belongs to something in the prompt ("the last 5 words").

    Args:
        tokens: Tokens before the unit.
        after: Text after it.
    """
    end = len(tokens)
    skipped = 0
    while end and (_value(tokens[end - 1]) is None):
        token = tokens[end - 1]
        if token in _STOPS or token in BLOCKS or skipped == 3:
            return None
        skipped += token != "-"
        end -= 1
    if not end:
        return None
    start, number = _number_ending(tokens, end)
    if start and end - start == 1 and tokens[start - 1] in ARTICLES:  # a single page
        start -= 1
    largest = _MOST_ITEMS if unit == "items" else _LARGEST
    is_article = end - start == 1 and tokens[start] in ARTICLES
    if not 0 < number <= largest or not _is_request(tokens, start, number, unit, is_article, code):
        return None
    if unit == "minutes" and not after.strip(" -").startswith(_SPEECHES):
        return None
    if unit == "pages" and not (BOOKS.isdisjoint(tokens[-6:]) and BOOKS.isdisjoint(after.split())):
        return None
    return number


def _is_request(
    tokens: Sequence[str], start: int, number: float, unit: str, is_article: bool, code: bool
) -> bool:
    """Whether the words before a number, which begins at `start`, ask for it."""
    before = tokens[start - 1] if start else ""
    limited = before in LIMITS or (before in _OF and start > 1 and tokens[start - 2] in LIMITS)
    requested = limited or before in BEFORE_ARTICLE or (unit == "pages" and before in _OF)
    if is_article:
        if code or not requested or unit not in ("sentences", "paragraphs", "pages", "lines"):
            return False
    elif before in GIVEN or (number == 1 and unit in ("lines", "pages") and start > 0 and not requested):
        return False
    if code and number < _IN_CODE.get(unit, _LARGEST) / (3 if limited else 1):
        return False
    if unit == "characters":
        return limited or number >= 20
    return limited or unit != "steps"


def _number_ending(tokens: Sequence[str], end: int) -> tuple[int, float]:
    """Start and value of the number or range whose last token is before `end`."""
    start = end - 1
    while start > 0 and _continues(tokens, start):
        start -= 1
    number = _evaluated(tokens[start:end])
    if start > 1 and tokens[start - 1] in _RANGES and tokens[start - 2] not in ARTICLES:
        low = _value(tokens[start - 2])
        if low is not None and 0 < low < number:
            return start - 2, (low * number) ** 0.5
    return start, number


def _continues(tokens: Sequence[str], start: int) -> bool:
    """Whether the token before `start` belongs to the number at `start`: "two hundred and fifty", "twenty-five", "10 k"."""
    here, before = tokens[start], tokens[start - 1]
    if here[0].isdecimal():
        return False
    value, last = _value(before), _value(here) or 0
    if value is None:
        if before not in ("-", "and", "y", "und") or start < 2:
            return False
        value = _value(tokens[start - 2])
        return value is not None and value >= 20 and value % 10 == 0 and last < value
    return last >= 100 or value >= 20


def _evaluated(words: Sequence[str]) -> float:
    """The value of the words of a number: "two thousand five hundred", "10 k"."""
    total, group = 0.0, 0.0
    for word in words:
        value = _value(word)
        if value is None:
            continue
        if value == 1_000 and not word[0].isdecimal():
            total, group = total + max(group, 1) * value, 0.0
        elif value == 100 and 0 < group < 100 and not word[0].isdecimal():
            group *= value
        else:
            group += value
    return total + group


def _value(token: str) -> float | None:
    """The number that a token is."""
    if token[0].isdecimal():
        return float(_THOUSANDS.sub("", token)) if len(token) <= 12 else None
    value = NUMBERS.get(token)
    if value is None and ("hundert" in token or "tausend" in token):
        return _german(token)
    return value


def _german(token: str) -> float | None:
    """The value of a German number word: zweihundertfünfzig."""
    for word, factor in (("tausend", 1_000), ("hundert", 100)):
        if word in token:
            head, _, tail = token.partition(word)
            high = _german(head) if head else 1
            low = _german(tail.removeprefix("und")) if tail else 0
            return None if high is None or low is None else high * factor + low
    return NUMBERS.get(token)


def _number_after(tokens: Sequence[str], *, at_start: bool) -> float | None:
    """The number of things after a verb, or at the beginning of a prompt: "me a list of 10 funny animals"."""
    for start, token in enumerate(tokens[:8]):
        value = None if token in VAGUE else _value(token)
        if value is None:
            if token not in BETWEEN or at_start:
                return None
            continue
        end = start + 1
        while end < len(tokens) and not tokens[end][0].isdecimal() and _value(tokens[end]) is not None:
            end += 1
        number = _evaluated(tokens[start:end])
        if end + 1 < len(tokens) and tokens[end] in _RANGES and (high := _value(tokens[end + 1])) is not None:
            number, end = (number * high) ** 0.5, end + 2
        nouns = tokens[end : end + 3]
        if (
            not nouns
            or nouns[0] in MEASURES
            or not nouns[0][0].isalpha()
            or _CJK.match(nouns[0])
            or any(noun in UNITS for noun in nouns)
        ):
            return None
        return number if 1 < number <= _MOST_ITEMS and value.is_integer() else None
    return None


def _form(text: str, words: set[str]) -> str:
    """The first form of text that the prompt asks to write: "write me a short haiku"."""
    positions = [(start, word) for word in words & _FORM_WORDS for start, _ in _places(text, word)]
    for start, form in sorted(positions):
        for token in reversed(_TOKEN.findall(text[max(0, start - _WINDOW // 2) : start])[-6:]):
            if token in _STOPS or token in BLOCKS:
                break
            if token in WRITES:
                return FORMS[form]
    return ""


def _cjk_amount(text: str) -> RequestedAmount | None:
    """The amount that a Japanese or Chinese text asks for."""
    code = any(word in text for word in _CJK_CODE) or "```" in text
    detail = next((name for word, name in _CJK_DETAILS.items() if word in text), "")
    amounts: list[tuple[str, float]] = []
    for match in _CJK_AMOUNT.finditer(text):
        unit, number = _CJK_UNITS[match[3]], _cjk_number(match[1])
        if match[2]:
            number = (number * _cjk_number(match[2])) ** 0.5
        if number <= (1 if unit in ("items", "ideographs") else 0) or number > _LARGEST:
            continue
        after, before = text[match.end() : match.end() + 40], text[max(0, match.start() - 12) : match.start()]
        requested = (
            unit in ("ideographs", "tokens", "minutes")
            or _CJK_ASKS.search(after)
            or _CJK_ASKS_BEFORE.search(before)
        )
        if requested and not code:
            amounts.append((unit, number))
    if amounts:
        unit, number = max(amounts, key=lambda amount: amount[1] * _SIZES[amount[0]])
        return RequestedAmount(unit, number, detail)
    if code:
        return None
    if any(word in text for word in _CJK_WORD):
        return RequestedAmount("words", 1)
    if any(word in text for word in _CJK_CHOICES):
        only = any(word in text for word in _CJK_ONLY)
        return RequestedAmount("words", 1) if only else RequestedAmount("choice")
    form = ""
    if any(word in text for word in _CJK_WRITES):
        form = next((name for word, name in _CJK_FORMS.items() if word in text), "")
    return RequestedAmount(form, None, detail) if form or detail else None


def _cjk_number(text: str) -> float:
    """The value of digits or kanji numerals: 1,000, 2千, 二百五十, 1万."""
    total, group, digit = 0.0, 0.0, 0.0
    for part in _CJK_PARTS.findall(text):
        if part[0].isdecimal():
            digits = part.rstrip(",.").replace(",", "")
            digit = float(digits) if digits.count(".") < 2 and len(digits) <= 12 else 0.0
        elif part in _CJK_DIGITS:
            digit = digit * 10 + _CJK_DIGITS[part]
        elif part == "万":
            total, group, digit = total + max(group + digit, 1) * 10_000, 0.0, 0.0
        else:
            group, digit = group + max(digit, 1) * _CJK_POWERS[part], 0.0
    return total + group + digit
