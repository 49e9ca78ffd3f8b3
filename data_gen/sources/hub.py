"""Rows of a `datasets` set: a folder that `save_to_disk` or a download made, or a name on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_gen.sources.layouts import HubSet
from data_gen.sources.rows import Row
from scheduler_core.errors import InputError, MissingExtraError


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "gen") from error
    return datasets


def folder_rows(folder: Path, split: str | None, field: str) -> Iterator[Row]:
    """Rows of a folder: as `save_to_disk` writes it (one split or several), or data files that `datasets` knows.

    Raises:
        InputError: It is no such folder, or has no such split.
    """
    datasets = _datasets()
    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(str(folder), streaming=True)
    except Exception as error:
        raise InputError(
            field, str(folder), f"a folder of the datasets library ({_first_line(error)})"
        ) from error
    yield from _numbered(_split_of(found, split, "train", field, str(folder)))


def hub_rows(name: str, split: str | None, known: HubSet | None, field: str) -> Iterator[Row]:
    """Rows of a set on the hub, streamed.

    Raises:
        InputError: The set or the split cannot be loaded: unknown, gated, or no network.
    """
    datasets = _datasets()
    files = {} if known is None or known.data_files is None else {"data_files": known.data_files}
    try:
        found = datasets.load_dataset(name, streaming=True, **files)
    except Exception as error:
        reason = _first_line(error)
        raise InputError(field, name, f"a set on the hub that can be reached ({reason})") from error
    yield from _numbered(_split_of(found, split, known.split if known else "train", field, name))


def _split_of(found: Any, split: str | None, usual: str, field: str, name: str) -> Any:
    """The wanted split, or the usual one, or the only one there is."""
    if not hasattr(found, "keys"):
        if split is not None:
            raise InputError(field, f"{name}:{split}", "no split: this folder holds a single one")
        return found
    wanted = split or (usual if usual in found else next(iter(found)) if len(found) == 1 else usual)
    if wanted not in found:
        raise InputError(field, f"{name}:{wanted}", "a split of " + ", ".join(map(str, found)))
    return found[wanted]


def _numbered(rows: Any) -> Iterator[Row]:
    yield from enumerate(rows, start=1)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
