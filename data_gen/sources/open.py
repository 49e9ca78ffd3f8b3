"""Prompts of any source, one by one: files, folders of the datasets library, sets on the hub, templates."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from data_gen import templates
from data_gen.prompts import Prompt, prompt_id_of
from data_gen.sources.layouts import (
    HUB_SETS,
    HubSet,
    Layout,
    SourceOptions,
    layout_of,
    named_layout,
    prompts_of,
)
from data_gen.sources.rows import SUFFIXES, Row, file_rows, file_suffix
from data_gen.splits import digest64
from scheduler_core.errors import InputError, MissingExtraError

log = logging.getLogger(__name__)

TEMPLATE_SCHEME = "templates:"
HUB_SCHEME = "hf:"


def read_prompts(source: str, options: SourceOptions | None = None) -> list[Prompt]:
    """All prompts of a source, in its order; see `open_prompts`.

    Raises:
        InputError: As `open_prompts`, or there is none.
    """
    prompts = list(open_prompts(source, options))
    if not prompts:
        raise InputError("prompts", source, "at least one prompt")
    return prompts


def open_prompts(
    source: str, options: SourceOptions | None = None, *, skipped: Counter[str] | None = None
) -> Iterator[Prompt]:
    """Prompts of a source, in its order, each id once; of a long source a few are in memory at a time.

    Args:
        source: One of
            - a `.jsonl`, `.json` (an array), `.csv` or `.parquet` file, with rows of any layout in
              `data_gen.sources.layouts` (a column `prompt`; `messages`; `conversation`; `conversations`; `instruction`
              with `input` or `context`); a `.txt` file with one prompt per line; text formats also gzipped;
            - a folder of the `datasets` library, `FOLDER[:SPLIT]`;
            - a set on the hub, `hf:NAME[:SPLIT]`; those in `HUB_SETS` need no further option;
            - `templates:COUNT[?seed=N]`, prompts composed from the built-in templates.
        options: What to take of each row.
        skipped: Counts skipped rows, by reason; None logs them at the end.

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
    rows, name, hub_set = _rows(source)
    yield from _prompts(rows, name, hub_set, options, counts)
    if skipped is None and counts:
        log.info("%s: skipped %s", name, ", ".join(f"{count} {reason}" for reason, count in counts.items()))


def _rows(source: str) -> tuple[Iterator[Row], str, HubSet | None]:
    """The rows, the name of the source for messages, and its entry in `HUB_SETS`."""
    if source.startswith(HUB_SCHEME):
        name, _, split = source.removeprefix(HUB_SCHEME).partition(":")
        hub_set = HUB_SETS.get(name)
        return _hub_rows(name, split or None, hub_set, "prompts"), name, hub_set
    path = Path(source)
    if path.is_dir():
        return _folder_rows(path, None, "prompts"), path.name, None
    before, colon, split = source.rpartition(":")
    if colon and Path(before).is_dir():
        return _folder_rows(Path(before), split, "prompts"), Path(before).name, None
    if path.is_file() and file_suffix(path) not in SUFFIXES:
        allowed = (
            "a file ending in " + ", ".join(SUFFIXES) + ", a datasets folder, hf:NAME or templates:COUNT"
        )
        raise InputError("prompts", source, allowed)
    return file_rows(path, "prompts"), path.name, None


def _prompts(
    rows: Iterator[Row], name: str, hub_set: HubSet | None, options: SourceOptions, counts: Counter[str]
) -> Iterator[Prompt]:
    layout: Layout | None = named_layout(hub_set.layout) if hub_set else None
    if options.layout is not None:
        layout = named_layout(options.layout)
    languages = {language.casefold() for language in options.languages}
    ids: set[int] = set()
    for number, row in rows:
        location = f"{name} row {number}"
        if layout is None:
            layout = layout_of(row, location)
        for prompt in _of_row(layout, row, location, hub_set, options, languages, counts):
            digest = digest64(prompt.prompt_id)
            if digest not in ids:
                ids.add(digest)
                yield prompt
            elif _repeated(options, layout) == "refuse":
                raise InputError(f"{location}: prompt_id", prompt.prompt_id, "an id not used before")
            else:
                counts["repeated"] += 1


