"""Writing results so that nothing half-written is ever seen under its final name."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scheduler_core.errors import InputError


def existing_file(path: str | Path, field: str) -> Path:
    """`path` if it is a readable, non-empty file, else `InputError` naming `field`."""
    path = Path(path)
    if not path.is_file():
        raise InputError(field, str(path), "the path of an existing file")
    if path.stat().st_size == 0:
        raise InputError(field, str(path), "a file that is not empty")
    return path


PACKAGE_SCHEME = "package:"


def inside_package(source: str, field: str) -> Path:
    """Path of `package:NAME/PATH`, a file or folder that an installed package carries.

    Raises:
        InputError: The package is not installed or has no such file or folder.
    """
    name, _, inside = source.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(field, source, f"an installed package ({name} is not installed)")
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not path.exists():
        raise InputError(field, source, f"a file or folder inside the package {name}")
    return path


def writable_target(path: str | Path, field: str) -> Path:
    """`path` with its parent made; `InputError` if the parent cannot be a directory."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(field, str(path), f"a path whose folder can be made ({error.strerror})") from error
    if not os.access(path.parent, os.W_OK):
        raise InputError(field, str(path), "a path in a writable folder")
    return path


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is fsynced and renamed, else removed."""
    path = Path(path)
    if path.is_dir():
        raise InputError("output", str(path), "a file path, but a folder stands there")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on success it takes the place of `path`, else it is removed."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError("output", str(path), "a folder path, but a file stands there")
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            os.replace(path, old / "old")
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: str | Path, content: object) -> None:
    """Writes `content` as indented JSON with sorted keys, atomically; NaN and infinity are refused."""
    with atomic_file(path) as temporary:
        temporary.write_text(
            json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8"
        )


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
