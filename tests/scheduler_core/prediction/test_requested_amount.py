"""The amount of output that a prompt asks for, and its tag."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.prediction.prompt_text import SYSTEM, USER, Message, conversation_text
from scheduler_core.prediction.requested_amount import RequestedAmount, requested_amount, with_amount

TAGS = {
    "[words 500]": (
        "Write about trees in 500 words.",
        "write a 500-word essay on trees",
        "Describe trees in five hundred words",
        "Length: 500 words. Topic: trees",
        "Not more than 500 English words about trees, please!",
        "Schreibe einen Aufsatz mit 500 Wörtern über Bäume.",
        "Erkläre Bäume in fünfhundert Wörtern",
        "Bitte maximal 500 Wörter.",
        "Escribe un ensayo de 500 palabras sobre los árboles",
        "Explica los árboles en quinientas palabras.",
        "木について８００文字で書いてください。",
        "写一篇800字的作文",
    ),
    "[words 1000]": (
        "Write a 1,000 word story about a dog",
        "Schreibe eine Geschichte mit 1.000 Wörtern",
        "Write a 1k word story",
        "a story of one thousand words",
        "Schreibe tausend Wörter über Hunde",
        "Escribe mil palabras sobre los perros",
        "犬について千七百字で書いてください。",
    ),
    "[words 300]": (
        "in two hundred and fifty words",
        "Erkläre es in zweihundertfünfzig Wörtern.",
        "Write between 200 and 400 words about it.",
        "200 to 400 words on dogs",
        "Schreibe 200 bis 400 Wörter.",
        "Escribe entre 200 y 400 palabras.",
        "400〜600字で説明してください。",
        "Use at most 400 tokens.",
        "Write 3 paragraphs of 100 words each.",
    ),
    "[words 50]": (
        "Make a post of at most 280 characters",
        "Fasse es in höchstens 280 Zeichen zusammen",
        "Resume en menos de 280 caracteres",
    ),
    "[words 700]": ("Write two pages about the war.", "Give me a 5-minute speech on tea.", "一篇文章，1200字左右"),
    "[sentences 1]": (
        "Explain tea in one sentence.",
        "Describe it in a single sentence",
        "What is tea? Answer in 1 sentence.",
        "Write a sentence about tea.",
        "Beschreibe Tee in einem Satz.",
        "Describe el té en una frase.",
        "一文で説明してください。",
        "请用一句话回答。",
    ),
    "[sentences 3]": (
        "In three complete sentences, tell me about tea.",
        "Antworte in drei Sätzen.",
        "Responde en tres oraciones.",
        "3文で答えてください。",
    ),
    "[paragraphs 1]": ("Tell me about tea in a paragraph.", "Schreibe einen Absatz über Tee.", "Escribe un párrafo."),
    "[paragraphs 4]": (
        "Write four well-written paragraphs on tea",
        "a 4-paragraph essay",
        "Schreibe vier Absätze.",
        "Escribe cuatro párrafos",
        "四段落で書いてください",
    ),
    "[lines 10]": ("Write a poem of ten lines", "Ein Gedicht mit 10 Zeilen", "Un poema de 10 versos", "10行の詩を書いて"),
    "[items 10]": (
        "List 10 animals.",
        "Give me a list of the ten best films",
        "10 facts about Rome",
        "Please suggest at least 10 cheap presents",
        "I want you to name 10 rivers",
        "Answer with 10 bullet points",
        "Top 10 films of the nineties",
        "Nenne mir zehn Tiere.",
        "Bitte gib mir 10 Tipps zum Sparen",
        "Dame diez consejos para dormir",
        "Enumera 10 animales",
        "動物を10個挙げてください。",
        "コツを十個教えて",
        "列出10个关于咖啡的事实。",
    ),
    "[items 5]": ("What are five reasons to read?", "Explain it in 5 steps", "理由を５つ教えてください。", "¿Cuáles son 5 ventajas?"),
    "[words 1]": (
        "Is tea hot? Answer only yes or no.",
        "Reply with a single word: is tea hot?",
        "Answer with one letter.",
        "True or false only: tea is hot",
        "Antworte nur mit ja oder nein: ist Tee heiß?",
        "Antworte mit einem Wort.",
        "Responde solo sí o no.",
        "Responde con una sola palabra.",
        "お茶は熱いですか？はいかいいえだけで答えてください。",
        "一言で答えてください。",
    ),
    "[choice]": ("Is tea hot, yes or no?", "Ist Tee heiß? Ja oder nein?", "¿Sí o no?"),
    "[brief]": ("Briefly explain tea", "Explain tea. Be concise.", "tl;dr of tea", "Erkläre Tee kurz.", "Sé breve.", "簡潔に答えて。"),
    "[detailed]": (
        "Explain tea in depth.",
        "Give me a comprehensive overview of tea",
        "Erkläre Tee ausführlich.",
        "Explica el té en detalle",
        "お茶について詳しく説明して",
    ),
    "[haiku]": ("Write a haiku about tea", "俳句を書いてください", "Escribe un haiku"),
    "[essay brief]": ("Write a short essay on tea",),
    "[items 3 brief]": ("Briefly give 3 reasons",),
    "[title]": ("Write a title for my text", "Schreibe einen Titel für meinen Text", "タイトルを考えてください"),
}  # fmt: skip

NO_AMOUNT = (
    "",
    "Tell me about tea.",
    "What is a sentence?",
    "Tom has 3 apples and gives 2 to Ann. How many are left?",
    "She needs to make 15 cakes. How many eggs does she need?",
    "I read 200 pages of my book of 300 pages. How much is left?",
    "Summarize this 20-page contract for me",
    "What are the last 5 words of the song?",
    "Who lived 500 years ago?",
    "Out of the two numbers 9.9 and 9.11, which is larger?",
    "Make 24 using 3, 1, 2 and 6.",
    "Write a Python function that returns the first 5 words of a sentence.",
    "Write a program that reads 10 lines and prints a list of 3 numbers.",
    "Each word of the string has at least 4 characters.",
    "A 5-minute walk leads to the station.",
    "Anna hat 5 Äpfel und kauft 3 dazu.",
    "Wie viele Wörter hat ein Buch mit 300 Seiten?",
    "Ana tiene 5 manzanas. ¿Cuántas quedan?",
    "りんごが5個あります。2個食べました。残りはいくつですか？",
    "92年前の東京はどうでしたか？",
)


@pytest.mark.parametrize(
    ("tag", "prompt"), [(tag, prompt) for tag, prompts in TAGS.items() for prompt in prompts]
)
def test_prompts_have_the_tag_of_what_they_ask_for(tag: str, prompt: str) -> None:
    assert with_amount(prompt) == f"{tag} {prompt}"


@pytest.mark.parametrize("prompt", NO_AMOUNT)
def test_other_numbers_ask_for_no_amount(prompt: str) -> None:
    assert with_amount(prompt) == prompt


def test_units_and_numbers_are_those_of_the_prompt() -> None:
    assert requested_amount("in 137 words") == ("words", 137, "")
    assert requested_amount("400字で詳しく説明してください") == ("ideographs", 400, "detailed")
    assert requested_amount("Write a 3-page report") == ("pages", 3, "")
    assert requested_amount("Write a poem") == RequestedAmount("poem")
    amount = requested_amount("between 100 and 400 words")
    assert amount is not None
    assert amount.number == pytest.approx(200)


def test_the_largest_of_several_amounts_is_that_of_the_output() -> None:
    assert with_amount("Write a 500 word essay with 3 examples").startswith("[words 500]")
    assert with_amount("Give 10 ideas, each with two sentences").startswith("[sentences 20]")


def _conversation(*messages: tuple[str, str]) -> str:
    return conversation_text([Message(role, text) for role, text in messages])


def test_the_last_message_comes_before_the_system_prompt_and_earlier_turns_do_not_count() -> None:
    limit = (SYSTEM, "You are kind.\n\nAnswer in one sentence.")
    assert with_amount(_conversation(limit, (USER, "Tell me about tea"))).startswith("[sentences 1] system: ")
    assert with_amount(_conversation(limit, (USER, "List 10 teas"))).startswith("[items 10] ")
    assert with_amount(_conversation(limit, (USER, "Write a story"))).startswith("[sentences 1] ")
    turns = ((USER, "Write 500 words"), ("assistant", "Here are 700 words: ..."), (USER, "Thanks"))
    assert with_amount(_conversation(*turns)) == _conversation(*turns)
    assert with_amount(_conversation(*turns, (USER, "Now 3 tips")))[:9] == "[items 3]"


def test_a_limit_is_found_at_both_ends_of_a_long_prompt() -> None:
    text = "The tea is hot. " * 5_000
    assert with_amount(f"Summarize in 50 words: {text}").startswith("[words 50] ")
    assert with_amount(f"{text}\nSummarize this in two sentences.").startswith("[sentences 2] ")
    assert with_amount(f"{text} In 50 words {text}")[0] == "T"


WORDS = st.sampled_from([
    *("in", "5", "1,000", "10k", "three", "hundert", "zweitausend", "words", "Sätze", "a", "list", "list of", "each", "-", "\n"),
    *("system: ", "\n\nuser: ", "[words 5]", "[", "字", "三百", "つ", "で", "書いて", "²", "٣", "½", "Ⅷ", "100-150", "1.000.000"),
    *("9" * 30, "yes or no", "only", "briefly", "essay", "write", "python", "of", "１０", "万万", "0", "00", "1e9", "。", "?"),
])  # fmt: skip


@given(
    st.one_of(
        st.text(max_size=300),
        st.lists(WORDS, max_size=30).map(" ".join),
        st.lists(WORDS, max_size=30).map("".join),
    )
)
def test_any_text_has_at_most_one_short_tag(text: str) -> None:
    tagged = with_amount(text)
    assert tagged.endswith(text)
    assert len(tagged) <= len(text) + 40
    assert with_amount(tagged) == tagged
    amount = requested_amount(text)
    assert amount is None or amount.number is None or 0 < amount.number <= 1e7


@given(
    st.integers(2, 15_000),
    st.integers(2, 15_000),
    st.sampled_from(["{} words", "{} Wörter", "{} palabras", "{}字で"]),
)
def test_more_words_never_have_a_lower_tag(low: int, high: int, limit: str) -> None:
    low, high = sorted((low, high))
    tags = [int(with_amount(limit.format(number)).split("]")[0].split()[1]) for number in (low, high)]
    assert tags[0] <= tags[1]
    assert not (high > 2 * low) or tags[0] < tags[1]


def test_of_two_forms_the_first_is_found_whatever_the_hash_seed():
    """Sets of words have another order in each process, so training and serving could read different tags."""
    code = (
        "from scheduler_core.prediction.requested_amount import with_amount as f;"
        "print(f('Write a poem, then write an essay and write a story about rivers.'))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3", "4")
    }
    assert {text.split("]")[0] for text in texts} == {"[poem"}
