"""Composed training prompts that ask for an amount of output, and their lengths.

Real prompts seldom ask for an amount, and small encoders do not learn it from them. Here the same task comes with several
amounts, in English, German, Spanish, Japanese and a little Chinese: tasks of our own wording with topics of our own or with
short real prompts, limits in the user's message or in the system prompt, and numbers that ask for nothing.

The label is the prediction of a teacher (tailcast-smollm2) for the text without tag, moved towards the length that the amount
implies: `ln length = (1 - w) mu_teacher + w ln implied`. The implied lengths are assumptions that keep to what
`benchmarks.lengths.compliance` shows where the sets show something:

| unit | implied tokens | w | shown by the sets |
|---|---|---:|---|
| words | 1.4 per word in English, 1.9 in German, 1.6 in Spanish | 0.85 | CASTILLO: 100 words 190 to 215, 500: 650 to 720, 700: 760; slope .7 and .5 in Alpaca 52k |
| ideographs | 0.9 per character | 0.85 | 1.0 at 1,000 characters (Chinese); slope .4, as parts of tasks |
| sentences | 28 per sentence | 0.85 | 19 to 31, slope .6 to 1 |
| paragraphs | 150 n^.85 | 0.75 | 100 to 200 for one; more are assumed |
| lines of a poem | 11 per line | 0.8 | 11 to 22, slope 1 |
| items | tokens of the kind, n^.85 | 0.7 | slope .2 to .6 at 2 to 10 items; larger numbers are assumed |
| only yes or no, one word, one letter | 3 | 0.9 | no rows |
| forms (title, haiku, tweet, essay, ...) | `_FORMS` | 0.65 | rough medians |

The language model that the teacher is made from, SmolLM2-135M-Instruct, does not follow amounts well enough for its own
answers to be labels: to tasks with several amounts (`benchmarks.lengths.compliance --prompts`, one sample each at temperature
0.7, those cut at 800 tokens left out) its slopes are .26 +- .08 for words, .43 +- .10 for sentences and .27 +- .10 for items.

An upper or lower limit is followed half as a target, and half as a limit of the teacher's length for the request without it.
"Be brief" and the like multiply the teacher's length for the request without them (`_DETAIL`, `_DETAIL_TASKS`, assumed). Above about 2,000
words models write less than they are asked for; `SATURATION` is from what is known of long stories: 10,000 words give 1,500
to 4,000 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from examples.pretrained.conversations import columns
from examples.pretrained.distillation import ROWS_PER_PROMPT, pairs_of_lengths
from examples.pretrained.prepare import COLUMNS, Prepared, prompt_hash
from predictors.modules.checkpoint import load_checkpoint
from scheduler_core.errors import InputError
from scheduler_core.prediction.prompt_text import SYSTEM, USER, Message
from scheduler_core.prediction.requested_amount import requested_amount
from scheduler_core.shell.files import atomic_file
from scheduler_core.shell.progress import tracked
from training.network.inference import has_bfloat16, predict_prompts

#: Number of composed prompts.
NUM_PROMPTS = 8_000
#: Amounts per task: the same words with other numbers.
AMOUNTS_PER_TASK = 4
#: Length in tokens that models hardly exceed, and how sharply: (implied^-p + SATURATION^-p)^(-1/p).
SATURATION, SHARPNESS = 4_000.0, 1.5
#: Share of tasks whose limit is in the system prompt, of tasks without an amount, and of real prompts as tasks.
IN_SYSTEM, REAL = 0.2, 0.45
#: Weight and sigma of the implied lengths of forms of text, and of requests for short and long answers.
FORM_TRUST, DETAIL_TRUST = (0.65, 0.45), (0.65, 0.6)
#: ln of how far a limit may move the length of an answer, of which half is used; see `labels`.
BASE_ROOM = 0.25
#: Kind of task -> its share.
KINDS = {"amount": 0.5, "detail": 0.17, "form": 0.18, "choice": 0.07, "none": 0.08}
LANGUAGES = {"en": 0.46, "de": 0.18, "es": 0.17, "ja": 0.16, "zh": 0.03}

Floats = NDArray[np.float64]
T = TypeVar("T")


class Composed(NamedTuple):
    """A composed prompt and what it asks for.

    Attributes:
        task: Number of its task; the prompts of a task differ in the amount only.
        text: Text of the user.
        plain: The same request as one message, for the teacher.
        tokens: Implied output length in tokens; None: `factor` times the teacher's length for `base`.
        bound: "most" or "least", if the amount is only a limit: an output that is short by nature stays below it.
        weight: Weight of the implied length, from 0 to 1.
        sigma: Sigma at weight 1.
        base, factor: Request without the words that change its length, and by how much they do.
        system: System prompt; "" without one.
    """

    task: int
    text: str
    plain: str
    tokens: float | None = None
    weight: float = 0.0
    sigma: float = 0.5
    base: str = ""
    factor: float = 1.0
    system: str = ""
    bound: str = ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The request as a conversation."""
        user = Message(USER, self.text)
        return (Message(SYSTEM, self.system), user) if self.system else (user,)


