"""Atomic writes of files and folders, which never replace a user's own files."""

import contextlib
import ctypes
import errno
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from scheduler_core.errors import InputError, TailcastError

#: Record file in each folder written by tailcast: kind of output -> entries. Artifact verification ignores it.
RECORD = ".tailcast.json"


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
    """Path of `package:NAME/PATH`, a file or folder of an installed package; InputError if there is none."""
    name, _, inside = source.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(field, source, f"an installed package ({name} is not installed)")
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not path.exists():
        raise InputError(field, source, f"a file or folder inside the package {name}")
    return path


def writable_target(path: str | Path, field: str) -> Path:
    """`path`, after creating its parent folder; `InputError` if it cannot be written."""
    path = Path(path)
    stream = is_stream(path)
    if (stream or path.is_file()) and not os.access(path, os.W_OK):
        raise InputError(field, str(path), "a path that can be written to")
    if stream:
        return path
    folder = Path(os.path.realpath(path)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        allowed = f"a path whose folder can be created ({error.strerror})"
        raise InputError(field, str(path), allowed) from error
    if not os.access(folder, os.W_OK):
        raise InputError(field, str(path), "a path in a writable folder")
    return path


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path; on success its content replaces that of `path` in one step, else `path` is unchanged.
    `InputError` if `path` is a folder.

    A symbolic link stays and its target is replaced; an existing file keeps its mode. For a device, a named pipe or
    /dev/stdout the content is appended.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError("output", str(path), "the path of a file, not of a folder")
    if is_stream(path):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder, path.name)
            temporary.touch()
            yield temporary
            with open(temporary, "rb") as source, open(path, "ab") as target:
                shutil.copyfileobj(source, target)
        return
    path = Path(os.path.realpath(path))
    temporary = _temporary_name(path)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        mode = (path if path.exists() else temporary).stat().st_mode
        with _disk_errors(path):
            yield temporary
        os.chmod(temporary, stat.S_IMODE(mode))
        sync_path(temporary)
        os.replace(temporary, path)
        sync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_output(path: str | Path) -> None:
    """Removes the file that was written to `path`; a device, a pipe, or the symbolic link itself stays."""
    path = Path(path)
    if not is_stream(path):
        Path(os.path.realpath(path)).unlink(missing_ok=True)


def folder_target(path: str | Path, kind: str, *, overwrite: bool) -> Path:
    """The folder of the option `out`, after creating its parent. `TailcastError` if `atomic_directory` could
    not write it. An existing folder must be empty, or an earlier output of this kind with `overwrite` set."""
    out = writable_target(path, "out")
    if out.exists() and not out.is_dir():
        raise InputError("out", str(path), "the path of a folder, not of a file")
    _check_replaceable(out, kind, overwrite=overwrite)
    return out


