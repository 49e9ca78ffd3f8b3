"""Data preparation for the shipped predictor: files for training, calibration and evaluation from public output lengths.

Uses only permissively licensed data: CASTILLO, ZeroEval, the OASST reports, Tree of Thoughts and 25 smaller sources.
CASTILLO's validation prompts are split as in examples/castillo: 60 % training, 15 % early stopping and calibration, 25 %
report. Some of the other sources are not used for training: `CHOICE` to choose the best epoch and recipe together with the
calibration prompts, `SET_ASIDE` to evaluate on unseen sources. Families of reasoning_gym are divided in the same way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from data_gen.splits import split_of
from examples.pretrained.conversations import (
    Conversation,
    columns,
    conversation_of,
    is_bare,
    thinks,
    with_options,
)
from examples.pretrained.options import option_rows
from scheduler_core.prediction.prompt_text import ConversationParts
from scheduler_core.shell.files import atomic_file

SPLIT_SEED = 0
FRACTIONS = (0.6, 0.15, 0.25)
SPLIT_FILES = {"train": "castillo_tune", "validation": "calibration", "test": "report"}
#: max_tokens of CASTILLO's samples; samples of this length are truncated.
CASTILLO_LIMIT = 15_000
#: Maximum number of lengths per prompt and served model (all unknown served models count as one).
MAX_SAMPLES = 16
COLUMNS = (
    *("dataset", "prompt_id", "prompt", "messages"),
    *("model", "temperature", "output_tokens", "finished"),
)
#: Name of the file of prompts of the other files with options of reasoning, and with response formats; numbers of each.
OPTIONS, NUM_REASONING, NUM_FORMATS = "options", 1_500, 1_000
#: Number of CASTILLO's training prompts that are copied with system prompts and options, and the weight of their rows.
NUM_COPIES, COPY_WEIGHT = 1_500, 0.5
#: Probability that the system prompt, the earlier turns or the options of a training conversation are left out.
DROPPED_PARTS = 0.15


@dataclass(frozen=True, slots=True)
class Source:
    """A file in the data folder.

    Attributes:
        file: Path without .parquet.
        num_prompts: Maximum number of prompts, selected by a hash; None: all. Limits sources of similar, templated prompts.
        weight: Weight of its rows in the loss; 1 for CASTILLO.
    """

    file: str
    num_prompts: int | None = None
    weight: float = 0.5


SOURCES = (
    Source("multi_model/zeroeval", 500, 0.3),
    Source("repeated_samples/oasst_sampling_reports"),
    Source("repeated_samples/tot_gpt4", weight=0.3),
    Source("more/ai_independence_bench", weight=0.3),
    Source("more/aiw", weight=0.3),
    Source("more/atlas", 1_000),
    Source("more/commongen", 200, 0.3),
    Source("more/complexbench"),
    Source("more/farel_bench", 150, 0.3),
    Source("more/fasteval", 700, 0.3),
    Source("more/gpteacher", 1_200),
    Source("more/hallucin_pm", weight=0.3),
    Source("more/ja_vicuna_qa"),
    Source("more/llm_dreams"),
    Source("more/longform_writing", 120),
    Source("more/misguided_attention"),
    Source("more/mt_bench_multilingual"),
    Source("more/planbench", 250, 0.3),
    Source("more/rakuda_ranking"),
    Source("more/reasoning_gym", 1_200, 0.3),
    Source("more/ruozhiba", 500),
    Source("more/shaberi"),
    Source("more/speechmap", 350),
    Source("more/tau_bench_airline", 250),
)
#: Sources that help to choose the best epoch: chat questions in two languages.
CHOICE = ("llmzoo",)
#: Sources for evaluation only: general instructions in four languages, interpretation of texts, reasoning.
SET_ASIDE = ("m_ifeval", "d_bench", "lrm_token_economy")
#: Source whose families of puzzles are divided between training, choice and evaluation.
FAMILIES = "reasoning_gym"
#: Of its families in alphabetical order, one in `FAMILY_STEP` belongs to each of these parts; the others are training
#: data. `FAMILY_PROMPTS` prompts of each family are used there.
CHOICE_FAMILIES, REPORT_FAMILIES = FAMILY_PARTS = ("reasoning_gym_choice", "reasoning_gym_report")
FAMILY_STEP, FAMILY_PROMPTS = 6, 12

#: Common name of a served model -> pattern of its names in the sources; all other served models are unknown.
MODELS = {
    "gpt-4o": r"gpt-4o(-\d{4}-\d\d-\d\d|_chat)?",
    "gpt-4o-mini": r"gpt-4o-mini(-2024-07-18)?",
    "gpt-4-turbo": r"gpt-4-turbo(-2024-04-09|_chat)?|gpt-4-1106-preview|gpt4_1106",
    "gpt-4": r"gpt-4(-0613|-0314|_chat)?|gpt4",
    "gpt-3.5-turbo": r"gpt-3\.5-turbo(-0125|-0613|-0301|-1106)?|gpt3\.5(_turbo_1106)?",
    "claude-3-opus": r"claude-3-opus(-20240229)?|claude3_opus",
    "claude-3-haiku": r"claude-3-haiku(-20240307)?",
    "claude-3-5-sonnet": r"claude-3[.-]5-sonnet(-20240620|-20241022|_aws)?",
    "claude-3-5-haiku": r"claude-3[.-]5-haiku(-20241022)?",
    "gemini-1.5-pro": r"gemini-1\.5-pro(-exp-\d+|-00\d)?",
    "gemini-1.5-flash": r"gemini-1\.5-flash(-exp-\d+|-00\d)?",
    "google/gemma-2-2b-it": r"gemma-2-2b-it",
    "google/gemma-2-9b-it": r"gemma-2-9b-it",
    "google/gemma-2-27b-it": r"gemma-2-27b-it(@together)?",
    "meta-llama/Llama-2-7b-chat-hf": r"llama-2-7b-chat(-hf)?",
    "meta-llama/Llama-2-13b-chat-hf": r"llama-2-13b-chat(-hf)?",
    "meta-llama/Llama-2-70b-chat-hf": r"llama-2-70b-chat(-hf)?",
    "meta-llama/Meta-Llama-3-8B-Instruct": r"(meta-)?llama-3-8b-instruct|llama3_8b",
    "meta-llama/Meta-Llama-3-70B-Instruct": r"(meta-)?llama-3-70b-instruct|llama3_70b|llama3-70b-8192_groq",
    "meta-llama/Llama-3.1-8B-Instruct": r"(meta-)?llama-3\.1-8b-instruct",
    "meta-llama/Llama-3.1-70B-Instruct": r"(meta-)?llama-3\.1-70b-instruct",
    "meta-llama/Llama-3.1-405B-Instruct": r"(meta-)?llama-3\.1-405b(-inst|-instruct|-instruct-turbo|_aws)?(@\w+)?",
    "meta-llama/Llama-3.3-70B-Instruct": r"llama-3\.3-70b-instruct",
    "mistralai/Mistral-7B-Instruct-v0.3": r"mistral-7b-instruct-v0\.3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": r"mixtral-8x7b-instruct-v0\.1",
    "Qwen/Qwen2-7B-Instruct": r"qwen2-7b-instruct",
    "Qwen/Qwen2-72B-Instruct": r"qwen2-72b-instruct",
    "Qwen/Qwen2.5-3B-Instruct": r"qwen2\.5-3b-instruct(-gptq-int4)?",
    "Qwen/Qwen2.5-7B-Instruct": r"qwen2\.5-7b-instruct(-gptq-int4)?",
    "Qwen/Qwen2.5-14B-Instruct": r"qwen2\.5-14b-instruct(-gptq-int4)?",
    "Qwen/Qwen2.5-32B-Instruct": r"qwen2\.5-32b-instruct(-gptq-int4)?",
    "Qwen/Qwen2.5-72B-Instruct": r"qwen-?2\.5-72b-instruct",
    "deepseek-chat": r"deepseek-chat|deepseek-v3(-0324)?",
    "grok-2": r"grok-2(-1212)?",
}
_PATTERNS = [(re.compile(pattern, re.IGNORECASE), name) for name, pattern in MODELS.items()]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Files written by `prepare`.

    Attributes:
        training: Training file -> its weight.
        calibration, report: CASTILLO prompts for early stopping and calibration, and for the report.
        choice: Files that choose the best epoch; the calibration prompts are the first.
        set_aside: Name -> file of the sources for evaluation only.
    """

    training: dict[Path, float]
    calibration: Path
    report: Path
    choice: tuple[Path, ...]
    set_aside: dict[str, Path]