#: Amounts by unit.
_NUMBERS: Mapping[str, Sequence[int]] = {
    "words": (5, 10, 15, 20, 25, 30, 40, 50, 60, 75, 80, 100, 120, 150, 180, 200, 250, 300, 350, 400, 500, 600, 700, 750, 800,
              1000, 1200, 1500, 1800, 2000, 2500, 3000, 4000, 5000, 7000, 8000, 10000),
    "ideographs": (10, 20, 30, 50, 80, 100, 140, 150, 200, 250, 300, 400, 500, 600, 800, 1000, 1200, 1500, 2000, 3000, 4000,
                   5000, 8000, 10000),
    "sentences": (1, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30),
    "paragraphs": (1, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12),
    "pages": (1, 2, 3, 4, 5, 8, 10, 15, 20, 50),
    "lines": (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 30, 40),
    "items": (2, 3, 3, 4, 5, 5, 6, 7, 8, 10, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100),
    "characters": (50, 80, 100, 140, 160, 200, 280, 300, 500, 800, 1000, 2000),
    "tokens": (20, 50, 100, 150, 200, 300, 500, 800, 1000, 2000),
    "minutes": (1, 2, 3, 5, 7, 10, 15, 20, 30),
}  # fmt: skip
#: Tokens per word of a text, by language.
_PER_WORD = {"en": 1.4, "de": 1.9, "es": 1.6, "ja": 2.2, "zh": 1.8}
#: Weight and sigma by unit.
_TRUST = {
    "words": (0.85, 0.28),
    "ideographs": (0.85, 0.28),
    "characters": (0.75, 0.35),
    "tokens": (0.7, 0.4),
    "sentences": (0.85, 0.32),
    "paragraphs": (0.75, 0.32),
    "pages": (0.8, 0.4),
    "lines": (0.8, 0.35),
    "items": (0.7, 0.4),
    "minutes": (0.75, 0.4),
}
#: Limits that are added to any task, by language and unit; {n} is the number.
_LIMITS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "en": {
        "words": ("in {n} words", "Use about {n} words.", "Limit: {n} words.", "Please keep it under {n} words.",
                  "Write at least {n} words.", "Your answer should be {n} words long.", "in no more than {n} words",
                  "Length: {n} words", "(max {n} words)", "with a maximum of {n} words", "Aim for roughly {n} words.",
                  "Answer in exactly {n} words.", "in around {n} words", "word count: {n} words",
                  "Do not exceed {n} words.", "Stay between {low} and {n} words.", "{low}-{n} words please"),
        "sentences": ("in {n} {sentence}", "Use only {n} {sentence}.", "Answer with {n} {sentence}.",
                      "Reply in exactly {n} {sentence}.", "Please limit your answer to {n} {sentence}.",
                      "in at most {n} {sentence}", "No more than {n} {sentence}, please.", "{n} {sentence} max"),
        "paragraphs": ("in {n} {paragraph}", "Write {n} {paragraph}.", "Your response should have {n} {paragraph}.",
                       "using {n} {paragraph}", "Structure the answer as {n} {paragraph}.", "in {n} short {paragraph}"),
        "items": ("in {n} bullet points", "Give {n} bullet points.", "as a list of {n} points", "List {n} key points.",
                  "Summarise it as {n} bullets.", "Mention {n} examples.", "in {n} steps"),
        "characters": ("in under {n} characters", "Maximum length: {n} characters.", "It must fit in {n} characters."),
        "tokens": ("Use at most {n} tokens.", "in about {n} tokens"),
        "pages": ("in {n} {page}", "The text should fill {n} {page}.", "Length: {n} {page}"),
    },
    "de": {
        "words": ("in {n} Wörtern", "Benutze etwa {n} Wörter.", "Maximal {n} Wörter.", "Umfang: {n} Wörter",
                  "Bitte höchstens {n} Wörter.", "mit mindestens {n} Wörtern", "Die Antwort soll {n} Wörter lang sein.",
                  "in genau {n} Wörtern", "(ca. {n} Wörter)", "zwischen {low} und {n} Wörtern"),
        "sentences": ("in {n} {sentence}", "Antworte in {n} {sentence}.", "Bitte in höchstens {n} {sentence}.",
                      "Nutze nur {n} {sentence}.", "mit genau {n} {sentence}"),
        "paragraphs": ("in {n} {paragraph}", "Schreibe {n} {paragraph}.", "Gliedere die Antwort in {n} {paragraph}."),
        "items": ("in {n} Stichpunkten", "Nenne {n} Beispiele.", "Fasse es in {n} Punkten zusammen.",
                  "Gib mir {n} Argumente."),
        "pages": ("auf {n} {page}", "Umfang: {n} {page}"),
        "characters": ("mit maximal {n} Zeichen", "in höchstens {n} Zeichen"),
    },
    "es": {
        "words": ("en {n} palabras", "Usa unas {n} palabras.", "Máximo {n} palabras.", "Extensión: {n} palabras",
                  "con al menos {n} palabras", "La respuesta debe tener {n} palabras.", "en no más de {n} palabras",
                  "Responde en exactamente {n} palabras.", "entre {low} y {n} palabras"),
        "sentences": ("en {n} {sentence}", "Responde en {n} {sentence}.", "Usa solo {n} {sentence}.",
                      "con un máximo de {n} {sentence}"),
        "paragraphs": ("en {n} {paragraph}", "Escribe {n} {paragraph}.", "Organiza la respuesta en {n} {paragraph}."),
        "items": ("en {n} puntos", "Da {n} ejemplos.", "Resúmelo en {n} puntos clave.", "Menciona {n} razones."),
        "pages": ("en {n} {page}", "Extensión: {n} {page}"),
        "characters": ("en menos de {n} caracteres", "con un máximo de {n} caracteres"),
    },
    "ja": {
        "ideographs": ("{n}字で", "{n}文字以内でお願いします。", "{n}字程度でまとめてください。", "回答は{n}文字以内で。",
                       "{n}字以上で書いてください。", "文字数は{n}文字です。", "{low}〜{n}字で答えてください。"),
        "sentences": ("{n}文で答えてください。", "{n}文で簡潔に説明してください。", "{n}つの文で答えてください。"),
        "paragraphs": ("{n}段落で書いてください。", "{n}つの段落にまとめてください。"),
        "items": ("{n}つ挙げてください。", "要点を{n}個にまとめてください。", "{n}つの例を挙げてください。",
                  "箇条書きで{n}点にまとめてください。"),
        "words": ("英単語{n}語で答えてください。", "{n}語以内で答えてください。"),
        "pages": ("{n}ページで書いてください。",),
    },
    "zh": {
        "ideographs": ("请用{n}字回答。", "{n}字左右。", "不超过{n}字。", "字数不少于{n}字。"),
        "sentences": ("请用{n}句话回答。", "用{n}句话总结。"),
        "paragraphs": ("请写{n}段。",),
        "items": ("请列出{n}个要点。", "举{n}个例子。"),
    },
}  # fmt: skip
#: Tasks with an amount: (text, unit, tokens per item).
_TASKS: Mapping[str, Sequence[tuple[str, str, float]]] = {
    "en": (
        ("Write a {n} word essay about {topic}.", "words", 0), ("Write a {n}-word article on {topic}.", "words", 0),
        ("Write a story of {n} words about {topic}", "words", 0), ("I need a {n} word blog post about {topic}", "words", 0),
        ("Compose a {n}-word report on {topic} for my manager.", "words", 0),
        ("Summarize what is known about {topic} in {n} words.", "words", 0),
        ("Tell me a {n}-word bedtime story that features {topic}.", "words", 0),
        ("Can you draft a text of about {n} words on {topic}?", "words", 0),
        ("Give me {n} facts about {topic}", "items", 30), ("List {n} interesting facts about {topic}.", "items", 30),
        ("List {n} words related to {topic}", "items", 4), ("Name {n} things connected with {topic}.", "items", 7),
        ("What are {n} reasons to care about {topic}?", "items", 45), ("Give {n} tips for {topic}.", "items", 40),
        ("Suggest {n} titles for a book about {topic}", "items", 12), ("Write {n} quiz questions about {topic}.", "items", 28),
        ("Brainstorm {n} ideas for a project on {topic}.", "items", 38), ("{n} tweets about {topic}", "items", 42),
        ("Generate {n} slogans for {topic}", "items", 12), ("Come up with {n} names for a company in {topic}.", "items", 8),
        ("Tell me {n} jokes about {topic}.", "items", 32), ("I want {n} book recommendations on {topic}", "items", 36),
        ("Create a table of contents with {n} chapters for a book on {topic}.", "items", 20),
        ("Write {n} example sentences about {topic}.", "items", 20), ("Top {n} mistakes people make with {topic}", "items", 40),
        ("Could you list {n} good arguments for {topic}?", "items", 45), ("Please share {n} little-known facts on {topic}.", "items", 32),
        ("I'm looking for {n} creative ideas around {topic}", "items", 38), ("Show me {n} examples of {topic} in everyday life.", "items", 36),
        ("About {topic}: {n} tips for beginners", "items", 40), ("Propose {n} exercises to practice {topic}.", "items", 42),
        ("Collect {n} quotes about {topic}.", "items", 30), ("Help me think of {n} gifts for somebody who loves {topic}.", "items", 22),
        ("Write {n} headlines on {topic} for a newspaper", "items", 14), ("Describe {n} steps to get started with {topic}.", "items", 48),
        ("What {n} questions should I ask an expert on {topic}?", "items", 24), ("Recommend {n} films about {topic}.", "items", 34),
        ("My class discusses {topic} tomorrow. Give us {n} talking points.", "items", 36), ("Invent {n} characters for a novel about {topic}.", "items", 55),
        ("Name {n} advantages of {topic}", "items", 36), ("Enumerate {n} risks of {topic}, one line each.", "items", 22),
        ("Make a checklist of {n} items for {topic}.", "items", 18), ("{topic}: list {n} keywords", "items", 5),
        ("Produce {n} flashcards on {topic}, with answers.", "items", 45), ("Think of {n} hashtags for a photo of {topic}.", "items", 6),
        ("Outline {n} strategies for {topic}.", "items", 55), ("Pick {n} famous people connected with {topic}.", "items", 26),
        ("Explain {topic} in {n} {sentence}.", "sentences", 0), ("Describe {topic} using {n} {sentence}.", "sentences", 0),
        ("Write {n} {sentence} about {topic}.", "sentences", 0), ("Sum up {topic} in {n} {sentence}", "sentences", 0),
        ("Write {n} {paragraph} about {topic}.", "paragraphs", 0), ("Write a {n}-paragraph essay on {topic}", "paragraphs", 0),
        ("Explain {topic} to a student in {n} {paragraph}.", "paragraphs", 0),
        ("Write a {n}-page essay about {topic}.", "pages", 0), ("Prepare a report of {n} {page} on {topic}.", "pages", 0),
        ("Write a poem of {n} lines about {topic}.", "lines", 0), ("Compose a {n}-line poem on {topic}", "lines", 0),
        ("Write a {n}-minute speech about {topic}.", "minutes", 0),
        ("Write a product description about {topic} with up to {n} characters.", "characters", 0),
    ),
    "de": (
        ("Schreibe einen Aufsatz mit {n} Wörtern über {topic}.", "words", 0),
        ("Schreib einen Artikel von {n} Wörtern zum Thema {topic}", "words", 0),
        ("Verfasse eine Geschichte mit etwa {n} Wörtern über {topic}.", "words", 0),
        ("Fasse {topic} in {n} Wörtern zusammen.", "words", 0),
        ("Nenne {n} Fakten über {topic}.", "items", 38), ("Gib mir {n} Tipps zu {topic}", "items", 48),
        ("Liste {n} Wörter auf, die zu {topic} passen.", "items", 6), ("Schreibe {n} Quizfragen zu {topic}.", "items", 34),
        ("Nenne mir {n} Ideen für ein Projekt über {topic}", "items", 44),
        ("Schlage {n} Titel für ein Buch über {topic} vor.", "items", 14), ("{n} Gründe, sich mit {topic} zu befassen", "items", 50),
        ("Zähle {n} Vorteile auf, die man mit {topic} verbindet.", "items", 44), ("Kannst du mir {n} Beispiele zu {topic} geben?", "items", 42),
        ("Ich brauche {n} Argumente zum Thema {topic}.", "items", 50), ("Zu {topic}: bitte {n} Stichpunkte", "items", 30),
        ("Welche {n} Fragen sollte ich zu {topic} stellen?", "items", 30), ("Erstelle eine Liste mit {n} Büchern über {topic}.", "items", 38),
        ("Erfinde {n} Überschriften über {topic}", "items", 16), ("Formuliere {n} Ratschläge zu {topic}.", "items", 44),
        ("Sammle {n} Zitate über {topic}.", "items", 38), ("Beschreibe {n} Schritte, um mit {topic} anzufangen.", "items", 55),
        ("Erkläre {topic} in {n} {sentence}.", "sentences", 0), ("Beschreibe {topic} in genau {n} {sentence}.", "sentences", 0),
        ("Schreibe {n} {paragraph} über {topic}.", "paragraphs", 0), ("Erkläre {topic} in {n} {paragraph}", "paragraphs", 0),
        ("Schreibe einen Bericht von {n} {page} über {topic}.", "pages", 0),
        ("Schreibe ein Gedicht mit {n} Zeilen über {topic}.", "lines", 0),
        ("Schreibe eine {n}-minütige Rede über {topic}.", "minutes", 0),
    ),
    "es": (
        ("Escribe un ensayo de {n} palabras sobre {topic}.", "words", 0), ("Redacta un artículo de {n} palabras sobre {topic}", "words", 0),
        ("Escribe un cuento de unas {n} palabras sobre {topic}.", "words", 0), ("Resume {topic} en {n} palabras.", "words", 0),
        ("Dame {n} datos sobre {topic}.", "items", 34), ("Enumera {n} consejos sobre {topic}", "items", 44),
        ("Lista {n} palabras relacionadas con {topic}.", "items", 5), ("Escribe {n} preguntas sobre {topic}.", "items", 28),
        ("Sugiere {n} ideas para un proyecto sobre {topic}", "items", 42), ("Propón {n} títulos para un libro sobre {topic}.", "items", 13),
        ("¿Cuáles son {n} razones para interesarse por {topic}?", "items", 48),
        ("Menciona {n} ventajas de {topic}.", "items", 42), ("¿Puedes darme {n} ejemplos sobre {topic}?", "items", 38),
        ("Necesito {n} argumentos sobre {topic}.", "items", 46), ("Sobre {topic}: {n} puntos clave, por favor", "items", 30),
        ("Haz una lista de {n} libros sobre {topic}.", "items", 34), ("Inventa {n} titulares sobre {topic}", "items", 15),
        ("¿Qué {n} preguntas debería hacer sobre {topic}?", "items", 26), ("Cuéntame {n} curiosidades sobre {topic}.", "items", 38),
        ("Recopila {n} citas sobre {topic}.", "items", 34), ("Describe {n} pasos para empezar con {topic}.", "items", 50),
        ("Recomienda {n} películas sobre {topic}.", "items", 36), ("Nombra {n} personas famosas relacionadas con {topic}", "items", 26),
        ("Explica {topic} en {n} {sentence}.", "sentences", 0), ("Describe {topic} con {n} {sentence}.", "sentences", 0),
        ("Escribe {n} {paragraph} sobre {topic}.", "paragraphs", 0), ("Explica {topic} en {n} {paragraph}", "paragraphs", 0),
        ("Escribe un informe de {n} {page} sobre {topic}.", "pages", 0),
        ("Escribe un poema de {n} versos sobre {topic}.", "lines", 0),
        ("Escribe un discurso de {n} minutos sobre {topic}.", "minutes", 0),
    ),
    "ja": (
        ("{topic}について{n}字で説明してください。", "ideographs", 0), ("{topic}について{n}文字程度のエッセイを書いてください。", "ideographs", 0),
        ("{topic}をテーマに{n}字の物語を書いて", "ideographs", 0), ("{topic}について{n}字以内で要約してください。", "ideographs", 0),
        ("{topic}に関する{n}文字のブログ記事を作成してください。", "ideographs", 0),
        ("{topic}についての豆知識を{n}個教えてください。", "items", 45), ("{topic}に関するアイデアを{n}つ挙げてください。", "items", 50),
        ("{topic}に関連する言葉を{n}個リストアップしてください。", "items", 8), ("{topic}についてのクイズを{n}問作ってください。", "items", 45),
        ("{topic}のコツを{n}つ教えて", "items", 55), ("{topic}についての本のタイトルを{n}個考えてください。", "items", 16),
        ("{topic}の例を{n}個示してください。", "items", 45), ("{topic}の利点を{n}つ述べてください。", "items", 50),
        ("{topic}についての質問を{n}個書いて", "items", 28), ("{topic}に関するおすすめの本を{n}冊教えてください。", "items", 45),
        ("{topic}の特徴を{n}点挙げて", "items", 45), ("{topic}を始めるための手順を{n}個にまとめてください。", "items", 55),
        ("{topic}に関する名言を{n}個紹介してください。", "items", 45), ("{topic}が好きな人への贈り物を{n}個提案してください。", "items", 35),
        ("{topic}について、豆知識を{n}個お願いします。", "items", 45), ("{topic}の見出しを{n}案考えてください。", "items", 18),
        ("{topic}を{n}文で説明してください。", "sentences", 0), ("{topic}について{n}文で答えてください。", "sentences", 0),
        ("{topic}について{n}段落で書いてください。", "paragraphs", 0), ("{topic}について{n}ページのレポートを書いてください。", "pages", 0),
        ("{topic}についての{n}行の詩を書いてください。", "lines", 0), ("{topic}について{n}分間のスピーチを書いてください。", "minutes", 0),
    ),
    "zh": (
        ("写一篇关于{topic}的{n}字作文。", "ideographs", 0), ("请用{n}字介绍{topic}。", "ideographs", 0),
        ("列出{n}个关于{topic}的事实。", "items", 35), ("请给出{n}条关于{topic}的建议。", "items", 40),
        ("用{n}句话介绍{topic}。", "sentences", 0), ("写{n}段关于{topic}的文字。", "paragraphs", 0),
    ),
}  # fmt: skip
#: Requests for a form of text, and the forms with the implied tokens of such a text, if it were in English.
_FORM_REQUESTS: Mapping[str, Sequence[str]] = {
    "en": ("Write {form} about {topic}.", "Write {form} about {topic}", "Compose {form} on {topic}.", "Can you write {form} about {topic}?",
           "I need {form} about {topic}", "Please draft {form} on the subject of {topic}.", "{topic}: write {form}", "Create {form} about {topic}.",
           "Generate {form} on {topic}", "Could you give me {form} about {topic}?", "Help me write {form} about {topic}"),
    "de": ("Schreibe {form} über {topic}.", "Schreib {form} über {topic}", "Verfasse {form} zum Thema {topic}.", "Ich brauche {form} über {topic}",
           "Kannst du {form} über {topic} schreiben?", "Erstelle bitte {form} über {topic}.", "Formuliere {form} zu {topic}"),
    "es": ("Escribe {form} sobre {topic}.", "Escribe {form} sobre {topic}", "Redacta {form} acerca de {topic}.", "Necesito {form} sobre {topic}",
           "¿Puedes escribir {form} sobre {topic}?", "Crea {form} sobre {topic}.", "Dame {form} sobre {topic}"),
    "ja": ("{topic}についての{form}を書いてください。", "{topic}をテーマにした{form}を書いて", "{topic}に関する{form}を作成してください。",
           "{topic}についての{form}をお願いします。", "{topic}の{form}を考えてください。"),
    "zh": ("写一{form}，关于{topic}。", "请以{topic}为题写一{form}。"),
}  # fmt: skip
_FORMS: Mapping[str, Mapping[str, float]] = {
    "en": {"a title": 14, "a headline": 14, "a slogan": 15, "a tagline": 14, "a motto": 13, "an email subject line": 13, "a haiku": 22,
           "a proverb": 18, "a caption": 35, "a riddle": 50, "a joke": 45, "a one-liner": 25, "a limerick": 55, "a tweet": 55,
           "a text message": 50, "a definition": 70, "a toast": 150, "a note": 90, "a postcard": 100, "a social media post": 120, "an abstract": 200,
           "a product description": 170, "a poem": 190, "a sonnet": 170, "a song": 300, "an email": 230, "a press release": 480,
           "a letter": 330, "a review": 300, "a recipe": 380, "an outline": 330, "a summary": 250, "a dialogue": 450, "an interview": 700,
           "a newsletter": 550, "a speech": 700, "a story": 750, "a short story": 700, "a fairy tale": 800, "an essay": 800, "an article": 800,
           "a blog post": 800, "a report": 850, "a lesson plan": 850, "a step-by-step guide": 850, "a tutorial": 950, "a lecture": 1_100,
           "a business plan": 1_150, "a screenplay": 1_150, "a white paper": 1_200, "a research paper": 1_300, "a chapter of a novel": 1_200},
    "de": {"einen Titel": 14, "eine Überschrift": 14, "einen Slogan": 15, "ein Motto": 13, "ein Haiku": 22, "ein Sprichwort": 18, "ein Rätsel": 50,
           "einen Witz": 45, "einen Tweet": 55, "eine SMS": 45, "eine Definition": 70, "eine Notiz": 90, "eine Postkarte": 100, "einen Limerick": 55,
           "eine Produktbeschreibung": 170, "ein Gedicht": 190, "ein Lied": 300, "eine E-Mail": 230, "einen Brief": 330,
           "eine Pressemitteilung": 480, "eine Rezension": 300, "eine Gliederung": 330, "eine Zusammenfassung": 250, "einen Dialog": 450,
           "eine Rede": 700, "eine Geschichte": 750, "ein Märchen": 800, "einen Aufsatz": 800, "einen Artikel": 800, "einen Blogbeitrag": 800,
           "einen Bericht": 850, "eine Anleitung": 850, "einen Vortrag": 1_000, "ein Drehbuch": 1_150, "eine Hausarbeit": 1_300,
           "ein Kapitel eines Romans": 1_200},
    "es": {"un título": 14, "un titular": 14, "un eslogan": 15, "un lema": 13, "un haiku": 22, "un refrán": 18, "una adivinanza": 50, "un chiste": 45,
           "un tuit": 55, "un mensaje de texto": 50, "una definición": 70, "una nota": 90, "una postal": 100, "un pie de foto": 35,
           "una descripción de producto": 170, "un poema": 190, "un soneto": 170, "una canción": 300, "un correo": 230, "una carta": 330,
           "una nota de prensa": 480, "una reseña": 300, "un esquema": 330, "un resumen": 250, "un diálogo": 450, "un discurso": 700,
           "una historia": 750, "un cuento": 750, "un ensayo": 800, "un artículo": 800, "una entrada de blog": 800, "un informe": 850,
           "una guía paso a paso": 850, "una conferencia": 1_100, "un guion": 1_150, "un capítulo de una novela": 1_200},
    "ja": {"タイトル": 9, "見出し": 9, "キャッチコピー": 10, "スローガン": 10, "俳句": 12, "短歌": 20, "なぞなぞ": 35, "ジョーク": 40, "ツイート": 40,
           "一言メッセージ": 25, "短いメモ": 60, "定義": 60, "商品説明": 140, "詩": 130, "歌詞": 230, "メール": 200, "手紙": 280, "要約": 180,
           "プレスリリース": 400, "感想文": 350, "対話": 350, "スピーチ": 480, "物語": 560, "昔話": 560, "エッセイ": 520, "作文": 480, "記事": 560,
           "ブログ記事": 560, "レポート": 600, "論文": 800, "講義": 750, "脚本": 800, "小説の一章": 800, "企画書": 700},
    "zh": {"个标题": 10, "条微博": 60, "首诗": 130, "封邮件": 200, "篇作文": 600, "个故事": 600, "份报告": 700},
}  # fmt: skip
#: Words that are added to a task: (text, factor of the teacher's length).
_DETAIL: Mapping[str, Sequence[tuple[str, float]]] = {
    "en": (("Be brief.", 0.5), ("Answer briefly.", 0.5), ("Keep it short.", 0.5), ("Be concise.", 0.6), ("TL;DR please.", 0.45),
           ("Explain in detail.", 1.5), ("Be thorough.", 1.5), ("Give a comprehensive answer.", 1.6),
           ("Just a quick answer, please.", 0.45), ("Short answer only.", 0.4), ("Keep your reply as short as possible.", 0.35),
           ("Don't go into detail.", 0.55), ("In brief, please.", 0.5), ("No long explanations.", 0.5), ("Be succinct and to the point.", 0.5),
           ("Elaborate as much as you can.", 1.6), ("Take your time and cover every aspect.", 1.7), ("I want a long, detailed answer.", 1.7),
           ("Go into as much detail as possible.", 1.7), ("Include background, examples and nuances.", 1.6), ("Give full explanations.", 1.4),
           ("Answer in depth, with examples.", 1.7), ("Please write a very detailed and exhaustive answer.", 1.8)),
    "de": (("Antworte kurz.", 0.5), ("Fasse dich kurz.", 0.5), ("Bitte knapp.", 0.5), ("Antworte ausführlich.", 1.5),
           ("So kurz wie möglich.", 0.35), ("Nur eine kurze Antwort bitte.", 0.45), ("Keine langen Erklärungen.", 0.5), ("Halte dich kurz und prägnant.", 0.5),
           ("So ausführlich wie möglich.", 1.7), ("Geh bitte ins Detail.", 1.6), ("Mit vielen Beispielen und Hintergründen.", 1.6),
           ("Bitte sehr detailliert.", 1.6), ("Erkläre es gründlich und umfassend.", 1.6)),
    "es": (("Sé breve.", 0.5), ("Responde brevemente.", 0.5), ("De forma concisa.", 0.6), ("Explica en detalle.", 1.5),
           ("Responde de forma muy detallada.", 1.6), ("Sé exhaustivo.", 1.6), ("Lo más corto posible.", 0.35), ("Solo una respuesta rápida.", 0.45), ("Sin explicaciones largas.", 0.5),
           ("Con todo lujo de detalles.", 1.7), ("Desarrolla la respuesta con ejemplos.", 1.6), ("Quiero una respuesta larga y completa.", 1.7)),
    "ja": (("簡潔に答えてください。", 0.5), ("手短にお願いします。", 0.5), ("短く答えて。", 0.5), ("詳しく説明してください。", 1.5),
           ("詳細に答えてください。", 1.5), ("できるだけ詳しく教えてください。", 1.6), ("できるだけ短く答えてください。", 0.35), ("要点だけお願いします。", 0.45), ("長い説明は不要です。", 0.5),
           ("例を挙げて丁寧に説明してください。", 1.6), ("背景も含めて長めに書いてください。", 1.7), ("徹底的に解説してください。", 1.7)),
    "zh": (("请简要回答。", 0.5), ("请详细说明。", 1.5)),
}  # fmt: skip
#: The same request for a short, for any and for a long answer.
_DETAIL_TASKS: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "en": (("Briefly explain {topic}.", "Explain {topic}.", "Explain {topic} in great detail."),
           ("Explain {topic} briefly", "Explain {topic}", "Explain {topic} thoroughly"),
           ("Give me a short answer: what matters about {topic}?", "What matters about {topic}?", "Give me a long answer: what matters about {topic}?"),
           ("Give a quick overview of {topic}.", "Give an overview of {topic}.", "Give a comprehensive overview of {topic}."),
           ("What is there to know about {topic}, in a nutshell?", "What is there to know about {topic}?", "Tell me everything there is to know about {topic}."),
           ("Write a short text about {topic}.", "Write a text about {topic}.", "Write a long text about {topic}."),
           ("Write a very short story about {topic}", "Write a story about {topic}", "Write a very long story about {topic}"),
           ("Write a short essay on {topic}.", "Write an essay on {topic}.", "Write an extensive essay on {topic}."),
           ("Can you quickly summarize {topic}?", "Can you summarize {topic}?", "Can you analyze {topic} in depth?"),
           ("I'm in a hurry. Tell me about {topic}.", "Tell me about {topic}.", "I have plenty of time. Tell me about {topic}, with every detail."),
           ("Describe {topic} concisely.", "Describe {topic}.", "Describe {topic} at length."),
           ("A succinct introduction to {topic}, please", "An introduction to {topic}, please", "An in-depth introduction to {topic}, please"),
           ("How does one get into {topic}? Just the gist.", "How does one get into {topic}?", "How does one get into {topic}? Walk me through it step by step, with examples."),
           ("Reply tersely. Why do people care about {topic}?", "Why do people care about {topic}?", "Reply exhaustively. Why do people care about {topic}?")),
    "de": (("Erkläre kurz {topic}.", "Erkläre {topic}.", "Erkläre ausführlich {topic}."),
           ("Beschreibe {topic} in aller Kürze.", "Beschreibe {topic}.", "Beschreibe {topic} in allen Einzelheiten."),
           ("Schreibe einen kurzen Text über {topic}.", "Schreibe einen Text über {topic}.", "Schreibe einen langen Text über {topic}."),
           ("Gib mir einen knappen Überblick über {topic}", "Gib mir einen Überblick über {topic}", "Gib mir einen umfassenden Überblick über {topic}"),
           ("Was ist wichtig an {topic}? Nur das Wesentliche.", "Was ist wichtig an {topic}?", "Was ist wichtig an {topic}? Bitte mit vielen Details und Beispielen."),
           ("Kurze Antwort bitte: was weiß man über {topic}?", "Was weiß man über {topic}?", "Lange Antwort bitte: was weiß man über {topic}?"),
           ("Schreibe eine kurze Geschichte über {topic}.", "Schreibe eine Geschichte über {topic}.", "Schreibe eine sehr lange Geschichte über {topic}.")),
    "es": (("Explica brevemente {topic}.", "Explica {topic}.", "Explica detalladamente {topic}."),
           ("Describe {topic} en pocas palabras.", "Describe {topic}.", "Describe {topic} con todo detalle."),
           ("Escribe un texto corto sobre {topic}.", "Escribe un texto sobre {topic}.", "Escribe un texto largo sobre {topic}."),
           ("Dame un resumen rápido sobre {topic}", "Dame un resumen sobre {topic}", "Dame un análisis exhaustivo sobre {topic}"),
           ("Háblame de {topic}, solo lo esencial.", "Háblame de {topic}.", "Háblame de {topic} a fondo, con ejemplos."),
           ("Respuesta corta: ¿por qué importa {topic}?", "¿Por qué importa {topic}?", "Respuesta larga: ¿por qué importa {topic}?"),
           ("Escribe un cuento breve sobre {topic}.", "Escribe un cuento sobre {topic}.", "Escribe un cuento muy extenso sobre {topic}.")),
    "ja": (("{topic}について簡単に説明してください。", "{topic}について説明してください。", "{topic}について詳しく説明してください。"),
           ("{topic}について手短に教えて", "{topic}について教えて", "{topic}について徹底的に教えて"),
           ("{topic}についての短い文章を書いてください。", "{topic}についての文章を書いてください。", "{topic}についての長い文章を書いてください。"),
           ("{topic}の要点だけ教えてください。", "{topic}について教えてください。", "{topic}について、例を挙げて詳細に教えてください。"),
           ("{topic}についての短い物語を書いて", "{topic}についての物語を書いて", "{topic}についてのとても長い物語を書いて"),
           ("{topic}をざっくり解説してください。", "{topic}を解説してください。", "{topic}を細かく丁寧に解説してください。")),
    "zh": (("简单介绍一下{topic}。", "介绍一下{topic}。", "详细介绍一下{topic}。"),),
}  # fmt: skip
#: Factors of the teacher's length for a short and for a long answer of these.
_SHORT, _LONG = 0.45, 1.6
#: Requests for a choice: (text, tokens).
_CHOICES: Mapping[str, Sequence[tuple[str, float]]] = {
    "en": (("Answer only yes or no.", 3), ("Reply with just yes or no.", 3), ("Yes or no only, no explanation.", 3),
           ("Respond with one word.", 3), ("Answer in a single word.", 3), ("Reply with only the word true or false.", 3),
           ("Reply with a single letter: A or B.", 3), ("One-word answer only.", 3), ("Just say yes or no.", 3)),
    "de": (("Antworte nur mit ja oder nein.", 3), ("Nur Ja oder Nein.", 3), ("Antworte mit einem einzigen Wort.", 3),
           ("Antworte nur mit einem Wort.", 3)),
    "es": (("Responde solo sí o no.", 3), ("Contesta únicamente con sí o no.", 3), ("Responde con una sola palabra.", 3)),
    "ja": (("はいかいいえだけで答えてください。", 4), ("「はい」か「いいえ」のみで答えてください。", 4), ("一言で答えてください。", 7)),
    "zh": (("只回答是或否。", 3),),
}  # fmt: skip
_QUESTIONS: Mapping[str, Sequence[str]] = {
    "en": ("Is {topic} important today?", "Should schools teach {topic}?", "Is {topic} older than a century?", "Do most people like {topic}?",
           "Does {topic} cost a lot of money?", "Is it true that {topic} can be dangerous?"),
    "de": ("Ist {topic} heute wichtig?", "Sollte man {topic} in der Schule lernen?", "Kostet {topic} viel Geld?"),
    "es": ("¿Es importante {topic} hoy?", "¿Cuesta mucho dinero {topic}?", "¿Es peligroso {topic}?"),
    "ja": ("{topic}は重要ですか？", "{topic}は危険ですか？", "{topic}は日本で人気がありますか？"),
    "zh": ("{topic}重要吗？",),
}  # fmt: skip
_REQUESTS: Mapping[str, Sequence[str]] = {
    "en": ("Explain {topic}", "Tell me about {topic}", "Describe {topic}", "What is important about {topic}?", "Write about {topic}",
           "How does {topic} work?", "Summarize the history of {topic}", "Discuss the pros and cons of {topic}", "Teach me {topic}"),
    "de": ("Erkläre {topic}", "Erzähl mir etwas über {topic}", "Beschreibe {topic}", "Schreibe über {topic}",
           "Was muss man über {topic} wissen?", "Nenne Vor- und Nachteile von {topic}"),
    "es": ("Explica {topic}", "Háblame de {topic}", "Describe {topic}", "Escribe sobre {topic}", "¿Qué hay que saber sobre {topic}?",
           "Resume la historia de {topic}"),
    "ja": ("{topic}について説明してください。", "{topic}について教えてください。", "{topic}について書いてください。", "{topic}の歴史をまとめてください。"),
    "zh": ("介绍一下{topic}。", "解释{topic}。", "谈谈{topic}的历史。"),
}  # fmt: skip
#: Numbers that ask for no amount; {n} is any number.
_NO_AMOUNT: Mapping[str, Sequence[str]] = {
    "en": ("Tom has {n} apples and buys {m} more. How many apples does he have?", "Write a Python function that returns the first {n} words of a string.",
           "A train travels {n} km in {m} hours. What is its speed?", "Sort this list of {n} numbers in SQL: how would you do it?",
           "My {n}-page contract has {m} clauses about {topic}. What should I look for?", "Who was king {n} years ago?",
           "Write a function that splits a text into lines of {n} characters.", "I read {n} pages about {topic} yesterday. Why is it so popular?",
           "What happened in chapter {n} of the book about {topic}?", "Translate: I have {n} friends who like {topic}."),
    "de": ("Anna hat {n} Äpfel und kauft {m} dazu. Wie viele hat sie?", "Wie viele Wörter hat ein Buch mit {n} Seiten?",
           "Vor {n} Jahren kannte niemand {topic}. Warum?"),
    "es": ("Ana tiene {n} manzanas y compra {m}. ¿Cuántas tiene?", "Leí {n} páginas sobre {topic}. ¿Por qué es popular?"),
    "ja": ("りんごが{n}個あり、{m}個食べました。残りはいくつですか？", "{n}年前の{topic}はどうでしたか？"),
    "zh": ("小明有{n}个苹果，又买了{m}个，一共有几个？",),
}  # fmt: skip
_SYSTEMS: Mapping[str, Sequence[str]] = {
    "en": ("You are a helpful assistant. {limit}", "{limit}", "You are a support agent of an online shop. {limit} Be polite.",
           "You are an expert tutor.\n\nRules:\n- Be friendly.\n- {limit}\n- Do not mention these rules."),
    "de": ("Du bist ein hilfreicher Assistent. {limit}", "{limit}", "Du bist ein Lehrer. Bleib freundlich. {limit}"),
    "es": ("Eres un asistente útil. {limit}", "{limit}", "Eres un profesor amable. {limit}"),
    "ja": ("あなたは役に立つアシスタントです。{limit}", "{limit}", "あなたは親切な先生です。{limit}"),
    "zh": ("你是一个乐于助人的助手。{limit}", "{limit}"),
}  # fmt: skip
_LEADS = {"en": "Answer ", "de": "Antworte ", "es": "Responde ", "ja": "", "zh": ""}
_NOUNS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "en": {
        "sentence": ("sentence", "sentences"),
        "paragraph": ("paragraph", "paragraphs"),
        "page": ("page", "pages"),
    },
    "de": {"sentence": ("Satz", "Sätzen"), "paragraph": ("Absatz", "Absätze"), "page": ("Seite", "Seiten")},
    "es": {
        "sentence": ("frase", "frases"),
        "paragraph": ("párrafo", "párrafos"),
        "page": ("página", "páginas"),
    },
}
_NUMBER_WORDS: Mapping[str, Sequence[str]] = {
    "en": ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    "de": ("einem", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"),
    "es": ("una", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve", "diez", "once", "doce"),
    "ja": ("一", "二", "三", "四", "五", "六", "七", "八", "九", "十", "十一", "十二"),
    "zh": ("一", "两", "三", "四", "五", "六", "七", "八", "九", "十", "十一", "十二"),
}  # fmt: skip
_TOPICS: Mapping[str, Sequence[str]] = {
    language: [topic.strip() for topic in topics.split("|")]
    for language, topics in {
        "en": """volcanoes|the French Revolution|black holes|dogs|cats|coffee|electric cars|solar energy|the Roman Empire|Mars|
        cooking pasta|gardening|learning the piano|time management|job interviews|machine learning|blockchain|cloud computing|
        databases|computer networks|the human heart|vaccines|sleep|healthy eating|running a marathon|yoga|football|chess|
        basketball|the Olympic Games|whales|elephants|bees|rain forests|climate change|oceans|rivers|mountains|deserts|snow|
        autumn|friendship|love|honesty|leadership|teamwork|remote work|start-ups|marketing|saving money|taxes|inflation|
        the stock market|insurance|buying a house|travelling to Japan|Paris|New York|Egypt|India|Brazil|the Silk Road|
        the Middle Ages|the Second World War|the moon landing|Albert Einstein|Marie Curie|William Shakespeare|Mozart|jazz|
        painting|photography|cinema|video games|comics|fashion|architecture|bridges|trains|aeroplanes|ships|bicycles|robots|
        smartphones|social media|online privacy|passwords|artificial intelligence|quantum computers|DNA|evolution|gravity|
        atoms|chemistry|mathematics|statistics|philosophy|ethics|democracy|human rights|education|reading|languages|museums|
        libraries|hospitals|firefighters|a lost dog|a haunted house|a time traveller|a dragon|two rival bakers|a small village|
        an old lighthouse|our new office|a broken washing machine|the annual budget|customer complaints|a birthday party""",
        "de": """Vulkane|die Französische Revolution|schwarze Löcher|Hunde|Katzen|Kaffee|Elektroautos|Solarenergie|das Römische Reich|
        den Mars|Kochen|Gartenarbeit|Zeitmanagement|Bewerbungsgespräche|maschinelles Lernen|Datenbanken|das Herz|Impfungen|Schlaf|
        gesunde Ernährung|Marathonlauf|Fußball|Schach|Wale|Elefanten|Bienen|den Regenwald|den Klimawandel|Flüsse|die Alpen|
        Freundschaft|Ehrlichkeit|Führung|Homeoffice|Marketing|Geldanlage|Steuern|Inflation|Versicherungen|Reisen nach Italien|Berlin|
        Hamburg|das Mittelalter|die Mondlandung|Albert Einstein|Johann Sebastian Bach|Goethe|Malerei|Fotografie|Computerspiele|
        Brücken|Züge|Fahrräder|Roboter|Datenschutz|künstliche Intelligenz|Evolution|Mathematik|Demokratie|Bildung|einen Drachen|
        ein altes Schloss|unsere neue Küche|das Jahresbudget""",
        "es": """los volcanes|la Revolución francesa|los agujeros negros|los perros|los gatos|el café|los coches eléctricos|la energía solar|
        el Imperio romano|Marte|la cocina|la jardinería|la gestión del tiempo|las entrevistas de trabajo|el aprendizaje automático|
        las bases de datos|el corazón|las vacunas|el sueño|la alimentación sana|el fútbol|el ajedrez|las ballenas|los elefantes|
        las abejas|la selva|el cambio climático|los ríos|los Andes|la amistad|la honestidad|el liderazgo|el teletrabajo|el marketing|
        el ahorro|los impuestos|la inflación|los seguros|los viajes a México|Madrid|Barcelona|la Edad Media|la llegada a la Luna|
        Cervantes|Picasso|el flamenco|la fotografía|los videojuegos|los puentes|los trenes|las bicicletas|los robots|la privacidad|
        la inteligencia artificial|la evolución|las matemáticas|la democracia|la educación|un dragón|una casa vieja|
        el presupuesto anual""",
        "ja": """火山|フランス革命|ブラックホール|犬|猫|コーヒー|電気自動車|太陽光発電|ローマ帝国|火星|料理|園芸|時間管理|就職面接|機械学習|データベース|心臓|
        ワクチン|睡眠|健康的な食事|マラソン|サッカー|将棋|鯨|象|蜜蜂|熱帯雨林|気候変動|川|富士山|友情|誠実さ|リーダーシップ|在宅勤務|マーケティング|貯金|税金|
        インフレ|保険|京都旅行|東京|大阪|江戸時代|明治維新|月面着陸|夏目漱石|浮世絵|写真|ビデオゲーム|橋|新幹線|自転車|ロボット|個人情報|人工知能|進化|数学|
        民主主義|教育|竜|古い家|年間予算""",
        "zh": "火山|黑洞|狗|猫|咖啡|电动汽车|太阳能|火星|做饭|时间管理|面试|机器学习|睡眠|足球|气候变化|友谊|领导力|上海|北京|唐朝|人工智能|数学|教育|机器人",
    }.items()
}  # fmt: skip
_BOUNDS = {
    "most": re.compile(
        r"under|no more|max|exceed|at most|limit|must fit|höchstens|maximal|no más|máximo|menos de|以内|不超过",
        re.IGNORECASE,
    ),
    "least": re.compile(r"at least|mindestens|al menos|以上|不少于", re.IGNORECASE),
}
#: Training file -> language of its short prompts.
_REAL_SOURCES = {
    "castillo_train": "en",
    "castillo_tune": "en",
    "fasteval": "en",
    "shaberi": "ja",
    "rakuda_ranking": "ja",
    "ja_vicuna_qa": "ja",
    "ruozhiba": "zh",
}
_CODE_WORDS = re.compile(
    r"\b(?:function|code|python|program|sql|array|script|input|def|equation|calculate|solve)\b|[0-9`{}]",
    re.IGNORECASE,
)


def amount_rows(
    file: Path,
    checkpoint: Path,
    prompts: Sequence[Composed],
    temperatures: Mapping[str, float],
    seed: int,
) -> None:
    """Writes rows for `train`: `composed_prompts`, without tags, each with `ROWS_PER_PROMPT` served models of the teacher, the
    same for the prompts of a task, and two output lengths drawn from its label.

    Args:
        file: Parquet file to write.
        checkpoint: Folder of the teacher; it is conditioned on the served model.
        prompts: Prompts by task.
        temperatures: Served model -> temperature of its predictions; unknown for other served models.
        seed: Seed of the served models and the lengths.

    Raises:
        InputError: The checkpoint is not conditioned on the served model.
    """
    teacher = load_checkpoint(checkpoint)
    conditioning, head = teacher.model.config.conditioning, teacher.model.config.heads.length
    if conditioning is None or head is None:
        allowed = "a checkpoint with a length head that is conditioned on the served model"
        raise InputError("checkpoint", str(checkpoint), allowed)
    rng = np.random.default_rng(seed)
    names = np.array(conditioning.served_models, dtype=object)
    size = min(ROWS_PER_PROMPT, len(names))
    tasks = np.array([prompt.task for prompt in prompts])
    chosen = np.argsort(rng.random((tasks.max() + 1, len(names))), axis=1)[tasks, :size]
    of_model = [temperatures.get(name) for name in names]
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
        mu, sigma, base_mu = np.full((3, *chosen.shape), np.nan)
        for field, outputs in (("plain", (mu, sigma)), ("base", (base_mu,))):
            texts = {row: text for row, prompt in enumerate(prompts) if (text := getattr(prompt, field))}
            if not texts:
                continue
            numbers = np.array(list(texts))
            models = chosen[numbers].ravel()
            predicted = predict_prompts(
                teacher.model,
                teacher.tokenizer,
                [text for text in texts.values() for _ in range(size)],
                names[models].tolist(),
                [of_model[model] for model in models],
                track=lambda batches: tracked(list(batches), "teacher", True),
            )
            for output, key in zip(outputs, ("mu", "sigma"), strict=False):
                output[numbers] = np.asarray(predicted[key]).reshape(-1, size)
    mu, sigma = labels(prompts, mu, sigma, base_mu)
    lengths = pairs_of_lengths(mu.ravel(), sigma.ravel(), head.nu, rng)
    rows = np.repeat(np.arange(len(prompts)), size)
    conversations = pd.DataFrame(columns([prompt.messages for prompt in prompts]))
    conversations["prompt_id"] = [prompt_hash(f"{prompt.system}\0{prompt.text}") for prompt in prompts]
    table = conversations.iloc[rows].assign(
        dataset="amounts",
        model=names[chosen].ravel(),
        output_tokens=list(lengths),
        finished=list(np.ones(lengths.shape, dtype=bool)),
    )
    table["temperature"] = table.model.map(temperatures).astype(float)
    with atomic_file(file) as temporary:
        table.reindex(columns=list(COLUMNS)).to_parquet(temporary, compression="zstd", index=False)


def labels(prompts: Sequence[Composed], mu: Floats, sigma: Floats, base_mu: Floats) -> tuple[Floats, Floats]:
    """mu and sigma [P, M] of P composed prompts for M served models each, from the teacher's for the prompts and for their
    bases (not used where a prompt has none)."""
    weight = np.array([[prompt.weight] for prompt in prompts])
    tokens = np.array([[np.nan if prompt.tokens is None else prompt.tokens] for prompt in prompts])
    factor = np.array([[prompt.factor if prompt.base else np.nan] for prompt in prompts])
    base_mu = np.nan_to_num(base_mu)
    implied = np.where(np.isnan(tokens), base_mu + np.log(factor), np.log(tokens))
    for bound, sign in (("most", -1), ("least", 1)):
        limited = np.array([prompt.bound == bound for prompt in prompts])
        nearer = sign * np.logaddexp(sign * implied[limited], sign * (base_mu[limited] + BASE_ROOM))
        implied[limited] = (implied[limited] + nearer) / 2
    trusted = np.array([[prompt.sigma] for prompt in prompts])
    new_mu = np.where(weight > 0, (1 - weight) * mu + weight * implied, mu)
    return new_mu, np.where(weight > 0, (1 - weight) * sigma + weight * np.minimum(trusted, sigma), sigma)


def real_requests(files: Prepared) -> dict[str, list[str]]:
    """Short prompts of the training files by language, that ask for no amount and contain no code or numbers."""
    requests: dict[str, list[str]] = {language: [] for language in LANGUAGES}
    for file in files.training:
        language = _REAL_SOURCES.get(file.stem)
        if language is None:
            continue
        prompts = pd.read_parquet(file, columns=["prompt"]).prompt.drop_duplicates()
        for prompt in prompts[prompts.str.len().between(6 if language in ("ja", "zh") else 20, 130)]:
            if requested_amount(prompt) is None and not _CODE_WORDS.search(prompt) and "\n" not in prompt:
                requests[language].append(prompt.strip())
    return requests


def composed_prompts(
    real: Mapping[str, Sequence[str]], number: int, rng: np.random.Generator
) -> list[Composed]:
    """At least `number` different composed prompts, by task.

    Args:
        real: Language -> short real requests that ask for no amount.
    """
    makers = {"amount": _amounts, "detail": _details, "form": _forms, "choice": _choices, "none": _negatives}
    prompts: dict[tuple[str, str], Composed] = {}
    task = 0
    while len(prompts) < number:
        language = _drawn(tuple(LANGUAGES), rng, tuple(LANGUAGES.values()))
        kind = _drawn(tuple(KINDS), rng, tuple(KINDS.values()))
        for prompt in makers[kind](language, real.get(language, ()), rng):
            prompts.setdefault((prompt.system, prompt.text), prompt._replace(task=task))
        task += 1
    return list(prompts.values())


def implied_tokens(unit: str, number: float, language: str, per_item: float) -> float:
    """Output length in tokens that a number of units implies; see the table of the module."""
    per_word = _PER_WORD[language]
    tokens = {
        "words": per_word * number + 3,
        "ideographs": 0.9 * number + 3,
        "characters": number / 4.5 + 2,
        "tokens": 0.9 * number,
        "sentences": 20 * per_word * number,
        "paragraphs": 107 * per_word * number**0.85,
        "pages": 340 * per_word * number,
        "lines": 8 * per_word * number,
        "items": 6 + per_item * number**0.85,
        "minutes": 125 * per_word * number,
    }[unit]
    return float((tokens**-SHARPNESS + SATURATION**-SHARPNESS) ** (-1 / SHARPNESS))


def _drawn(values: Sequence[T], rng: np.random.Generator, shares: Sequence[float] | None = None) -> T:
    return values[int(rng.choice(len(values), p=shares))]


def _request(language: str, real: Sequence[str], rng: np.random.Generator) -> str:
    """A request that asks for no amount."""
    if real and rng.random() < REAL:
        return _drawn(real, rng)
    return _drawn(_REQUESTS[language], rng).format(topic=_drawn(_TOPICS[language], rng))


def _amounts(language: str, real: Sequence[str], rng: np.random.Generator) -> list[Composed]:
    """A task with several amounts: with a template, or a request and a limit."""
    in_system, system = rng.random() < IN_SYSTEM, _drawn(_SYSTEMS[language], rng)
    if not in_system and rng.random() < 0.5:
        template, unit, per_item = _drawn(_TASKS[language], rng)
        request = ""
        template = template.replace("{topic}", _drawn(_TOPICS[language], rng))
    else:
        unit = _drawn(tuple(_LIMITS[language]), rng)
        if unit not in ("words", "ideographs") and rng.random() < 0.35:
            unit = "words" if "words" in _LIMITS[language] and language != "ja" else "ideographs"
        template, per_item = _drawn(_LIMITS[language][unit], rng), 25 * _PER_WORD[language]
        request = _request(language, real, rng)
    first = rng.random() < 0.15
    bound = next((name for name, words in _BOUNDS.items() if request and words.search(template)), "")
    base = request if bound else ""
    numbers = np.unique(rng.choice(_NUMBERS[unit], AMOUNTS_PER_TASK + 1))
    weight, sigma = _TRUST[unit]
    prompts = []
    for number in map(int, rng.permutation(numbers)[:AMOUNTS_PER_TASK]):
        limit = _filled(template, number, language, rng)
        plain = _joined(request, limit, language, first) if request else limit
        rule = system.format(limit=_sentence(limit, language)) if in_system else ""
        tokens = implied_tokens(unit, number, language, per_item)
        text = request if in_system else plain
        prompts.append(Composed(0, text, plain, tokens, weight, sigma, base, system=rule, bound=bound))
    return prompts


def _details(language: str, real: Sequence[str], rng: np.random.Generator) -> list[Composed]:
    """A request alone, and for a short and for a long answer: by its own words, or by words that are added to it."""
    if rng.random() < 0.4:
        topic = _drawn(_TOPICS[language], rng)
        short, base, long = (text.format(topic=topic) for text in _drawn(_DETAIL_TASKS[language], rng))
        return [
            Composed(0, base, base),
            *(
                Composed(0, text, text, None, *DETAIL_TRUST, base, factor)
                for text, factor in ((short, _SHORT), (long, _LONG))
            ),
        ]
    request = _request(language, real, rng)
    less = _drawn([entry for entry in _DETAIL[language] if entry[1] < 1], rng)
    more = _drawn([entry for entry in _DETAIL[language] if entry[1] > 1], rng)
    in_system, system, first = rng.random() < IN_SYSTEM, _drawn(_SYSTEMS[language], rng), rng.random() < 0.3
    prompts = [Composed(0, request, request)]
    for words, factor in (less, more):
        plain = _joined(request, words, language, first)
        rule = system.format(limit=words) if in_system else ""
        text = request if in_system else plain
        prompts.append(Composed(0, text, plain, None, *DETAIL_TRUST, request, factor, rule))
    return prompts


def _forms(language: str, real: Sequence[str], rng: np.random.Generator) -> list[Composed]:
    """A topic in several forms of text."""
    del real
    topic, request = _drawn(_TOPICS[language], rng), _drawn(_FORM_REQUESTS[language], rng)
    forms = tuple(_FORMS[language].items())
    prompts = []
    for form, length in (forms[number] for number in rng.permutation(len(forms))[:AMOUNTS_PER_TASK]):
        text = request.format(form=form, topic=topic)
        tokens = length * _PER_WORD[language] / _PER_WORD["en"]
        prompts.append(Composed(0, text, text, tokens, *FORM_TRUST))
    return prompts


def _choices(language: str, real: Sequence[str], rng: np.random.Generator) -> list[Composed]:
    """A question alone, and with the request to answer it with one word."""
    del real
    question = _drawn(_QUESTIONS[language], rng).format(topic=_drawn(_TOPICS[language], rng))
    words, tokens = _drawn(_CHOICES[language], rng)
    plain = _joined(question, words, language, rng.random() < 0.25)
    in_system = rng.random() < 2 * IN_SYSTEM
    rule = _drawn(_SYSTEMS[language], rng).format(limit=words) if in_system else ""
    text = question if in_system else plain
    return [Composed(0, question, question), Composed(0, text, plain, tokens, 0.9, 0.5, system=rule)]


def _negatives(language: str, real: Sequence[str], rng: np.random.Generator) -> list[Composed]:
    """Numbers that ask for no amount."""
    del real
    template = _drawn(_NO_AMOUNT[language], rng).replace("{topic}", _drawn(_TOPICS[language], rng))
    pairs = [(int(n), int(m)) for n, m in rng.integers(2, 400, (2, 2))]
    texts = [template.format(n=n, m=m) for n, m in pairs]
    return [Composed(0, text, text) for text in texts]


def _filled(template: str, number: int, language: str, rng: np.random.Generator) -> str:
    """A template with a number in one of the ways to write it, and with nouns in singular or plural."""
    nouns = {key: forms[number > 1] for key, forms in _NOUNS.get(language, {}).items()}
    low = _nice(0.8 * number)
    return template.format(n=_written(number, template, language, rng), low=low, **nouns)


def _nice(number: float) -> int:
    """A number rounded to two digits, at least 1."""
    digits = max(0, int(np.log10(max(number, 1))) - 1)
    return int(max(1, round(number / 10**digits) * 10**digits))


def _written(number: int, template: str, language: str, rng: np.random.Generator) -> str:
    if number == 1 and language in ("de", "es"):
        one = {"de": ("einem", "einer"), "es": ("un", "una")}[language]
        feminine = "{page}" in template or ("{sentence}" in template and language == "es")
        return _drawn(("1", one[feminine], one[feminine]), rng)
    if number == 1 and language == "en" and "-" not in template:
        return _drawn(("1", "one", "one", "a", "a single"), rng)
    if "-" in template or "{low}" in template:
        return str(number)
    kind = rng.random()
    if number <= 12 and kind < 0.4:
        return _NUMBER_WORDS[language][number - 1]
    if number >= 1_000 and kind < 0.4:
        return f"{number:,}" if language in ("en", "ja", "zh") else f"{number:,}".replace(",", ".")
    if number >= 1_000 and number % 1_000 == 0 and kind < 0.5 and language == "en":
        return f"{number // 1_000}k"
    if language in ("ja", "zh") and kind > 0.85:
        return "".join(chr(0xFF10 + int(digit)) for digit in str(number))
    return str(number)


def _joined(request: str, limit: str, language: str, first: bool) -> str:
    """A request with a limit, which is a sentence or a phrase of the request."""
    space = "" if language in ("ja", "zh") else " "
    if limit[0].islower() or limit[0] == "(":
        end = request[-1] if request[-1] in ".?!" else ""
        return f"{request.rstrip('.?!')} {limit}{end}"
    ended = request if request[-1] in ".?!。？！:" else request + ("。" if not space else ".")
    return f"{limit}{space}{request}" if first else f"{ended}{space}{limit}"


def _sentence(limit: str, language: str) -> str:
    """A limit as a sentence of a system prompt."""
    if limit[0].islower():
        return f"{_LEADS[language]}{limit}."
    return limit