@contextlib.contextmanager
def atomic_directory(path: str | Path, kind: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary folder next to `path`; on success it replaces `path` in one step, else it is removed. Errors as
    for `folder_target`.

    A record of the kind and the entries is written to the folder. An existing folder is only replaced if it is empty,
    or with `overwrite` if its record has the same kind and lists all its files. This is checked before replacement.
    """
    path = Path(os.path.realpath(path))
    temporary = _temporary_name(path)
    temporary.mkdir()
    try:
        with _disk_errors(path):
            yield temporary
            entries = _entries(temporary)
            write_json(temporary / RECORD, {kind: entries})
        for entry in entries:
            sync_path(temporary / entry)
        if path.exists():
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        try:
            os.rename(temporary, path)  # also onto an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _check_replaceable(path, kind, overwrite=overwrite)
            _exchange(temporary, path)
        sync_path(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_shared_folder(
    path: str | Path, kind: str, names: Sequence[str] | None = None, *, field: str = "out"
) -> Path:
    """The folder of the option `field`, created if missing, for output files; it may also hold other files.
    `InputError` if it cannot be created or written to; `TailcastError` if a file to write exists and is not
    from an earlier output of this kind.

    `kind` is the kind of output, such as "sweep". `names` are the files to write. None: unknown names; a
    folder without a record of this kind must then be empty.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise InputError(field, str(path), "the path of a folder, not of a file")
    try:
        writable_target(folder / RECORD, field)
    except InputError as error:
        raise InputError(field, str(path), "a folder that can be created and written to") from error
    record = _read_record(folder)
    if names is None:
        others = [] if kind in record else [entry.name for entry in folder.iterdir()]
    else:
        written = record.get(kind, [])
        others = [name for name in names if name not in written and os.path.lexists(folder / name)]
    if others:
        raise TailcastError(
            f"{field}: {path} holds {min(others)}, which no {kind} wrote; move it or choose another folder"
        )
    return folder


def shared_folder(
    path: str | Path, kind: str, names: Sequence[str] | None = None, *, field: str = "out"
) -> Path:
    """Like `check_shared_folder`; also adds the names to the folder's record."""
    folder = check_shared_folder(path, kind, names, field=field)
    record = _read_record(folder)
    entries = sorted({*record.get(kind, []), *(names or ())})
    if record.get(kind) != entries:
        write_json(folder / RECORD, record | {kind: entries})
    return folder


@contextlib.contextmanager
def locked_folder(folder: Path, field: str) -> Iterator[None]:
    """Creates `folder` if missing and locks it against other processes with the file FOLDER.lock beside it.
    Removes that file, and an empty folder, at exit; those of a process that was killed lock nothing. `InputError` if
    the folder cannot be created, or another process has locked it. Needs filelock."""
    path = folder.with_name(folder.name + ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        release = lock(path, field, str(folder), "a folder that no other process has locked")
    except OSError as error:
        allowed = f"a folder that can be created and locked ({error.strerror})"
        raise InputError(field, str(folder), allowed) from error
    try:
        folder.mkdir(exist_ok=True)  # the process that held the lock may have removed it
        yield
    finally:
        path.unlink(missing_ok=True)  # a process that waits for the removed file does not get the lock
        release()
        with contextlib.suppress(OSError):
            folder.rmdir()


def lock(path: Path, field: str, value: str, allowed: str) -> Callable[[], object]:
    """Locks the file `path` against other processes until the returned function is called, or this process ends.
    `InputError` with field, value and what is allowed if another process has locked it. Needs filelock."""
    from filelock import FileLock, Timeout

    file_lock = FileLock(path, thread_local=False)  # released by any thread
    try:
        file_lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(field, value, allowed) from error
    return file_lock.release


def write_json(path: str | Path, content: object) -> None:
    """Writes `content` as indented JSON with sorted keys, atomically. `ValueError` for NaN and infinity."""
    with atomic_file(path) as temporary:
        temporary.write_text(
            json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8"
        )


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_stream(path: Path) -> bool:
    """Whether `path` is a device, a pipe, or an open file of a process, such as /dev/stdout."""
    if not path.exists() or path.is_dir():
        return False
    link = path
    while link.is_symlink():
        folder = os.path.realpath(link.parent)
        if re.fullmatch(r"/proc/\d+(/task/\d+)?/fd", folder):
            return True
        link = Path(folder, os.readlink(link))
    return not link.is_file()


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}")


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Converts the disk-full errors of Rust libraries (safetensors, tokenizers) into an `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None or int(number[1]) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def sync_path(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk; a folder only if the system supports it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def _entries(folder: Path) -> list[str]:
    """Relative paths of everything in a folder except its record."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return sorted(path for path in paths if path != RECORD)


def _read_record(folder: Path) -> dict[str, list[str]]:
    """Kind of output -> entries written by tailcast; empty if there is no readable record."""
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return {str(kind): [str(entry) for entry in entries] for kind, entries in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _check_replaceable(folder: Path, kind: str, *, overwrite: bool) -> None:
    """Raises unless `folder` is missing, empty, or an output that may be replaced; see `folder_target`."""
    if not folder.exists() or all(entry.name == RECORD for entry in folder.iterdir()):
        return
    record = _read_record(folder)
    if list(record) != [kind]:
        raise InputError("out", str(folder), f"a new or empty folder, or an earlier {kind} to replace")
    others = sorted(set(_entries(folder)) - set(record[kind]))
    if others:
        raise TailcastError(
            f"out: {folder} holds {others[0]}, which is not part of the {kind}; move it or choose another folder"
        )
    if not overwrite:
        raise InputError("out", str(folder), f"a new or empty folder; --overwrite true replaces this {kind}")


def _exchange(first: Path, second: Path) -> None:
    """Swaps two folders: atomically on Linux, else with three renames."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    at_cwd, exchange = -100, 2
    if rename and rename(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0:
        return
    aside = _temporary_name(second)
    os.rename(second, aside)
    try:
        os.rename(first, second)
    except OSError:
        os.rename(aside, second)
        raise
    os.rename(aside, first)
