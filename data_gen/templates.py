"""Our own prompt templates: nine kinds of request whose answers differ widely in length."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from scheduler_core.errors import InputError

SLOTS: Mapping[str, tuple[str, ...]] = {
    "country": (
        "France",
        "Japan",
        "Brazil",
        "Kenya",
        "Canada",
        "Norway",
        "Egypt",
        "India",
        "Peru",
        "Australia",
        "Poland",
        "Vietnam",
        "Morocco",
        "Chile",
        "Greece",
        "Mongolia",
    ),
    "language": (
        "Spanish",
        "French",
        "German",
        "Italian",
        "Portuguese",
        "Dutch",
        "Swedish",
        "Latin",
        "Turkish",
        "Polish",
    ),
    "sentence": (
        "Where is the train station?",
        "I would like a cup of tea.",
        "The weather is lovely today.",
        "My brother works in a hospital.",
        "Please close the window, it is cold.",
        "How much does this book cost?",
        "We will meet again next summer.",
        "The children are playing in the garden.",
        "She forgot her umbrella.",
        "Thank you for your help yesterday.",
        "Our flight leaves at seven in the morning.",
        "I cannot find my keys.",
    ),
    "topic": (
        "black holes",
        "photosynthesis",
        "inflation",
        "vaccines",
        "the water cycle",
        "machine learning",
        "volcanoes",
        "the Roman Empire",
        "renewable energy",
        "chess openings",
        "sleep",
        "plate tectonics",
        "antibiotics",
        "the printing press",
        "coral reefs",
        "electric cars",
        "public transport",
        "jazz",
        "bees",
        "the Silk Road",
        "glaciers",
        "encryption",
        "bread baking",
        "migration of birds",
        "supply and demand",
    ),
    "thing": (
        "a bicycle",
        "a piano",
        "a laptop",
        "a tent",
        "a telescope",
        "a backpack",
        "a coffee machine",
        "a houseplant",
        "running shoes",
        "a second-hand car",
        "a camera",
        "a winter coat",
    ),
    "event": (
        "a birthday party",
        "a camping trip",
        "a job interview",
        "a wedding",
        "a house move",
        "a marathon",
        "a first aid course",
        "a school science fair",
        "a week in the mountains",
        "a garden party",
    ),
    "hero": (
        "a young dragon",
        "a retired detective",
        "a lost robot",
        "a lighthouse keeper",
        "a shy ghost",
        "two sisters",
        "a travelling baker",
        "an old sailor",
        "a clever fox",
        "a clockmaker",
        "a space gardener",
        "a blind painter",
    ),
    "place": (
        "in a desert town",
        "on a frozen lake",
        "under the sea",
        "in a noisy market",
        "on a night train",
        "in an abandoned library",
        "on the moon",
        "in a mountain village",
        "at the edge of a forest",
        "in a small harbour",
    ),
    "function": (
        "reverses a string",
        "checks whether a number is prime",
        "counts the words in a text",
        "merges two sorted lists",
        "computes the factorial of a number",
        "removes duplicates from a list",
        "finds the second largest number",
        "converts Celsius to Fahrenheit",
        "checks whether a word is a palindrome",
        "flattens a nested list",
        "parses a CSV line",
        "computes the n-th Fibonacci number",
        "sorts a dictionary by value",
        "finds the longest word in a sentence",
        "counts the vowels in a string",
        "rotates a matrix",
    ),
    "code_language": ("Python", "JavaScript", "Java", "C", "Go", "Rust"),
    "role": (
        "a pirate",
        "a medieval knight",
        "a strict librarian",
        "a cheerful weather presenter",
        "a wise grandmother",
        "a sports commentator",
        "a tired astronaut",
        "a fashion critic",
        "a detective in the 1930s",
        "a friendly robot",
    ),
    "request": (
        "greet a new guest",
        "explain why you are late",
        "sell me an umbrella",
        "describe your morning",
        "comment on a cat crossing the street",
        "give advice on making friends",
        "order breakfast",
        "complain about the weather",
        "introduce yourself",
        "tell me what you fear",
    ),
    "record": (
        "a person with name, age and city",
        "a book with title, author and year",
        "a recipe with name and ingredients",
        "a film with title, director and genres",
        "a car with make, model and price",
        "a pet with name and species",
        "a weather report with city, temperature and wind",
        "an order with id, items and total",
        "a football match with teams and score",
        "a song with title, artist and length in seconds",
    ),
    "fact": (
        "How many legs does a spider have?",
        "What is the chemical symbol for gold?",
        "Who wrote Hamlet?",
        "At what temperature does water boil at sea level?",
        "What is the largest planet in the solar system?",
        "In which year did the Second World War end?",
        "What gas do plants absorb?",
        "Who painted the Mona Lisa?",
        "How many days does a leap year have?",
        "What is the hardest natural substance?",
        "Which ocean is the largest?",
        "What is the square root of 144?",
        "How many minutes are there in a day?",
        "What do bees make?",
        "Which planet is known as the red planet?",
        "What is the opposite of north?",
        "How many sides has a hexagon?",
        "What is the fastest land animal?",
        "Who was the first person on the moon?",
        "What is frozen water called?",
    ),
    "a": tuple(str(n) for n in range(12, 97, 7)),
    "b": tuple(str(n) for n in range(3, 30, 2)),
    "n": ("3", "4", "5", "7", "10", "12"),
    "object": ("apples", "pencils", "tickets", "marbles", "eggs", "stickers", "coins", "bottles"),
}

TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "short_fact": (
        "{fact}",
        "{fact} Answer in one word.",
        "What is the capital of {country}?",
        "What language is spoken in {country}? Answer briefly.",
        "On which continent is {country}?",
        "Quick question: {fact}",
    ),
    "translation": (
        "Translate into {language}: {sentence}",
        "How do you say '{sentence}' in {language}?",
        "Translate this sentence into {language} and give only the translation: {sentence}",
    ),
    "list": (
        "List {n} facts about {topic}.",
        "Give me {n} things to pack for {event}.",
        "Name {n} questions to ask before buying {thing}.",
        "List {n} famous places in {country}.",
        "Give {n} tips for {event}, one line each.",
    ),
    "code": (
        "Write a function in {code_language} that {function}.",
        "Write a {code_language} function that {function}. Only code, no explanation.",
        "Explain step by step how a program {function}, then write it in {code_language}.",
    ),
    "essay": (
        "Write an essay about {topic}.",
        "Explain {topic} to a ten-year-old.",
        "Discuss the advantages and disadvantages of {topic}.",
        "Write one paragraph about {topic}.",
        "Summarise {topic} in two sentences.",
        "Write a detailed report on the history of {topic}.",
    ),
    "story": (
        "Write a short story about {hero} {place}.",
        "Write a two-sentence story about {hero}.",
        "Tell me a bedtime story about {hero} {place}.",
        "Write a poem about {hero} {place}.",
        "Write the first line of a novel about {hero}.",
    ),
    "maths": (
        "What is {a} + {b}?",
        "What is {a} times {b}?",
        "Tom has {a} {object} and gives away {b}. How many are left?",
        "A box holds {b} {object}. How many {object} are in {n} boxes? Explain your steps.",
        "Solve for x: {b}x = {a}. Show the steps.",
        "Is {a} a prime number? Answer yes or no.",
    ),
    "role_play": (
        "You are {role}: {request}.",
        "Pretend to be {role} and {request} in one sentence.",
        "Act as {role} and {request}. Stay in character.",
    ),
    "json": (
        "Return only a JSON object that describes {record}.",
        "Give me a JSON array with {n} examples of {record}.",
        "Write a JSON schema for {record}.",
    ),
}

_SLOT = re.compile(r"\{(\w+)\}")
_TRIES = 200


def compose(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different prompts as (category, text), the categories in turn, so that any prefix is a fair mix.

    Args:
        count: How many prompts; at least 1.
        seed: Seed of the choice of templates and words; a longer list starts with the shorter one.

    Raises:
        InputError: If `count` is below 1 or more than the templates can give without repeating.
    """
    if count < 1:
        raise InputError("count", count, "a whole number of at least 1")
    rng = np.random.Generator(np.random.PCG64(seed))
    prompts: list[tuple[str, str]] = []
    seen: set[str] = set()
    open_categories = list(TEMPLATES)
    while len(prompts) < count:
        if not open_categories:
            raise InputError(
                "count", count, f"at most {len(prompts)}, all that the templates give with this seed"
            )
        for category in tuple(open_categories):
            text = _unseen(category, seen, rng)
            if text is None:
                open_categories.remove(category)
            elif len(prompts) < count:
                seen.add(text)
                prompts.append((category, text))
    return prompts


def _unseen(category: str, seen: set[str], rng: np.random.Generator) -> str | None:
    """A new prompt of the category, or None after so many repeats that it must be nearly exhausted."""
    for _ in range(_TRIES):
        text = _SLOT.sub(
            lambda match: str(rng.choice(SLOTS[match.group(1)])), str(rng.choice(TEMPLATES[category]))
        )
        if text not in seen:
            return text
    return None