def prepare(data: Path, out: Path) -> Prepared:
    """Writes a Parquet file (prompt, served model, list of lengths) for each part; existing files are replaced.

    Args:
        data: Folder of the public data sets.
        out: Folder to write to.
    """
    out.mkdir(parents=True, exist_ok=True)
    castillo = _castillo(data / "castillo_validation.parquet")
    split = castillo.prompt_id.map(lambda prompt_id: split_of(prompt_id, SPLIT_SEED, FRACTIONS))
    parts = {SPLIT_FILES[name]: castillo[split == name] for name in SPLIT_FILES}
    more = data / "more"
    apart = {name: _source(more / f"{name}.parquet", None, fold=False) for name in (*CHOICE, *SET_ASIDE)}
    puzzles = pd.read_parquet(more / f"{FAMILIES}.parquet")
    apart |= {name: _families(puzzles, name) for name in FAMILY_PARTS}
    held_out = [parts["calibration"], parts["report"], *apart.values()]
    words = {_words(text) for part in held_out for text in part.prompt.unique()}
    parts["castillo_train"] = _castillo(data / "castillo_train.parquet")
    weights = {"castillo_tune": 1.0, "castillo_train": 1.0}
    for source in SOURCES:
        name = Path(source.file).name
        parts[name] = _source(data / f"{source.file}.parquet", source.num_prompts)
        weights[name] = source.weight
    for name in weights:
        shared = parts[name].prompt.map({text: _words(text) in words for text in parts[name].prompt.unique()})
        parts[name] = parts[name][~shared]
    castillo = pd.concat([parts["castillo_tune"], parts["castillo_train"]])
    parts["castillo_copies"] = with_options(castillo, NUM_COPIES, SPLIT_SEED)
    weights["castillo_copies"] = COPY_WEIGHT
    bare = pd.concat([parts[name] for name in weights if name != "castillo_copies"])
    parts[OPTIONS] = option_rows(bare, SPLIT_SEED, NUM_REASONING, NUM_FORMATS)
    weights[OPTIONS] = COPY_WEIGHT
    for name, part in (parts | apart).items():
        with atomic_file(out / f"{name}.parquet") as temporary:
            part[list(COLUMNS)].to_parquet(temporary, compression="zstd", index=False)
    return Prepared(
        training={out / f"{name}.parquet": weight for name, weight in weights.items()},
        calibration=out / "calibration.parquet",
        report=out / "report.parquet",
        choice=tuple(out / f"{name}.parquet" for name in ("calibration", *CHOICE, CHOICE_FAMILIES)),
        set_aside={name: out / f"{name}.parquet" for name in (*SET_ASIDE, REPORT_FAMILIES)},
    )