def _repeated(options: SourceOptions, layout: Layout) -> str:
    return options.repeated or ("drop" if layout.public else "refuse")


def _of_row(
    layout: Layout,
    row: Mapping[str, Any],
    location: str,
    hub_set: HubSet | None,
    options: SourceOptions,
    languages: set[str],
    counts: Counter[str],
) -> list[Prompt]:
    missing = [column for column in layout.columns if column not in row]
    if missing:
        raise InputError(f"{location}: columns", sorted(map(str, row)), f"also a column named {missing[0]!r}")
    try:
        conversation = layout.read(row, location)
        if languages and conversation.language.casefold() not in languages:
            counts["other language"] += 1
            return []
        prompts = list(prompts_of(conversation, options.turns or layout.turns, location))
    except InputError:
        # Public sets hold empty texts and conversations without their beginning; a user's own file should not.
        if not layout.public:
            raise
        counts["unusable"] += 1
        return []
    if not prompts:
        counts["too few turns"] += 1
    return [_labelled(prompt, row, location, hub_set, options) for prompt in prompts]


def _labelled(
    prompt: Prompt, row: Mapping[str, Any], location: str, hub_set: HubSet | None, options: SourceOptions
) -> Prompt:
    category, dataset = prompt.category, prompt.dataset or (hub_set.dataset if hub_set else "")
    if options.category is not None:
        if options.category not in row:
            raise InputError(
                f"{location}: columns", sorted(map(str, row)), f"also a column named {options.category!r}"
            )
        category = "" if row[options.category] is None else str(row[options.category])
    return Prompt(prompt.prompt_id, prompt.text, category, prompt.messages, dataset)


def _from_templates(source: str) -> Iterator[Prompt]:
    count_text, _, query = source.removeprefix(TEMPLATE_SCHEME).partition("?")
    options = parse_qs(query, keep_blank_values=True)
    seed_text = options.pop("seed", ["0"])[-1]
    if not count_text.isdigit() or not seed_text.isdigit() or options:
        raise InputError("prompts", source, "templates:COUNT or templates:COUNT?seed=N with integers")
    for category, text in templates.compose(int(count_text), int(seed_text)):
        yield Prompt(prompt_id_of(text), text, category, dataset="templates")


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "gen") from error
    return datasets


def _folder_rows(folder: Path, split: str | None, field: str) -> Iterator[Row]:
    """Rows of a folder: as `save_to_disk` writes it (one split or several), or data files that `datasets` knows.

    Raises:
        InputError: It is no such folder, or has no such split.
    """
    datasets = _datasets()
    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            data = datasets.load_from_disk(str(folder))
        else:
            data = datasets.load_dataset(str(folder), streaming=True)
    except Exception as error:
        raise InputError(
            field, str(folder), f"a folder of the datasets library ({_first_line(error)})"
        ) from error
    yield from enumerate(_split_of(data, split, "train", field, str(folder)), start=1)


def _hub_rows(name: str, split: str | None, hub_set: HubSet | None, field: str) -> Iterator[Row]:
    """Rows of a set on the hub, streamed.

    Raises:
        InputError: The set or the split cannot be loaded: unhub_set, gated, or no network.
    """
    datasets = _datasets()
    files = {} if hub_set is None or hub_set.data_files is None else {"data_files": hub_set.data_files}
    try:
        data = datasets.load_dataset(name, streaming=True, **files)
    except Exception as error:
        reason = _first_line(error)
        raise InputError(field, name, f"a set on the hub that can be reached ({reason})") from error
    yield from enumerate(_split_of(data, split, hub_set.split if hub_set else "train", field, name), start=1)


def _split_of(data: Any, split: str | None, usual: str, field: str, name: str) -> Any:
    """The given split, or the usual one, or the only one there is."""
    if not hasattr(data, "keys"):
        if split is not None:
            raise InputError(field, f"{name}:{split}", "no split: this folder holds a single one")
        return data
    name_of_split = split or (usual if usual in data else next(iter(data)) if len(data) == 1 else usual)
    if name_of_split not in data:
        raise InputError(field, f"{name}:{name_of_split}", "a split of " + ", ".join(map(str, data)))
    return data[name_of_split]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
