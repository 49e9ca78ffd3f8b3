"""The folder that a lexical artifact is written to."""

from __future__ import annotations

from pathlib import Path

from predictors.artifact import MANIFEST
from scheduler_core.errors import InputError
from scheduler_core.files import writable_target


def artifact_target(path: str) -> Path:
    """The folder `path`, if it is new, empty, or holds an earlier artifact.

    Raises:
        InputError: Something else stands there.
    """
    out = writable_target(path, "out")
    if out.exists() and not out.is_dir():
        raise InputError("out", path, "a folder path, but a file stands there")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise InputError("out", path, "a new or empty folder, or an earlier artifact to replace")
    return out