def part_of(training: Mapping[Path, float], share: float) -> dict[Path, float]:
    """Writes `share` of the prompts of each training file, chosen by a hash, beside it, and returns these files with their
    weights; prompts with options are few and are all kept."""
    parts = {}
    for file, weight in training.items():
        part = file if file.stem == OPTIONS else file.with_name(f"share-{file.name}")
        if part != file:
            table = pd.read_parquet(file)
            chosen = [
                text for text in table.prompt.unique() if int(prompt_hash(text), 16) % 1_000 < 1_000 * share
            ]
            with atomic_file(part) as temporary:
                table[table.prompt.isin(chosen)].to_parquet(temporary, compression="zstd", index=False)
        parts[part] = weight
    return parts


def _castillo(file: Path) -> pd.DataFrame:
    table = pd.read_parquet(file)
    lengths = table.output_tokens.map(lambda values: np.clip(values, 1, CASTILLO_LIMIT))
    return pd.DataFrame(
        {
            "dataset": table.dataset,
            "prompt_id": table.prompt.map(prompt_hash),
            "prompt": table.prompt,
            "messages": None,
            "model": table.model,
            "temperature": table.temperature.astype(float),
            "output_tokens": lengths.map(lambda values: values.astype(np.int64)),
            "finished": lengths.map(lambda values: values < CASTILLO_LIMIT),
        }
    ).drop_duplicates(["prompt_id", "model"])


def _families(table: pd.DataFrame, part: str) -> pd.DataFrame:
    """A part of the families of puzzles, with `FAMILY_PROMPTS` prompts of each."""
    table = table[family_part(table.family) == part]
    ids = table.drop_duplicates("prompt_id").sort_values("prompt_id").groupby("family").head(FAMILY_PROMPTS)
    return _grouped(table[table.prompt_id.isin(ids.prompt_id)], part, None, fold=False)


def family_part(family: pd.Series) -> pd.Series:
    """Part of `FAMILY_PARTS` to which each row's family belongs, or "" for training data."""
    number = family.astype("category").cat.codes % FAMILY_STEP
    return number.map(dict(enumerate(FAMILY_PARTS))).fillna("")


