"""Training rows whose requests ask for an effort of reasoning, a verbosity or a response format.

The public sets have few such requests, and those they have are of a few sources each, so that a predictor learns the source
from the option. Here the same prompt of the training data comes with several settings of one option, and its true lengths
are multiplied by what the option does.

| option | factor of the length | shown by the sets |
|---|---|---|
| thinking on | `_THINKING`: 6 for puzzles and mathematics, 3 for code, 1.9 for others | on to off within a model: 10 and 11 (misguided_attention, Qwen3), 1.9 and 1.8 (shaberi, Qwen3) |
| effort, budget of thinking | `_SHARES` of what thinking adds; a budget limits it | low to none 1.4, 1.4 and 2.3 (ai_independence_bench); high to low 1.0 (misguided_attention, Gemini 2.5 Pro); others are assumed |
| thinking off, effort none | 1 | most served models of the sets do not think |
| verbosity | `_VERBOSITY` | no rows |
| JSON without a schema | 0.8 | no rows |
| limits of a format | towards its `format_size`: `ln length = w ln size + (1 - w) ln true length` | no rows |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from examples.pretrained.conversations import NEUTRAL, columns, conversation
from scheduler_core.prediction.format_size import choice_tokens, regex_tokens, schema_tokens
from scheduler_core.prediction.prompt_text import SYSTEM, USER

#: Maximum numbers of settings of a prompt, and of served models of each.
NUM_SETTINGS, NUM_MODELS = 3, 4
#: Longer prompts are not copied.
_MAX_CHARS, _MAX_FORMAT_CHARS = 1_200, 300
#: Set -> factor of thinking; of other sets 1.9.
_CHAT = 1.9
_THINKING = {
    **dict.fromkeys(("aiw", "fasteval", "farel_bench", "misguided_attention", "tot_gpt4", "zeroeval"), 6.0),
    **dict.fromkeys(("Apps", "BigCodeBench", "DS1000", "Mbpp"), 3.0),
}
#: Setting -> share of what thinking adds to a length.
_SHARES = {"none": 0.0, "minimal": 0.1, "low": 0.35, "medium": 0.8, "high": 1.6, "xhigh": 2.4}
_BUDGETS = (256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
_VERBOSITY = {"low": 0.65, "medium": 1.0, "high": 1.5}
#: Share of prompts with a neutral system prompt.
_WITH_SYSTEM = 0.25
#: Weight w of the size of a format, with and without texts that have no limit; and sigma of ln length.
_CLOSED, _OPEN, _SIGMA = 0.9, 0.7, 0.35
_JSON_FACTOR = 0.8

_TEXTS = (
    "title",
    "summary",
    "description",
    "reason",
    "comment",
    "headline",
    "answer",
    "explanation",
    "quote",
    "content",
)
_LISTS = (
    "items",
    "facts",
    "tags",
    "steps",
    "ideas",
    "keywords",
    "examples",
    "points",
    "names",
    "reasons",
    "results",
)
_VALUES = ("score", "year", "count", "confidence", "price", "rating", "level", "priority")
_FLAGS = ("valid", "found", "is_correct", "approved", "spam")
_CHOICES = (("yes", "no"), ("positive", "negative", "neutral"), ("true", "false"), ("A", "B", "C", "D"),
            ("low", "medium", "high"), ("question", "complaint", "praise", "other"), ("1", "2", "3", "4", "5"))  # fmt: skip
_REGEXES = (r"\d{4}-\d{2}-\d{2}", r"(yes|no)", r"[A-D]", r"[A-Z]{2,5}", r"\d{1,3}", r"[a-z]+@[a-z]+\.com", r"[\w ]{10,40}",
            r"[\w ,.]{50,200}", r"[\w ,.]{200,800}", r"(\w+, ){4}\w+")  # fmt: skip
_NUMBERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 100)
_LENGTHS = (10, 20, 30, 40, 50, 80, 100, 140, 160, 200, 280, 300, 400, 500, 800, 1_000, 1_500, 2_000, 5_000)

Lengths = NDArray[np.int64]


class Setting(NamedTuple):
    """One setting of a request's options.

    Attributes:
        options: In OpenAI's and vLLM's names.
        lengths: Output lengths without the options -> those with them.
    """

    options: Mapping[str, Any]
    lengths: Callable[[Lengths], Lengths]


def option_rows(rows: pd.DataFrame, seed: int, reasoning: int, formats: int) -> pd.DataFrame:
    """Copies of rows with bare prompts, as requests with options, see the table of the module.

    Args:
        rows: Rows with `dataset`, `prompt_id`, `prompt`, `messages`, `model`, `output_tokens` and `finished`. Half of the
            prompts are of CASTILLO, whose rows have temperatures.
        seed: Seed of the choice of prompts and options.
        reasoning, formats: Maximum numbers of prompts with settings of reasoning, and with formats.
    """
    rng = np.random.default_rng(seed)
    bare = rows[rows.messages.isna() & rows.prompt.str.len().le(_MAX_CHARS)]
    is_short = bare.prompt.str.len().le(_MAX_FORMAT_CHARS) & ~bare.dataset.isin(_THINKING)
    parts = []
    for name, table, number, settings in (
        ("reasoning", bare, reasoning, reasoning_settings),
        ("format", bare[is_short], formats, format_settings),
    ):
        groups = table.groupby("prompt_id").indices
        at: list[int] = []
        copies: dict[str, list[Any]] = {
            key: [] for key in ("prompt_id", "messages", "output_tokens", "finished")
        }
        for prompt_id in _chosen(table, number, rng):
            group = groups[prompt_id]
            group = group[np.sort(rng.permutation(len(group))[:NUM_MODELS])]
            first, system = table.iloc[group[0]], ""
            if rng.random() < _WITH_SYSTEM:
                system = NEUTRAL[int(rng.integers(len(NEUTRAL)))]
            for number_of, each in enumerate(settings(first.dataset, rng)):
                messages = conversation([(SYSTEM, system), (USER, first.prompt)], each.options)
                at += group.tolist()
                copies["prompt_id"] += [f"{prompt_id}-{name}-{number_of}"] * len(group)
                copies["messages"] += columns([messages])["messages"] * len(group)
                lengths = [each.lengths(table.output_tokens.iloc[row]) for row in group]
                copies["output_tokens"] += lengths
                copies["finished"] += [
                    np.ones(len(values), dtype=bool) if name == "format" else table.finished.iloc[row]
                    for row, values in zip(group, lengths, strict=True)
                ]
        parts.append(table.iloc[at].assign(**copies))
    return pd.concat(parts, ignore_index=True)


def _chosen(table: pd.DataFrame, number: int, rng: np.random.Generator) -> Iterator[Any]:
    """Ids of at most `number` prompts, half of them of CASTILLO."""
    is_castillo = table.temperature.notna()
    for part in (table[is_castillo], table[~is_castillo]):
        yield from rng.permutation(np.sort(part.prompt_id.unique()))[: number // 2].tolist()


def reasoning_settings(dataset: str, rng: np.random.Generator) -> list[Setting]:
    """Different settings of one option of reasoning, for a prompt of a set."""
    added = _THINKING.get(dataset, _CHAT) - 1
    kind = rng.random()
    if kind < 0.5:
        names = rng.permutation([*_SHARES])[:NUM_SETTINGS].tolist()
        return [_scaled({"reasoning_effort": name}, 1 + added * _SHARES[name]) for name in names]
    if kind < 0.68:
        return [
            _scaled({"chat_template_kwargs": {"enable_thinking": on}}, 1 + added * on) for on in (False, True)
        ]
    if kind < 0.86:
        budgets = rng.permutation([0, *_BUDGETS])[:NUM_SETTINGS].tolist()
        return [Setting({"thinking_budget": budget}, _with_budget(budget, added)) for budget in budgets]
    return [_scaled({"verbosity": name}, factor) for name, factor in _VERBOSITY.items()]


def _scaled(options: Mapping[str, Any], factor: float) -> Setting:
    return Setting(options, lambda lengths: np.maximum(np.rint(lengths * factor), 1).astype(np.int64))


def _with_budget(budget: int, added: float) -> Callable[[Lengths], Lengths]:
    """Thinking without a budget would be that of high effort; models use most of a smaller budget."""

    def lengths(visible: Lengths) -> Lengths:
        unlimited = _SHARES["high"] * added * np.maximum(visible, 1)
        thinking = 1 / (1 / unlimited + 1 / (0.8 * budget)) if budget else np.zeros(len(visible))
        return np.asarray(np.maximum(np.rint(visible + thinking), 1).astype(np.int64))

    return lengths


def format_settings(dataset: str, rng: np.random.Generator) -> list[Setting]:
    """Different response formats, most of which differ in one limit."""
    del dataset
    kind = rng.random()
    if kind < 0.08:
        return [_scaled({"response_format": {"type": "json_object"}}, _JSON_FACTOR)]
    if kind < 0.16:
        choices = _CHOICES[int(rng.integers(len(_CHOICES)))]
        return [_sized({"guided_choice": choices}, choice_tokens(choices), _CLOSED, rng)]
    if kind < 0.26:
        patterns = rng.permutation(_REGEXES)[:NUM_SETTINGS].tolist()
        return [_sized({"guided_regex": each}, regex_tokens(each), _CLOSED, rng) for each in patterns]
    make = (_with_items, _with_chars, _with_fields, _with_enum)[int(rng.choice(4, p=(0.42, 0.26, 0.2, 0.12)))]
    fixed = {name: value for name, value in _values(rng) if rng.random() < 0.15}
    settings = []
    for fields, weight in make(rng):
        properties = {**fields, **fixed}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        if len(properties) == 1 and rng.random() < 0.15:
            schema = next(iter(properties.values()))
        size = schema_tokens(schema)
        assert size is not None
        body = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
        settings.append(_sized({"response_format": body}, size, weight, rng))
    return settings


def _sized(options: Mapping[str, Any], size: float, weight: float, rng: np.random.Generator) -> Setting:
    seed = int(rng.integers(2**31))

    def lengths(visible: Lengths) -> Lengths:
        mu = weight * np.log(size) + (1 - weight) * np.log(np.maximum(visible, 1)).mean()
        noise = np.random.default_rng(seed).standard_normal()
        pair = np.exp(mu + _SIGMA * noise * np.array([-1.0, 1.0]))
        return np.asarray(np.maximum(np.rint(pair), 1).astype(np.int64))

    return Setting(options, lengths)


_Fields = list[tuple[dict[str, Any], float]]


def _one(values: Sequence[str], rng: np.random.Generator) -> str:
    return values[int(rng.integers(len(values)))]


def _values(rng: np.random.Generator) -> list[tuple[str, dict[str, Any]]]:
    """Fields of short values."""
    choices = _CHOICES[int(rng.integers(len(_CHOICES)))]
    return [
        (_one(_VALUES, rng), {"type": "integer"}),
        (_one(_FLAGS, rng), {"type": "boolean"}),
        ("label", {"type": "string", "enum": [*choices]}),
        (_one(_TEXTS, rng), {"type": "string", "maxLength": 80}),
    ]


def _with_items(rng: np.random.Generator) -> _Fields:
    name, kind = _one(_LISTS, rng), rng.random()
    item: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.3:
        names = rng.permutation(_TEXTS)[: int(rng.integers(1, 4))].tolist()
        item = {"type": "object", "properties": {each: {"type": "string"} for each in names}}
    elif rng.random() < 0.15:
        item = {"type": "integer"}
    limits = ("maxItems",) if kind < 0.4 else ("minItems",) if kind < 0.65 else ("minItems", "maxItems")
    numbers = rng.permutation(_NUMBERS)[:NUM_SETTINGS].tolist()
    return [
        ({name: {"type": "array", "items": item, **dict.fromkeys(limits, number)}}, _OPEN)
        for number in numbers
    ]


def _with_chars(rng: np.random.Generator) -> _Fields:
    name, limit = _one(_TEXTS, rng), "maxLength" if rng.random() < 0.7 else "minLength"
    numbers = rng.permutation(_LENGTHS)[:NUM_SETTINGS].tolist()
    return [({name: {"type": "string", limit: number}}, _CLOSED) for number in numbers]


def _with_fields(rng: np.random.Generator) -> _Fields:
    names = rng.permutation([*_TEXTS, *_LISTS, *_VALUES, *_FLAGS]).tolist()
    text = {"type": "string"}
    of_names = (
        (_TEXTS, text),
        (_LISTS, {"type": "array", "items": text}),
        (_VALUES, {"type": "number"}),
        (_FLAGS, {"type": "boolean"}),
    )
    kinds: dict[str, Any] = {name: schema for group, schema in of_names for name in group}
    numbers = rng.permutation([1, 2, 3, 4, 5, 6, 8, 10, 14])[:NUM_SETTINGS].tolist()
    return [({name: kinds[name] for name in names[:number]}, _OPEN) for number in numbers]


def _with_enum(rng: np.random.Generator) -> _Fields:
    choices = _CHOICES[int(rng.integers(len(_CHOICES)))]
    name, text = _one(("answer", "label", "result", "category"), rng), _one(_TEXTS, rng)
    choice = {name: {"type": "string", "enum": [*choices]}}
    return [
        (choice, _CLOSED),
        ({**choice, text: {"type": "string"}}, _OPEN),
        ({name: {"type": "string"}}, _OPEN),
    ]
