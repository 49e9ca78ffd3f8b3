"""A sampling run that survives interruption: finished prompts go to shards, shards become one file at the end."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute

from data_gen.backend import Backend, PromptResult, SamplingSettings
from data_gen.prompts import Prompt
from data_gen.samples import Sample, read_samples, to_table, write_samples
from scheduler_core.errors import InputError
from scheduler_core.files import writable_target, write_json

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
SHARDS = "shard-*.parquet"


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run did. `failed` maps prompt ids to the reason why they have no samples."""

    path: Path
    num_prompts: int
    num_samples: int
    num_censored: int
    num_resumed: int
    failed: dict[str, str]


def generate(
    backend: Backend,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    out: str | Path,
    *,
    prompts_per_shard: int = 8,
    on_prompt: Callable[[PromptResult], None] = lambda result: None,
) -> RunReport:
    """Samples every prompt and writes `out` (schema `samples/1`).

    Finished prompts are written, synced, to shards in the folder `OUT.partial`; a run that was cut off goes on
    from there when it is started again with the same settings, and then gives the same set. The prompts may be
    more or fewer than before: answers do not depend on them.

    Args:
        backend: Engine that answers.
        prompts: Prompts with unique ids.
        settings: How to sample.
        out: Parquet file to write.
        prompts_per_shard: Finished prompts are lost by a crash up to this number.
        on_prompt: Called for each finished prompt, e.g. to move a progress bar.

    Raises:
        InputError: If `OUT.partial` belongs to another run, or no prompt could be answered.
    """
    out = writable_target(out, "out")
    partial = out.with_name(out.name + ".partial")
    _check_ids(prompts)
    identity, done = _resume(partial, _identity(backend, prompts, settings), prompts)
    todo = [prompt for prompt in prompts if prompt.prompt_id not in done]
    failed: dict[str, str] = {}
    buffer: list[PromptResult] = []
    num_shards = len(list(partial.glob(SHARDS)))

    def flush() -> None:
        nonlocal num_shards
        if buffer:
            rows = [row for result in buffer for row in _rows(result, backend, settings, identity["run_id"])]
            write_samples(partial / f"shard-{num_shards:06d}.parquet", to_table(rows))
            num_shards += 1
            buffer.clear()

    try:
        for result in backend.sample(todo, settings) if todo else ():
            if result.error:
                failed[result.prompt.prompt_id] = result.error
                log.warning("prompt %s has no samples: %s", result.prompt.prompt_id, result.error)
            else:
                buffer.append(result)
            if len(buffer) >= prompts_per_shard:
                flush()
            on_prompt(result)
    finally:
        flush()
    return _merge(partial, out, prompts, failed, num_resumed=len(done), config=identity)


def _check_ids(prompts: Sequence[Prompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise InputError("prompts", prompt.prompt_id, "each prompt id once")
        seen.add(prompt.prompt_id)


def _identity(backend: Backend, prompts: Sequence[Prompt], settings: SamplingSettings) -> dict[str, object]:
    """What a run is: engine, model and settings. Its prompts only name it, since answers do not depend on them."""
    identity: dict[str, object] = {
        "engine": backend.name,
        "engine_version": backend.version,
        "model": backend.served_model,
        "settings": asdict(settings),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for prompt in prompts:
        digest.update(json.dumps([prompt.prompt_id, prompt.text]).encode())
    return {**identity, "run_id": digest.hexdigest()[:12]}


def _resume(
    partial: Path, identity: dict[str, object], prompts: Sequence[Prompt]
) -> tuple[dict[str, object], set[str]]:
    """Identity to go on with and ids of the prompts that shards already answer; starts the folder if there is none."""
    run_file = partial / RUN_FILE
    if not run_file.exists():
        partial.mkdir(exist_ok=True)
        write_json(run_file, identity)
        return identity, set()
    try:
        found: dict[str, object] = json.loads(run_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("out", str(run_file), "the readable state of an interrupted run, or none") from error
    different = sorted(key for key in identity if found.get(key) != identity[key] and key != "run_id")
    if different:
        allowed = f"the state of a run with the same {', '.join(different)}; remove it or use another --out"
        raise InputError("out", str(partial), allowed)
    texts = {prompt.prompt_id: prompt.text for prompt in prompts}
    done: set[str] = set()
    for shard in sorted(partial.glob(SHARDS)):
        table = read_samples(shard).select(["prompt_id", "prompt"])
        for prompt_id, text in zip(*(column.to_pylist() for column in table.columns), strict=True):
            if texts.get(prompt_id, text) != text:
                raise InputError("prompts", prompt_id, "the text that the interrupted run had for this id")
            if prompt_id in texts:
                done.add(prompt_id)
    if done:
        log.info("going on with an interrupted run: %d of %d prompts are done", len(done), len(prompts))
    return {**identity, "run_id": found["run_id"]}, done


def _rows(result: PromptResult, backend: Backend, settings: SamplingSettings, run_id: object) -> list[Sample]:
    return [
        Sample(
            prompt_id=result.prompt.prompt_id,
            prompt=result.prompt.text,
            category=result.prompt.category,
            model=backend.served_model,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            sample_index=answer.sample_index,
            max_tokens=settings.max_tokens,
            prompt_tokens=result.prompt_tokens,
            output_tokens=answer.output_tokens,
            finish_reason=answer.finish_reason,
            engine=backend.name,
            engine_version=backend.version,
            run_id=str(run_id),
        )
        for answer in result.answers
    ]


def _merge(
    partial: Path,
    out: Path,
    prompts: Sequence[Prompt],
    failed: dict[str, str],
    *,
    num_resumed: int,
    config: dict[str, object],
) -> RunReport:
    shards = sorted(partial.glob(SHARDS))
    if not shards:
        first = next(iter(failed.items()), ("", "no prompts"))
        raise InputError("prompts", first[0], f"at least one prompt that can be answered ({first[1]})")
    table = pa.concat_tables([read_samples(shard) for shard in shards])
    order = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}
    table = table.filter(pa.compute.is_in(table.column("prompt_id"), pa.array(list(order))))
    position = pa.array([order[prompt_id] for prompt_id in table.column("prompt_id").to_pylist()])
    table = table.append_column("position", position).sort_by(
        [("position", "ascending"), ("sample_index", "ascending")]
    )
    table = table.drop_columns(["position"])
    write_samples(out, table)
    reasons = table.column("finish_reason").to_pylist()
    report = RunReport(
        path=out,
        num_prompts=len(set(table.column("prompt_id").to_pylist())),
        num_samples=table.num_rows,
        num_censored=reasons.count("length"),
        num_resumed=num_resumed,
        failed=failed,
    )
    write_json(
        out.with_name(out.name + ".run.json"),
        {**config, "num_samples": report.num_samples, "num_censored": report.num_censored, "failed": failed},
    )
    _remove(partial)
    return report


def _remove(partial: Path) -> None:
    """Removes the state of a finished run: its identity last, so that a crash in between leaves it resumable."""
    grave = partial.with_name(partial.name + f".done.{os.getpid()}")
    os.replace(partial, grave)
    shutil.rmtree(grave)