def _source(file: Path, num_prompts: int | None, *, fold: bool = True) -> pd.DataFrame:
    """Reads a source with one output or a list of outputs per row, and groups it by request and served model. `fold` maps
    served models to their names in `MODELS`, or to unknown."""
    table = pd.read_parquet(file)
    if file.stem == FAMILIES:
        table = table[family_part(table.family) == ""]
    return _grouped(table, file.stem, num_prompts, fold=fold)


def _grouped(table: pd.DataFrame, name: str, num_prompts: int | None, *, fold: bool) -> pd.DataFrame:
    if "tokens" in table.columns:  # lists of outputs, sampled with several settings
        table = table.rename(columns={"tokens": "sampled_tokens"})
        table["finished"] = [_finished(row) for row in zip(table.sampled_tokens, table.finished, strict=True)]
        table = table.explode(["sampled_tokens", "finished"], ignore_index=True)
        tokens = table.sampled_tokens
    else:
        if "hidden_reasoning" in table.columns:
            table = table[~table.hidden_reasoning.fillna(False).astype(bool)]
            table = table[table.dataset != "speechmap/us_hard"]
        tokens = table.n_tokens
        if fold:  # whose thinking was not counted
            counts = table.reindex(columns=["api_tokens", "n_tokens_reasoning"]).notna().any(axis=1)
            table = table[counts | ~table.model.map({name: thinks(name) for name in table.model.unique()})]
            tokens = table.n_tokens
        if "api_tokens" in table.columns:
            tokens = table.api_tokens.fillna(table.n_tokens + table.n_tokens_reasoning.fillna(0))
    table = table.assign(tokens=pd.to_numeric(tokens, errors="coerce"))
    table = table[table.tokens.ge(1) & table.prompt.str.strip().ne("")]
    if num_prompts is not None:
        ids = {prompt: prompt_hash(prompt) for prompt in table.prompt.unique()}
        chosen = set(sorted(ids.values())[:num_prompts])
        table = table[table.prompt.map(ids).isin(chosen)]
    system = table.system_prompt if "system_prompt" in table.columns else [None] * len(table)
    texts = zip(table.prompt, table.model, system, strict=True)
    conversations = [conversation_of(name, prompt, model, prefix) for prompt, model, prefix in texts]
    if fold:
        rng = np.random.default_rng(SPLIT_SEED)
        reduced = {
            each: ConversationParts.of(each).with_random_parts(rng, DROPPED_PARTS)
            for each in dict.fromkeys(conversations)
        }
        conversations = [reduced[each] for each in conversations]
    rows = pd.DataFrame(
        {
            **columns(conversations),
            "prompt_id": [_conversation_id(messages) for messages in conversations],
            "model": table.model.map(served_model) if fold else table.model,
            "tokens": table.tokens,
            "finished": True
            if "finished" not in table.columns
            else table.finished.map(lambda end: end is not False),
        },
        index=table.index,
    )
    return pd.DataFrame(_groups(rows, name), columns=list(COLUMNS))


def _groups(rows: pd.DataFrame, dataset: str) -> Iterator[tuple[object, ...]]:
    """Yields a row for each prompt and served model; all unknown served models share a row."""
    rng = np.random.default_rng(0)
    for (prompt_id, model), group in rows.groupby(["prompt_id", "model"], dropna=False, sort=True):
        chosen = rng.permutation(len(group))[:MAX_SAMPLES]
        part = group.iloc[np.sort(chosen)]
        yield (
            dataset,
            prompt_id,
            part.prompt.iloc[0],
            part.messages.iloc[0],
            None if pd.isna(model) else model,
            np.nan,
            part.tokens.to_numpy(np.int64),
            part.finished.to_numpy(bool),
        )


def _finished(row: tuple[object, object]) -> list[bool]:
    """Whether each output of a list is finished; all are if none is marked as finished."""
    tokens, finished = list(row[0]), None if row[1] is None else list(row[1])  # type: ignore[call-overload]
    return [True] * len(tokens) if finished is None or True not in finished else finished


def served_model(name: str) -> str | None:
    """Maps the name of a served model in a source to its name in `MODELS`; None: unknown."""
    short = name.rsplit("/", 1)[-1]
    return next((canonical for pattern, canonical in _PATTERNS if pattern.fullmatch(short)), None)


def prompt_hash(prompt: str) -> str:
    return hashlib.sha1(prompt.encode(errors="surrogatepass"), usedforsecurity=False).hexdigest()[:12]


def _conversation_id(messages: Conversation) -> str:
    return prompt_hash(messages[0].text if is_bare(messages) else json.dumps(messages))


def _words(text: str) -> str:
    """Lower-case words of a prompt without punctuation, except "input"."""
    return " ".join(word for word in re.findall(r"\w+", text.lower()) if word != "input")
