"""The folder `OUT.partial` of an unfinished run: one process at a time, and a manifest that says what it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from data_gen.backend import Backend, SamplingSettings
from data_gen.runs.errors import disk_errors
from data_gen.runs.shards import shard_paths, sync_folder
from data_gen.samples import SCHEMA_NAME
from scheduler_core.errors import InputError
from scheduler_core.files import write_json
from scheduler_core.json_text import parse_json

MANIFEST = "manifest.json"
LOCK = "lock"
FORMAT = "run/1"
# A run goes on only where these are the same; the rest of the manifest tells where the answers come from.
IDENTITY = ("format", "schema", "engine", "model", "settings", "engine_options", "keep_text", "hash_prompts")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run is; `content` is the JSON of manifest.json."""

    content: dict[str, Any]

    @property
    def run_id(self) -> str:
        """Identifier written to every row."""
        return str(self.content["run_id"])

    @classmethod
    def of(
        cls,
        backend: Backend,
        settings: SamplingSettings,
        *,
        keep_text: bool,
        hash_prompts: bool,
        engine_options: Mapping[str, object],
        notes: Mapping[str, object],
    ) -> Manifest:
        """The manifest of a new run.

        Where the engine is seeded the same run made twice has the same id, so that its files are equal; elsewhere
        every run has its own.
        """
        identity = {
            "format": FORMAT,
            "schema": SCHEMA_NAME,
            "engine": backend.name,
            "model": backend.served_model,
            "settings": asdict(settings),
            "engine_options": dict(engine_options),
            "keep_text": keep_text,
            "hash_prompts": hash_prompts,
        }
        # Through JSON and back, as it will be compared.
        identity, told = json.loads(json.dumps([identity, dict(notes)]))
        salt = "" if backend.seeded else uuid.uuid4().hex
        return cls(
            {
                **identity,
                "run_id": hashlib.sha256(
                    (json.dumps([identity, told], sort_keys=True) + salt).encode()
                ).hexdigest()[:12],
                "engine_version": backend.version,
                "seeded": backend.seeded,
                "notes": told,
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "versions": {
                    "python": platform.python_version(),
                    "tailcast": metadata.version("tailcast"),
                    "pyarrow": metadata.version("pyarrow"),
                },
            }
        )

    def settled(self, folder: Path) -> Manifest:
        """The manifest to go on with in `folder`: the one found there, or this one, now written.

        Raises:
            InputError: Another run's answers are there.
        """
        path = folder / MANIFEST
        if not path.exists():
            if shard_paths(folder):
                raise InputError("out", str(folder), f"a folder with {MANIFEST}, or none of that name")
            return self._written(path)
        try:
            found = parse_json(path.read_bytes())
            if not isinstance(found, dict) or "run_id" not in found:
                raise ValueError("no manifest")
        except (OSError, ValueError) as error:
            raise InputError("out", str(path), "the readable state of an interrupted run, or none") from error
        different = sorted(key for key in IDENTITY if found.get(key) != self.content[key])
        if not different:
            return Manifest(found)
        if not shard_paths(folder):
            return self._written(path)
        had = ", ".join(f"{key} {_shown(found.get(key), self.content[key])}" for key in different)
        raise InputError(
            "out", str(folder), f"the state of a run with the same {', '.join(different)} (it has {had}); "
            "remove it or use another --out"
        )  # fmt: skip

    def _written(self, path: Path) -> Manifest:
        with disk_errors(path.parent):
            write_json(path, self.content)
            sync_folder(path.parent)
        return self


def _shown(found: object, wanted: object) -> str:
    """What differs, found side only."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return " ".join(f"{key}={value}" for key, value in found.items() if wanted.get(key) != value)
    return repr(found)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Makes `folder` if need be and holds it against other processes; the lock goes with the process.

    Raises:
        InputError: The folder cannot be made, or another process works in it.
    """
    handle = None
    while handle is None:
        handle = _lock(folder)
    try:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)


def _lock(folder: Path) -> int | None:
    """The open, locked lock file; None if another process removed the folder meanwhile, as it does at its end."""
    import fcntl

    try:
        folder.mkdir(exist_ok=True)
        try:
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return None
    except OSError as error:
        raise InputError("out", str(folder), f"a folder that can be written to ({error.strerror})") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(handle, 32).decode(errors="replace").strip()
        os.close(handle)
        raise InputError(
            "out", str(folder), f"a run that no other process is working on (process {owner or '?'} is)"
        ) from error
    with contextlib.suppress(FileNotFoundError):
        if os.stat(folder / LOCK).st_ino == os.fstat(handle).st_ino:
            return handle
    os.close(handle)
    return None


def remove_folder(folder: Path) -> None:
    """Removes the state of a run in one step, so that a crash on the way leaves nothing that looks like a run."""
    grave = folder.with_name(f"{folder.name}.done.{os.getpid()}")
    os.replace(folder, grave)
    # Another process may be sweeping it up already.
    shutil.rmtree(grave, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes what `remove_folder` left when it was killed."""
    for path in folder.parent.iterdir():
        if path.name.startswith(f"{folder.name}.done."):
            shutil.rmtree(path, ignore_errors=True)
