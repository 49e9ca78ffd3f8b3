"""From shards to one Parquet file, in the order of the prompts and then of the sample index, with bounded memory.

An external merge sort: each shard is sorted by itself (it was made small enough for that), then all are merged. Of
several answers to one index the first counts, of several failures the last.
"""

from __future__ import annotations

import heapq
import itertools
import json
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_gen.runs.errors import RunStoppedError
from data_gen.runs.records import PROMPT, Damage, decode, position_of, read_records
from data_gen.samples import SCHEMA
from scheduler_core.files import atomic_file

FAN_IN = 128
GROUP_ROWS = 1 << 15
GROUP_BYTES = 32 << 20

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Constants:
    """What is the same in all rows: `columns`, and how many answers each prompt has."""

    columns: Mapping[str, object]
    num_samples: int


def write_sorted(
    shards: Sequence[Path], work: Path, target: Path, constants: Constants, num_prompts: int
) -> Generator[Row, None, None]:
    """Writes all answers to `target` (Parquet, schema `samples/2`), atomically; yields each row as it goes by.

    The file is there once the iterator is exhausted.

    Args:
        shards: Shards of the run, oldest first.
        work: Folder for temporary files, on the disk of `target`; made anew and removed.
        target: File to write; its folder exists.
        constants: What the rows share.
        num_prompts: Records of positions beyond are left out.

    Raises:
        RunStoppedError: A shard was damaged since the run read it.
        OSError: The disk is full or fails.
    """
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    merged = work / "merged.parquet"
    try:
        with (
            atomic_file(merged) as temporary,
            pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer,
        ):
            waiting: list[Row] = []
            size = 0
            for row in _rows(_merged(_sorted_files(shards, work, num_prompts), work), constants):
                yield row
                waiting.append(row)
                size += len(row["prompt"] or "") + len(row["text"] or "") + 200
                if len(waiting) >= GROUP_ROWS or size >= GROUP_BYTES:
                    writer.write_table(pa.Table.from_pylist(waiting, schema=SCHEMA))
                    waiting, size = [], 0
            if waiting:
                writer.write_table(pa.Table.from_pylist(waiting, schema=SCHEMA))
        with atomic_file(target) as temporary:
            shutil.move(merged, temporary)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sorted_files(shards: Iterable[Path], work: Path, num_prompts: int) -> list[Path]:
    """One file for each shard with its records in the order of the positions."""
    files = []
    for number, shard in enumerate(shards):
        lines = [r.line for r in read_records(shard, Damage()) if r.position < num_prompts]
        lines.sort(key=position_of)
        files.append(work / f"sorted-0-{number}")
        with open(files[-1], "wb", buffering=1 << 20) as stream:
            stream.writelines(lines)
    return files


def _merged(files: Sequence[Path], work: Path) -> Iterator[bytes]:
    """All lines in the order of the positions; those of one position in the order in which they were written."""
    for level in itertools.count(1):
        if len(files) <= FAN_IN:
            break
        larger = []
        for number, chunk in enumerate(_chunks(files)):
            larger.append(work / f"sorted-{level}-{number}")
            with open(larger[-1], "wb", buffering=1 << 20) as stream:
                stream.writelines(_merge_once(chunk))
            for file in chunk:
                file.unlink()
        files = larger
    yield from _merge_once(files)


def _chunks(files: Sequence[Path]) -> Iterator[Sequence[Path]]:
    for start in range(0, len(files), FAN_IN):
        yield files[start : start + FAN_IN]


def _merge_once(files: Sequence[Path]) -> Iterator[bytes]:
    with ExitStack() as stack:
        streams = [stack.enter_context(open(file, "rb", buffering=1 << 16)) for file in files]
        yield from heapq.merge(*streams, key=position_of)


def _rows(lines: Iterable[bytes], constants: Constants) -> Iterator[Row]:
    for position, group in itertools.groupby(lines, key=position_of):
        prompt: Row | None = None
        answers: dict[int, Row] = {}
        failures: dict[int, Row] = {}
        for line in group:
            record = decode(line)
            if record is None:
                continue
            content = json.loads(record.payload)
            if record.kind == PROMPT:
                prompt = prompt or content
                continue
            _collect(content, answers, failures)
        if prompt is None:
            raise RunStoppedError(
                f"the record of the prompt at position {position} was damaged during the run; start the same command again"
            )
        for index in range(constants.num_samples):
            found = answers.get(index) or failures.get(index)
            if found is not None:
                yield {**constants.columns, **prompt, "sample_index": index, **found}


def _collect(content: Sequence[Any], answers: dict[int, Row], failures: dict[int, Row]) -> None:
    version, prompt_tokens, answered, failed = content
    shared = {"engine_version": version, "prompt_tokens": prompt_tokens}
    for index, tokens, reason, queue_s, ttft_s, total_s, text in answered:
        answers.setdefault(
            index,
            {
                **shared,
                "output_tokens": tokens,
                "finish_reason": reason,
                "error": None,
                "queue_s": queue_s,
                "ttft_s": ttft_s,
                "total_s": total_s,
                "text": text,
            },
        )
    for index, kind, reason in failed:
        failures[index] = {
            **shared,
            "output_tokens": 0,
            "finish_reason": "error",
            "error": f"{kind}: {reason}",
            "queue_s": None,
            "ttft_s": None,
            "total_s": None,
            "text": None,
        }
