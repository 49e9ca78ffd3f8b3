"""`open_prompts`: prompts of any source, one by one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from data_gen import templates
from data_gen.prompts import Prompt, prompt_id_of
from data_gen.sources.digests import DigestSet
from data_gen.sources.hub import folder_rows, hub_rows
from data_gen.sources.layouts import HUB_SETS, HubSet, Layout, layout_of, named_layout
from data_gen.sources.options import SourceOptions
from data_gen.sources.rows import SUFFIXES, Row, file_rows, file_suffix
from data_gen.sources.turns import prompts_of
from scheduler_core.errors import InputError

log = logging.getLogger(__name__)

TEMPLATE_SCHEME = "templates:"
HUB_SCHEME = "hf:"


def open_prompts(
    source: str, options: SourceOptions | None = None, *, skipped: Counter[str] | None = None
) -> Iterator[Prompt]:
    """Prompts of a source, in its order, each id once; of a long source only a few are in memory at a time.

    Args:
        source: One of
            - a `.jsonl`, `.json` (an array), `.csv` or `.parquet` file, with rows of any layout in
              `data_gen.sources.layouts` (a column `prompt`; `messages`; `conversation`; `conversations`; `instruction`
              with `input` or `context`); a `.txt` file with one prompt per line; text formats also gzipped;
            - a folder of the `datasets` library, `FOLDER[:SPLIT]`;
            - a set on the hub, `hf:NAME[:SPLIT]`; those in `HUB_SETS` need no further option;
            - `templates:COUNT[?seed=N]`, prompts composed from the built-in templates.
        options: What to take of each row.
        skipped: Counts what was left out, by reason; None logs them at the end.

    Raises:
        InputError: Naming source and row for a prompt that is empty, repeated or of a wrong type, or invalid UTF-8.
    """
    options = options or SourceOptions()
    if options.layout is not None:
        named_layout(options.layout)
    counts = Counter[str]() if skipped is None else skipped
    if source.startswith(TEMPLATE_SCHEME):
        yield from _from_templates(source)
        return
    rows, name, known = _rows(source)
    yield from _prompts(rows, name, known, options, counts)
    if skipped is None and counts:
        log.info("%s: left out %s", name, ", ".join(f"{count} {reason}" for reason, count in counts.items()))


def _rows(source: str) -> tuple[Iterator[Row], str, HubSet | None]:
    """The rows, the name of the source for messages, and what is known of it."""
    if source.startswith(HUB_SCHEME):
        name, _, split = source.removeprefix(HUB_SCHEME).partition(":")
        known = HUB_SETS.get(name)
        return hub_rows(name, split or None, known, "prompts"), name, known
    path = Path(source)
    if path.is_dir():
        return folder_rows(path, None, "prompts"), path.name, None
    before, colon, split = source.rpartition(":")
    if colon and Path(before).is_dir():
        return folder_rows(Path(before), split, "prompts"), Path(before).name, None
    if path.is_file() and file_suffix(path) not in SUFFIXES:
        allowed = (
            "a file ending in " + ", ".join(SUFFIXES) + ", a datasets folder, hf:NAME or templates:COUNT"
        )
        raise InputError("prompts", source, allowed)
    return file_rows(path, "prompts"), path.name, None


def _prompts(
    rows: Iterator[Row], name: str, known: HubSet | None, options: SourceOptions, counts: Counter[str]
) -> Iterator[Prompt]:
    layout: Layout | None = named_layout(known.layout) if known else None
    if options.layout is not None:
        layout = named_layout(options.layout)
    languages = {language.casefold() for language in options.languages}
    seen = DigestSet()
    for number, row in rows:
        where = f"{name} row {number}"
        if layout is None:
            layout = layout_of(row, where)
        for prompt in _of_row(layout, row, where, known, options, languages, counts):
            if seen.add(prompt.prompt_id):
                yield prompt
            elif _repeated(options, layout) == "refuse":
                raise InputError(f"{where}: prompt_id", prompt.prompt_id, "an id not used before")
            else:
                counts["repeated"] += 1


def _repeated(options: SourceOptions, layout: Layout) -> str:
    return options.repeated or ("drop" if layout.public else "refuse")


def _of_row(
    layout: Layout,
    row: Mapping[str, Any],
    where: str,
    known: HubSet | None,
    options: SourceOptions,
    languages: set[str],
    counts: Counter[str],
) -> list[Prompt]:
    missing = [column for column in layout.columns if column not in row]
    if missing:
        raise InputError(f"{where}: columns", sorted(map(str, row)), f"also a column named {missing[0]!r}")
    try:
        conversation = layout.read(row, where)
        if languages and conversation.language.casefold() not in languages:
            counts["other language"] += 1
            return []
        prompts = list(prompts_of(conversation, options.turns or layout.turns, where))
    except InputError:
        # Public sets hold empty texts and conversations without their beginning; a user's own file should not.
        if not layout.public:
            raise
        counts["unusable"] += 1
        return []
    if not prompts:
        counts["too few turns"] += 1
    return [_labelled(prompt, row, where, known, options) for prompt in prompts]


def _labelled(
    prompt: Prompt, row: Mapping[str, Any], where: str, known: HubSet | None, options: SourceOptions
) -> Prompt:
    category, dataset = prompt.category, prompt.dataset or (known.dataset if known else "")
    if options.category is not None:
        if options.category not in row:
            raise InputError(
                f"{where}: columns", sorted(map(str, row)), f"also a column named {options.category!r}"
            )
        category = "" if row[options.category] is None else str(row[options.category])
    return Prompt(prompt.prompt_id, prompt.text, category, prompt.messages, dataset)


def _from_templates(source: str) -> Iterator[Prompt]:
    count_text, _, query = source.removeprefix(TEMPLATE_SCHEME).partition("?")
    options = parse_qs(query, keep_blank_values=True)
    seed_text = options.pop("seed", ["0"])[-1]
    if not count_text.isdigit() or not seed_text.isdigit() or options:
        raise InputError("prompts", source, "templates:COUNT or templates:COUNT?seed=N with whole numbers")
    for category, text in templates.compose(int(count_text), int(seed_text)):
        yield Prompt(prompt_id_of(text), text, category, dataset="templates")
