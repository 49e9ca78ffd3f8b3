"""Splits files and folders into numbered parts with SHA-256 sums, and joins them."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.shell.files import sha256_file

#: File name of the sums, in the format of sha256sum, next to the parts.
SUMS = "SHA256SUMS"


def write_parts(archive: Path, members: Mapping[str, Path], part_mib: float) -> None:
    """Writes members (path in the archive -> file or folder) as ARCHIVE.000, ... of at most `part_mib` MiB.

    Appends the parts to the list of sums.
    """
    with tempfile.TemporaryFile(dir=archive.parent) as whole:
        with tarfile.open(fileobj=whole, mode="w") as stream:
            for name, path in members.items():
                stream.add(path, name)
        whole.seek(0)
        number = 0
        while content := whole.read(int(part_mib * 2**20)):
            part = archive.with_name(f"{archive.name}.{number:03d}")
            part.write_bytes(content)
            with open(archive.parent / SUMS, "a", encoding="utf-8") as sums:
                sums.write(f"{sha256_file(part)}  {part.name}\n")
            number += 1


def archives_of(folder: Path) -> dict[str, dict[str, str]]:
    """Archive -> part -> SHA-256, from the list of sums; InputError if there is none."""
    if not (folder / SUMS).is_file():
        raise InputError("join", str(folder), f"a folder with parts and their {SUMS}")
    archives: dict[str, dict[str, str]] = {}
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        digest, _, part = line.partition("  ")
        archives.setdefault(re.sub(r"\.\d{3}$", "", part), {})[part] = digest
    return archives


def join_parts(folder: Path, out: Path) -> dict[str, int]:
    """Unpacks the complete archives into `out`; returns the number of missing parts by archive.

    Raises:
        TailcastError: A part does not match its SHA-256; archives before it are unpacked.
    """
    out.mkdir(parents=True, exist_ok=True)
    num_missing: dict[str, int] = {}
    for archive, parts in archives_of(folder).items():
        num_missing[archive] = sum(not (folder / part).is_file() for part in parts)
        if num_missing[archive]:
            continue
        for part, digest in parts.items():
            if sha256_file(folder / part) != digest:
                raise TailcastError(
                    f"{folder / part} is damaged: its SHA-256 differs from that in {SUMS}; copy it again"
                )
        with tempfile.TemporaryFile(dir=out) as whole:
            for part in parts:
                with open(folder / part, "rb") as source:
                    shutil.copyfileobj(source, whole)
            whole.seek(0)
            with tarfile.open(fileobj=whole) as stream:
                stream.extractall(out, filter="data")
    return num_missing
