"""The amount of output that a prompt asks for ("in 100 words", "10 Ideen", 「400字で」, "briefly"), as a tag in front of it.

Small encoders read numbers badly: "50 facts" and "5 facts" differ for them in one word piece of many. `with_amount` writes
what is asked for once, in the same few words for all languages and spellings, so that a predictor can learn it from few
examples. English, German, Spanish, Japanese; a few words of French and Chinese.

| in the prompt | tag |
|---|---|
| 500 words, five hundred words, a 500-word essay, fünfhundert Wörter, 500 palabras | [words 500] |
| 280 characters, 400字, 1,000 tokens, two pages, a 5-minute speech | [words N], by `WORDS_PER_UNIT` |
| one sentence, 2-3 short paragraphs, 4 Zeilen | [sentences 1], [paragraphs 3], [lines 4] |
| list 10 animals, fünf Tipps, 5つ | [items 10], [items 5] |
| only yes or no, in one word, a single letter | [words 1] |
| briefly, TL;DR, kurz; in detail, ausführlich, 詳しく | [brief], [detailed], also after another tag: [items 5 brief] |
| write a haiku, an essay, a title | [haiku], [essay], [title] |

Numbers in code and in problems ("a list of 5 numbers", "3 apples") are left alone where that can be told from the words
around them; the predictor learns the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

#: Characters that are read at the beginning and at the end of the system prompt and of the last user message.
_END_CHARACTERS: Final = 1_500
#: Words of the output per unit that is asked for, to have one scale: tokens, pages, minutes of a speech, characters of
#: alphabets, and of Japanese and Chinese (about as many tokens as characters).
WORDS_PER_UNIT: Final[Mapping[str, float]] = {
    "words": 1.0,
    "tokens": 0.75,
    "pages": 400.0,
    "minutes": 130.0,
    "characters": 1 / 6,
    "ideographs": 0.6,
}
#: Numbers in tags; others are rounded to the next of them in logarithms. Mostly numbers that people ask for.
_STEPS: Final = (1, 2, 3, 4, 5, 7)
_LEVELS: Final = (
    *_STEPS,
    *(step * 10**power // 10 for power in range(1, 6) for step in (10, 15, 20, 30, 50, 70)),
)


class RequestedAmount(NamedTuple):
    """The amount of output that a prompt asks for.

    Attributes:
        unit: words, tokens, characters, ideographs (Japanese and Chinese characters), pages, minutes, sentences,
            paragraphs, lines, items; or a form of text (title, haiku, essay, ...), or "" with only a detail.
        number: Number of units; the geometric mean of a range. None for a form of text.
        detail: brief, detailed, or "".
    """

    unit: str
    number: float | None = None
    detail: str = ""


def _table(text: str) -> dict[str, str]:
    """Words to their key, from lines of "key: word word ..."."""
    rows = (line.split(":") for line in text.strip().splitlines())
    return {word: key.strip() for key, words in rows for word in words.split()}


_UNITS = _table("""
words: word words wort wörter wörtern worte worten palabra palabras mot mots
tokens: token tokens
characters: character characters chars zeichen carácter caracteres caractères
pages: page pages seite seiten página páginas pagina paginas
sentences: sentence sentences satz sätze sätzen oración oraciones oracion frase frases phrase phrases
paragraphs: paragraph paragraphs absatz absätze absätzen abschnitt abschnitte párrafo párrafos parrafo parrafos paragraphe paragraphes stanza stanzas strophe strophen estrofa estrofas
lines: line lines zeile zeilen línea líneas linea lineas ligne lignes verso versos
minutes: minute minutes minuten minütige minütigen minuto minutos
""")
_NUMBERS = {
    word: number
    for number, words in {
        0.5: "half halbe halben halber media medio",
        1: "a an one single ein eine einen einem einer einzigen un una uno une",
        2: "two couple zwei dos deux",
        3: "three few drei tres trois paar",
        4: "four vier cuatro quatre",
        5: "five several fünf cinco cinq einige mehrere varios varias",
        6: "six sechs seis",
        7: "seven sieben siete sept",
        8: "eight acht ocho huit",
        9: "nine neun nueve neuf",
        10: "ten zehn diez dix",
        11: "eleven elf once",
        12: "twelve dozen zwölf doce douze dutzend docena",
        13: "thirteen dreizehn trece",
        14: "fourteen vierzehn catorce",
        15: "fifteen fünfzehn quince quinze",
        16: "sixteen sechzehn dieciséis",
        17: "seventeen siebzehn diecisiete",
        18: "eighteen achtzehn dieciocho",
        19: "nineteen neunzehn diecinueve",
        20: "twenty zwanzig veinte vingt",
        25: "veinticinco",
        30: "thirty dreißig treinta trente",
        40: "forty vierzig cuarenta quarante",
        50: "fifty fünfzig cincuenta cinquante",
        60: "sixty sechzig sesenta soixante",
        70: "seventy siebzig setenta",
        80: "eighty achtzig ochenta",
        90: "ninety neunzig noventa",
        100: "hundred cien ciento cent",
        200: "doscientas doscientos",
        300: "trescientas trescientos",
        400: "cuatrocientas cuatrocientos",
        500: "quinientas quinientos",
        600: "seiscientas seiscientos",
        800: "ochocientas ochocientos",
        1_000: "thousand k mil mille",
    }.items()
    for word in words.split()
}

_ITEMS = frozenset(
    """facts ideas tips reasons examples ways bullet bullets suggestions jokes quotes titles headlines slogans synonyms
    recipes strategies benefits advantages recommendations arguments items pieces hashtags taglines
    fakten ideen tipps gründe beispiele punkte stichpunkte stichpunkten vorschläge witze zitate titel argumente vorteile
    datos hechos ideas consejos razones ejemplos puntos sugerencias chistes citas títulos argumentos ventajas
    faits idées conseils raisons exemples""".split()
)
_LIST_VERBS = frozenset(
    """list name give suggest provide generate write create brainstorm recommend tell share propose identify mention show
    make produce offer draft compose describe explain state enumerate invent top outline devise
    nenne nenn nennen gib liste schreib schreibe erstelle zähle schlage formuliere beschreibe erkläre entwirf erfinde
    dame da enumera lista escribe menciona nombra sugiere proporciona genera crea haz dime propón recomienda explica
    cita describe donne cite écris liste""".split()
)
#: Words between such a verb and its number.
_BETWEEN = frozenset(
    """me us a an list lists of the top best at least most about exactly up to some another also out around roughly
    approximately precisely just only than more fewer no my him her them and if series set or
    mir uns eine liste von mit etwa genau mindestens höchstens auf bitte die den der ca ungefähr
    me nos una lista de con al menos unos unas exactamente los las máximo mínimo hasta une""".split()
)
#: Nouns after a number that measure something in the prompt, not the output.
_MEASURES = frozenset(
    """minutes minute hours hour days day weeks week months month years year seconds percent dollars euros usd people
    persons friends kg km miles meters times million billion thousand hundred th st nd rd am pm degrees x or and to
    minuten stunden tage wochen monate jahre jahren personen euro prozent horas días semanas meses años personas pesos
    and in of is the by with for from on plus minus d""".split()
)
#: Words that end the search for a number before a unit.
_BLOCK = frozenset(
    """of the in with to for from on is are was that this these those my your and into following by at per has have
    der die das den dem diese dieser dieses mit von im in zu für el la los las de del en con por para que y le les du""".split()
)
#: Words before a number that make it a number of the prompt.
_GIVEN = frozenset(
    """first last the this these those following given every my your top next previous ersten letzten diese dieser diesen
    dieses die den primeras primeros últimas últimos estas estos las los ce cette ces""".split()
)
#: Words before an article that make it a request: "in a sentence", "write a paragraph", but not "given a sentence".
_BEFORE_ARTICLE = frozenset(
    """in write as within into only compose provide give me than just with using to about single exactly
    schreibe schreib nur mit als verfasse formuliere einzigen en escribe escribir solo sólo redacta con dans écris""".split()
)
_ARTICLES = frozenset("a an ein eine einen einem einer un una une".split())
_CODE = re.compile(
    r"```|\b(?:python|javascript|java|c\+\+|sql|function|program|script|array|pandas|numpy|dataframe|algorithm|html|css|regex|"
    r"def|funktion|funci[oó]n|programm|programa|stdin|stdout|input|integers?)\b|コード|関数|プログラム"
)
#: Words before a number that limit the output, also in prompts with code.
_LIMITS = frozenset(
    """in under within most than exactly only maximum max limit limited least about around approximately
    unter maximal höchstens genau etwa mindestens máximo menos exactamente unas""".split()
)
_BRIEF = frozenset(
    """brief briefly short shortly concise concisely succinct succinctly tldr terse tersely tl
    kurz kurze kurzen kurzer kurzes knapp knappe prägnant breve brevemente conciso concisa concisamente corto corta
    brièvement court courte résumé""".split()
)
_DETAILED = frozenset(
    """detailed detail thorough thoroughly comprehensive comprehensively exhaustive exhaustively extensive extensively
    lengthy depth elaborate ausführlich ausführliche ausführlichen ausführlicher detailliert detaillierte detaillierten
    umfassend umfassende gründlich detallado detallada detalladamente detalle exhaustivo exhaustiva profundidad extenso
    extensa détaillé détail""".split()
)
_FORMS = _table("""
title: title titel título headline überschrift titular subject
slogan: slogan tagline motto eslogan
haiku: haiku
tweet: tweet caption tuit
poem: poem gedicht poema limerick poème
email: email mail correo message nachricht
letter: brief letter carta
summary: summary zusammenfassung resumen
post: post beitrag
outline: outline gliederung esquema
speech: speech rede discurso
story: story geschichte historia cuento märchen histoire
article: article artikel artículo blog
essay: essay aufsatz ensayo
report: report bericht informe
chapter: chapter kapitel capítulo
""")
_WRITE = frozenset(
    """write create compose generate draft give make need want writing
    schreibe schreib verfasse erstelle entwirf gib escribe redacta crea genera dame écris rédige""".split()
)
_ONLY = frozenset("only just single nothing nur lediglich solo sólo solamente únicamente seulement".split())
_CHOICE = re.compile(
    r"\b(?:yes\s?(?:or|/)\s?no|true\s?(?:or|/)\s?false|ja\s?(?:oder|/)\s?nein|s[ií]\s?(?:o|/)\s?no|oui\s?(?:ou|/)\s?non)\b|"
    r"はいか(?:いいえ|、いいえ)|「?はい」?(?:または|か|/|/)「?いいえ|是(?:或|还是)(?:否|不是)"
)
_ONLY_CJK = re.compile(r"だけ|のみ|ひとこと|一言|只")
_LETTER = re.compile(
    r"\b(?:in|with|only|just|as|be|output|say|give|use|using|return)(?: only| just| exactly| me| a| the| by)* "
    r"(?:single|one|1)[- ](?:letter|word|number|digit)\b(?! or)|\b(?:the letter|letter only|word only)\b(?= only|[.:]|$)|"
    r"\b(?:in|mit|als|nur)(?: nur)? (?:einem|einer|ein|einen)(?: einzigen)? (?:buchstaben?|wort|zahl)\b|"
    r"\b(?:con|en|solo|sólo) (?:solo |sólo )?una (?:sola |única )?(?:letra|palabra)\b|(?:一|1)(?:単)?語で|一言で|一个(?:词|字)"
)
_CJK = re.compile(r"だけ|のみ|ひとこと|一言|只")
_LETTER = re.compile(
    r"\b(?:single|one|only the|just the) (?:letter|word|number|digit)\b|\bone-word\b|\bletter only\b|"
    r"\b(?:einem|einzigen?|nur (?:dem|einem)) (?:buchstaben?|wort|zahl)\b|\b(?:una sola|una|sola) (?:letra|palabra)\b|"
    r"(?:一|1)(?:単)?語で|一言で"
)
_CJK = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
_CJK_NUMBER = r"[0-9][0-9,.]*[万千]?|[一二三四五六七八九十百千万両两]+"
_CJK_UNITS = {
    **dict.fromkeys(("文字", "字", "个字", "個字"), "ideographs"),
    **dict.fromkeys(("単語", "語", "ワード"), "words"),
    **dict.fromkeys(("文章", "文", "センテンス", "句话", "句"), "sentences"),
    **dict.fromkeys(("段落", "パラグラフ", "段"), "paragraphs"),
    **dict.fromkeys(("行",), "lines"),
    **dict.fromkeys(("ページ", "頁", "页"), "pages"),
    **dict.fromkeys(("トークン",), "tokens"),
    **dict.fromkeys(("分間の",), "minutes"),
    **dict.fromkeys(
        ("個", "つ", "点", "項目", "選", "案", "例", "通り", "種類", "个", "条", "种", "箇条", "ヶ条"),
        "items",
    ),
}
_CJK_AMOUNT = re.compile(
    rf"(?<![第0-9])({_CJK_NUMBER})(?:(?:[~〜~\-ー–―から]+|字から|文字から)({_CJK_NUMBER}))?"
    rf"({'|'.join(sorted(_CJK_UNITS, key=len, reverse=True))})(?!目|の数字|の整数|書)"
)
_CJK_REQUEST = re.compile(
    r"[てでにをはがつ]?(?:書|挙|あげ|教え|述べ|説明|まとめ|要約|提案|答え|回答|作|考え|紹介|列挙|リスト|ください|下さい|お願い|以内|以上|程度|"
    r"写|列出|介绍|给|说明|回答|总结|请)"
)
_CJK_BRIEF = re.compile(r"簡潔|手短|短く|短い|簡単に|簡略|简短|简要|简洁|一言")
_CJK_DETAILED = re.compile(r"詳しく|詳細|徹底|くわしく|详细|深入")
_CJK_FORMS = (
    ("俳句", "haiku"),
    ("タイトル", "title"),
    ("題名", "title"),
    ("标题", "title"),
    ("ツイート", "tweet"),
    ("エッセイ", "essay"),
    ("小論文", "essay"),
    ("作文", "essay"),
    ("レポート", "report"),
    ("報告書", "report"),
    ("物語", "story"),
    ("小説", "story"),
    ("故事", "story"),
    ("短編", "story"),
    ("メール", "email"),
    ("ブログ", "article"),
    ("記事", "article"),
    ("スピーチ", "speech"),
    ("詩", "poem"),
)
_CJK_WRITE = re.compile(r"書いて|書き|作って|作成|考えて|執筆|写|お願い")
_CJK_DIGITS = {digit: value for value, digit in enumerate("〇一二三四五六七八九")} | {"両": 2, "两": 2}
_TOKEN = re.compile(
    r"\d{1,3}(?:[.,'\u00a0\u202f]\d{3})+(?!\d)|\d+(?:\.\d+)?|[^\W\d_]+|[^\w\s,\"'*_()「」]|\n"
)
_ROLE = re.compile(r"(?:system|user|assistant|tool): ")
_TAG = re.compile(r"\[[a-z]+(?: \d+)?(?: brief| detailed)?\] ")
_STOPS = frozenset(".!?;:\n")
_RANGES = frozenset("- – — ~ to or bis a o oder à".split())
_HEADS = frozenset(_UNITS) | _ITEMS | _LIST_VERBS | frozenset(_FORMS) | _BRIEF | _DETAILED
_FULL_WIDTH = {0xFF10 + digit: str(digit) for digit in range(10)} | {0xFF0C: ","}


def with_amount(text: str) -> str:
    """The text with the tag of the amount that it asks for in front, or unchanged if it asks for none or has a tag."""
    if _TAG.match(text):
        return text
    amount = requested_amount(text)
    return text if amount is None else f"{_tag(amount)} {text}"


def requested_amount(text: str) -> RequestedAmount | None:
    """The amount that a prompt or a composed conversation (`prompt_text.conversation_text`) asks for: in the last message
    of the user, or else in the system prompt; None if it asks for none. Never raises."""
    for part in _parts(text):
        if (amount := _amount(part)) is not None:
            return amount
    return None


def _tag(amount: RequestedAmount) -> str:
    unit, number = amount.unit, amount.number
    if number is not None:
        if unit in WORDS_PER_UNIT:
            unit, number = "words", number * WORDS_PER_UNIT[unit]
        unit = f"{unit} {_rounded(number)}"
    return f"[{' '.join(filter(None, (unit, amount.detail)))}]"


def _rounded(number: float) -> int:
    """The level in the tags that is nearest in logarithms."""
    return min(_LEVELS, key=lambda level: max(level / number, number / level))


def _parts(text: str) -> list[str]:
    """The last message of the user, and the system prompt of a composed conversation, without their middles."""
    if not _ROLE.match(text):
        return [_ends(text)]
    start = text.rfind("\n\nuser: ")
    parts = []
    if start >= 0 or text.startswith("user: "):
        user = text[max(start, 0) :].removeprefix("\n\n").removeprefix("user: ")
        parts.append(_ends(re.split(r"\n\n(?:assistant|tool): ", user, maxsplit=1)[0]))
    if text.startswith("system: "):
        system = text[8:] if start < 0 else text[8:start]
        parts.append(_ends(re.split(r"\n\n(?:assistant|tool|user): ", system, maxsplit=1)[0]))
    return parts


def _ends(text: str) -> str:
    if len(text) <= 2 * _END_CHARACTERS:
        return text
    return f"{text[:_END_CHARACTERS]}\n{text[-_END_CHARACTERS:]}"


def _amount(text: str) -> RequestedAmount | None:
    lower = text.lower()
    if not lower.isascii():
        lower = lower.translate(_FULL_WIDTH)
        if _CJK.search(lower):
            return _cjk_amount(lower) or _western_amount(lower)
    return _western_amount(lower)


def _western_amount(text: str) -> RequestedAmount | None:
    tokens: list[str] = _TOKEN.findall(text)
    if _HEADS.isdisjoint(tokens) and "yes" not in tokens and "true" not in tokens and "ja" not in tokens:
        return None
    code = _CODE.search(text) is not None
    found: list[RequestedAmount] = []
    detail, form = "", ""
    for index, token in enumerate(tokens):
        if token not in _HEADS:
            continue
        if token in _BRIEF:
            detail = detail or "brief"
        elif token in _DETAILED:
            detail = detail or "detailed"
        unit = _UNITS.get(token)
        if unit is None and token in _ITEMS:
            unit = "items"
        if unit is not None and (number := _number_before(tokens, index, unit, code)) is not None:
            found.append(RequestedAmount(unit, number))
        elif token in _LIST_VERBS and not code and (number := _number_after(tokens, index)) is not None:
            found.append(RequestedAmount("items", number))
        if not form and token in _FORMS and not code and _is_written(tokens, index):
            form = _FORMS[token]
    choice = None if code else _choice(text, tokens)
    if found:
        unit, number = _largest(found, tokens)
        return RequestedAmount(unit, number, detail)
    if choice is not None:
        return choice
    if code:
        return None
    return RequestedAmount(form, None, detail) if form or detail else None


def _choice(text: str, tokens: Sequence[str]) -> RequestedAmount | None:
    """A request for yes or no, for one word or for one letter."""
    if _LETTER.search(text):
        return RequestedAmount("words", 1)
    if _CHOICE.search(text):
        return RequestedAmount("words", 1) if not _ONLY.isdisjoint(tokens) else RequestedAmount("choice")
    return None


#: Words of typical units, to find the largest of several amounts.
_SIZES: Final[Mapping[str, float]] = {
    **WORDS_PER_UNIT,
    "sentences": 20,
    "paragraphs": 80,
    "lines": 10,
    "items": 20,
}


def _largest(found: Sequence[RequestedAmount], tokens: Sequence[str]) -> tuple[str, float]:
    """The amount of the whole output: an amount for each of a number of units times that number, or else the largest."""
    sizes = [(amount.number or 1) * _SIZES[amount.unit] for amount in found]
    first, last = found[0], found[-1]
    if (
        len(found) > 1
        and first.unit != last.unit
        and not {"each", "per", "jeweils", "cada", "every"}.isdisjoint(tokens)
    ):
        parts, per = (first, last) if _SIZES[first.unit] * 1.0 != _SIZES["words"] else (last, first)
        return per.unit, (per.number or 1) * (parts.number or 1)
    best = found[sizes.index(max(sizes))]
    return best.unit, best.number or 1


def _is_written(tokens: Sequence[str], index: int) -> bool:
    """Whether a form of text is what the prompt asks to write: "write me a short haiku"."""
    before = tokens[max(0, index - 6) : index]
    for token in reversed(before):
        if token in _STOPS or token in _BLOCK:
            return False
        if token in _WRITE:
            return True
    return False


def _value(token: str) -> float | None:
    """The number that a token is."""
    if token[0].isdecimal():
        if len(token) > 12:
            return None
        digits = re.sub(r"[.,'\u00a0\u202f](?=\d{3}(?!\d))", "", token)
        return float(digits)
    value = _NUMBERS.get(token)
    if value is None and ("hundert" in token or "tausend" in token):
        return _german(token)
    return value


def _german(token: str) -> float | None:
    """The value of a German compound: zweihundertfünfzig."""
    for word, factor in (("tausend", 1_000), ("hundert", 100)):
        if word in token:
            head, tail = token.split(word, 1)
            high = _german(head) if head else 1
            low = _german(tail.removeprefix("und")) if tail else 0
            return None if high is None or low is None else high * factor + low
    return _NUMBERS.get(token)


def _number_before(tokens: Sequence[str], index: int, unit: str, code: bool) -> float | None:
    """The number before a unit: "100 to 150 English words", "a sentence", "two-paragraph"; None if there is none, or if it
    belongs to the prompt ("the last 5 words")."""
    at = index - 1
    skipped = 0
    while at >= 0 and (_value(tokens[at]) is None or (tokens[at] in _ARTICLES and _has_number(tokens, at))):
        token = tokens[at]
        if token in _STOPS or token in _BLOCK or skipped == 3:
            return None
        skipped += token != "-"
        at -= 1
    if at < 0:
        return None
    end = at
    while at > 0 and _is_number_part(tokens, at):
        at -= 1
    number = _evaluate(tokens[at : end + 1])
    before = tokens[at - 1] if at else ""
    if (
        at > 1
        and before in _RANGES
        and (low := _value(tokens[at - 2])) is not None
        and tokens[at - 2] not in _ARTICLES
    ):
        number = (low * number) ** 0.5 if 0 < low < number else number
        at -= 2
    elif at > 1 and before in ("and", "und", "y", "et") and (low := _value(tokens[at - 2])) is not None:
        number = (low * number) ** 0.5 if 0 < low < number else number
        at -= 2
    before = tokens[at - 1] if at else ""
    article = end == at and tokens[at] in _ARTICLES
    if article and (
        unit in ("words", "items", "tokens", "characters", "minutes") or before not in _BEFORE_ARTICLE
    ):
        return None
    if article and unit == "paragraphs" and skipped == 0 and before == "with":
        return None
    if before in _GIVEN or (code and before not in _LIMITS):
        return None
    after = tokens[index + 1] if index + 1 < len(tokens) else ""
    if unit == "characters" and number < 20 and before not in _LIMITS:
        return None
    if unit == "minutes" and after not in ("speech", "rede", "discurso", "talk", "presentation"):
        return None
    if (
        unit == "pages"
        and after in ("book", "document", "pdf", "novel", "contract", "paper")
        and "summarize" in tokens
    ):
        return None
    return number if 0 < number <= 10_000_000 else None


def _has_number(tokens: Sequence[str], at: int) -> bool:
    """Whether an article stands in front of a number or belongs to it: "a hundred"."""
    return at + 1 < len(tokens) and _value(tokens[at + 1]) is not None


def _is_number_part(tokens: Sequence[str], at: int) -> bool:
    """Whether the token before a number belongs to it: "two hundred and fifty", "twenty-five", "10 k"."""
    here, before = tokens[at], tokens[at - 1]
    if here[0].isdecimal():
        return False
    if before in ("-", "and", "y", "und") and at > 1 and here in _NUMBERS:
        number = _value(tokens[at - 2])
        return number is not None and tokens[at - 2] not in _ARTICLES and number >= 20 and number % 10 == 0
    value = _value(before)
    here_value = _value(here)
    if value is None or here_value is None:
        return False
    return here_value >= 100 or value >= 20


def _evaluate(words: Sequence[str]) -> float:
    """The value of the words of a number: "two thousand five hundred", "10 k"."""
    total, group = 0.0, 0.0
    for word in words:
        value = _value(word)
        if value is None:
            continue
        if value >= 1_000 and not word[0].isdecimal():
            total += max(group, 1) * value
            group = 0.0
        elif value == 100 and 0 < group < 100 and not word[0].isdecimal():
            group *= value
        else:
            group += value
    return total + group


def _number_after(tokens: Sequence[str], index: int) -> float | None:
    """The number of things after a verb: "give me a list of 10 funny animals"."""
    for at in range(index + 1, min(index + 8, len(tokens) - 1)):
        token = tokens[at]
        value = _value(token)
        if value is None or token in _ARTICLES or token in ("one", "couple", "few", "several", "half"):
            if token not in _BETWEEN:
                return None
            continue
        end = at
        while end + 1 < len(tokens) and _value(tokens[end + 1]) is not None:
            end += 1
        number = _evaluate(tokens[at : end + 1])
        if (
            end + 2 < len(tokens)
            and tokens[end + 1] in _RANGES
            and (high := _value(tokens[end + 2])) is not None
        ):
            number = (number * high) ** 0.5 if number else high
            end += 2
        nouns = tokens[end + 1 : end + 5]
        if not nouns or nouns[0] in _MEASURES or not nouns[0][0].isalpha():
            return None
        if any(noun in _UNITS for noun in nouns[:3]):
            return None
        if tokens[at - 1] in _GIVEN and tokens[at - 1] not in ("the", "top", "die", "los", "las"):
            return None
        return number if 0 < number <= 1_000 else None
    return None


def _cjk_amount(text: str) -> RequestedAmount | None:
    code = _CODE.search(text) is not None
    detail = "brief" if _CJK_BRIEF.search(text) else "detailed" if _CJK_DETAILED.search(text) else ""
    if not code and _LETTER.search(text):
        return RequestedAmount("words", 1)
    found: list[RequestedAmount] = []
    for match in _CJK_AMOUNT.finditer(text):
        number, unit = _cjk_number(match[1]), _CJK_UNITS[match[3]]
        if match[2]:
            number = (number * _cjk_number(match[2])) ** 0.5
        if number < 2 and unit == "items":
            continue
        around = text[match.end() : match.end() + 40]
        if 0 < number <= 10_000_000 and (
            unit in ("ideographs", "tokens", "minutes") or _CJK_REQUEST.search(around)
        ):
            if not (code and unit in ("items", "lines", "words", "ideographs")):
                found.append(RequestedAmount(unit, number))
    if found:
        sizes = [(amount.number or 1) * _SIZES[amount.unit] for amount in found]
        best = found[sizes.index(max(sizes))]
        return best._replace(detail=detail)
    if _CHOICE.search(text):
        return RequestedAmount("words", 1) if _ONLY_CJK.search(text) else RequestedAmount("choice")
    if code:
        return None
    form = ""
    if _CJK_WRITE.search(text):
        form = next((name for word, name in _CJK_FORMS if word in text), "")
    return RequestedAmount(form, None, detail) if form or detail else None


def _cjk_number(text: str) -> float:
    """The value of digits or kanji numerals: 1,000, 2千, 二百五十, 1万."""
    total, group, digit = 0.0, 0.0, 0.0
    for number in re.findall(r"[0-9][0-9,.]*|\D", text):
        if number[0].isdecimal():
            digits = number.rstrip(",.").replace(",", "")
            digit = float(digits) if digits.count(".") < 2 and len(digits) < 12 else 0.0
        elif number in _CJK_DIGITS:
            digit = digit * 10 + _CJK_DIGITS[number]
        elif number == "万":
            total, group, digit = total + max(group + digit, 1) * 10_000, 0.0, 0.0
        else:
            group, digit = group + max(digit, 1) * {"十": 10, "百": 100, "千": 1_000}[number], 0.0
    return total + group + digit
