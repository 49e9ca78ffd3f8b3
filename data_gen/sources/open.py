"""Streaming of prompts from files, folders of the datasets library, data sets on the hub, and templates."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from data_gen.prompts import Prompt, prompt_id_of
from data_gen.sources.layouts import LAYOUTS, Layout, SourceOptions, layout_of, prompts_of
from data_gen.splits import digest64
from scheduler_core.errors import InputError, first_line
from scheduler_core.shell.table_files import SUFFIXES, Row, file_rows, file_suffix

log = logging.getLogger(__name__)

TEMPLATE_SCHEME = "templates:"
HUB_SCHEME = "hf:"
_SLOT = re.compile(r"\{(\w+)\}")
_MAX_ATTEMPTS = 200
#: Data set on the hub -> (short name, file to load if it has several).
HUB_SETS: Mapping[str, tuple[str, str | None]] = {
    "lmsys/lmsys-chat-1m": ("lmsys-chat-1m", None),
    "allenai/WildChat": ("wildchat", None),
    "allenai/WildChat-1M": ("wildchat", None),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": ("sharegpt", "ShareGPT_V3_unfiltered_cleaned_split.json"),
    "RyokoAI/ShareGPT52K": ("sharegpt", None),
    "tatsu-lab/alpaca": ("alpaca", None),
    "databricks/databricks-dolly-15k": ("dolly", None),
}


def open_prompts(
    source: str, options: SourceOptions | None = None, *, skipped: Counter[str] | None = None
) -> Iterator[Prompt]:
    """Streams the prompts of a source in its order, with unique ids and only a few in memory at a time.

    Args:
        source: One of
            - a `.jsonl`, `.json` (an array), `.csv` or `.parquet` file, with rows of any layout in
              `data_gen.sources.layouts` (a column `prompt`; `messages`; `conversation`; `conversations`; `instruction`
              with `input` or `context`); a `.txt` file with one prompt per line; text formats also gzipped;
            - a folder of the `datasets` library, `FOLDER[:SPLIT]`;
            - a data set on the hub, `hf:NAME[:SPLIT]`; those in `HUB_SETS` need no further option;
            - `templates:COUNT[?seed=N]`, prompts composed from the built-in templates.
        options: Selection of prompts from the rows.
        skipped: Counts skipped rows by reason; None: the counts are logged at the end.

    Raises:
        InputError: A prompt is empty, repeated, of a wrong type or invalid UTF-8; the message names source and row.
    """
    options = options or SourceOptions()
    counts = Counter[str]() if skipped is None else skipped
    if source.startswith(TEMPLATE_SCHEME):
        yield from _from_templates(source)
        return
    name, rows = _rows(source)
    layout = LAYOUTS[options.layout] if options.layout is not None else None
    ids: set[int] = set()
    for number, row in rows:
        location = f"{name} row {number}"
        layout = layout or layout_of(row, location)
        for prompt in _of_row(layout, row, location, options, counts):
            if not prompt.dataset and name in HUB_SETS:
                prompt = replace(prompt, dataset=HUB_SETS[name][0])
            digest = digest64(prompt.prompt_id)
            if digest not in ids:
                ids.add(digest)
                yield prompt
            elif (options.repeated or ("drop" if layout.public else "refuse")) == "refuse":
                raise InputError(f"{location}: prompt_id", prompt.prompt_id, "an id not used before")
            else:
                counts["repeated"] += 1
    if skipped is None and counts:
        log.info("%s: skipped %s", name, ", ".join(f"{count} {reason}" for reason, count in counts.items()))


def _rows(source: str) -> tuple[str, Iterator[Row]]:
    """The name of the source for error messages, and its rows."""
    if source.startswith(HUB_SCHEME):
        name, _, split = source.removeprefix(HUB_SCHEME).partition(":")
        return name, _dataset_rows(name, split)
    path = Path(source)
    before, colon, split = source.rpartition(":")
    if path.is_dir():
        return path.name, _dataset_rows(path, "")
    if colon and Path(before).is_dir():
        return Path(before).name, _dataset_rows(Path(before), split)
    if path.is_file() and file_suffix(path) not in SUFFIXES:
        suffixes = ", ".join(SUFFIXES)
        allowed = f"a file ending in {suffixes}, a datasets folder, hf:NAME or templates:COUNT"
        raise InputError("prompts", source, allowed)
    return path.name, file_rows(path, "prompts")


def _of_row(
    layout: Layout, row: Mapping[str, Any], location: str, options: SourceOptions, counts: Counter[str]
) -> list[Prompt]:
    category = options.category
    if category is not None and category not in row:
        raise InputError(f"{location}: columns", sorted(map(str, row)), f"also a column named {category!r}")
    try:
        conversation = layout.read(row, location)
        languages = [language.casefold() for language in options.languages]
        if languages and conversation.language.casefold() not in languages:
            counts["other language"] += 1
            return []
        if category is not None:
            value = "" if row[category] is None else str(row[category])
            conversation = replace(conversation, category=value)
        prompts = list(prompts_of(conversation, options.turns or layout.turns, location))
    except InputError:
        # Public data sets have empty texts and incomplete conversations; in a user's own file these are errors.
        if not layout.public or not set(layout.columns) <= set(row):
            raise
        counts["unusable"] += 1
        return []
    if not prompts:
        counts["too few turns"] += 1
    return prompts


def _from_templates(source: str) -> Iterator[Prompt]:
    count_text, _, query = source.removeprefix(TEMPLATE_SCHEME).partition("?")
    options = parse_qs(query, keep_blank_values=True)
    seed_text = options.pop("seed", ["0"])[-1]
    if not re.fullmatch(r"[0-9]+", count_text) or not re.fullmatch(r"[0-9]+", seed_text) or options:
        raise InputError("prompts", source, "templates:COUNT or templates:COUNT?seed=N with integers")
    for category, text in compose(int(count_text), int(seed_text)):
        yield Prompt(prompt_id_of(text), text, category, dataset="templates")


def _dataset_rows(source: str | Path, split: str) -> Iterator[Row]:
    """Streams rows of a data set on the hub, of a folder written by `save_to_disk`, or of a folder of files that `datasets`
    can load. InputError if it cannot be loaded, or has no such split."""
    import datasets

    file = HUB_SETS.get(str(source), ("", None))[1]
    try:
        if isinstance(source, Path) and any(
            (source / name).exists() for name in ("state.json", "dataset_dict.json")
        ):
            data = datasets.load_from_disk(str(source))
        else:
            options = {} if file is None else {"data_files": file}
            data = datasets.load_dataset(str(source), streaming=True, **options)
    except Exception as error:
        reason = first_line(error)[:200]
        allowed = f"a folder of the datasets library, or a reachable data set on the hub ({reason})"
        raise InputError("prompts", str(source), allowed) from error
    if hasattr(data, "keys"):
        name = split or (next(iter(data)) if len(data) == 1 else "train")
        if name not in data:
            raise InputError("prompts", f"{source}:{name}", "a split of " + ", ".join(map(str, data)))
        data = data[name]
    elif split:
        raise InputError("prompts", f"{source}:{split}", "no split, because this folder has only one")
    yield from enumerate(data, start=1)


def compose(count: int, seed: int) -> list[tuple[str, str]]:
    """Composes `count` distinct prompts (category, text), cycling through the categories so that every prefix is balanced.

    `templates.json` has templates for nine kinds of request, whose outputs differ widely in length, and words for their
    slots. A longer list starts with the shorter list of the same seed. InputError if `count` is below 1 or above the number
    of distinct prompts.
    """
    if count < 1:
        raise InputError("count", count, "integers > 0")
    content = json.loads(resources.files("data_gen").joinpath("templates.json").read_text(encoding="utf-8"))
    templates, slots = content["templates"], content["slots"]
    rng = np.random.Generator(np.random.PCG64(seed))
    # Insertion-ordered: text -> category.
    prompts: dict[str, str] = {}
    open_categories = list(templates)
    while len(prompts) < count:
        if not open_categories:
            allowed = f"at most {len(prompts)}, the number of distinct prompts found with this seed"
            raise InputError("count", count, allowed)
        for category in tuple(open_categories):
            for _ in range(_MAX_ATTEMPTS):
                template = str(rng.choice(templates[category]))
                text = _SLOT.sub(lambda match: str(rng.choice(slots[match.group(1)])), template)
                if text not in prompts:
                    break
            else:  # nearly exhausted
                open_categories.remove(category)
                continue
            if len(prompts) < count:
                prompts[text] = category
    return [(category, text) for text, category in prompts.items()]
