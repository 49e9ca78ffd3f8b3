"""A resumable sampling run, from prompts to a Parquet file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data_gen.backend import Backend, SampleFailure, SamplingSettings, Work, WorkResult
from data_gen.prompts import Prompt
from data_gen.samples import SCHEMA_NAME
from data_gen.store import FAILED, RunStoppedError, SampleStore, disk_errors
from scheduler_core.errors import InputError
from scheduler_core.shell.files import locked_folder, writable_target, write_json
from scheduler_core.shell.progress import progress_bar
from scheduler_core.shell.versions import versions_of

log = logging.getLogger(__name__)

STORE_NAME = "samples.sqlite"
# Failures caused by the prompt; they do not count as failures in a row.
PROMPT_FAILURES = frozenset({"too_long", "refused", "content_filter", "template"})
# Failures that a retry cannot fix: those caused by the prompt, and by the way in which an engine responds.
PERMANENT_FAILURES = PROMPT_FAILURES | {"no_token_count", "finish_reason", "too_many_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRunOptions:
    """Storage options of a run; see `gen-samples --help`."""

    keep_text: bool = False
    hash_prompts: bool = False
    retries: int = 2
    max_failures_in_a_row: int = 1000
    overwrite: bool = False
    progress: bool = False
    sync_interval_s: float = 5.0  # maximum time until a result is synced to disk


def run_sampling(
    backend: Backend,
    prompts: Iterable[Prompt],
    settings: SamplingSettings,
    out: str | Path,
    options: SamplingRunOptions = SamplingRunOptions(),
    *,
    engine_options: Mapping[str, object] | None = None,
    notes: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Samples all prompts and writes `out` (Parquet, schema `samples/2`) and `OUT.run.json`.

    Every result is stored in `OUT.partial` on arrival. After an interruption, a call with the same settings resumes the
    run without repeating or skipping a sample, and retries failed ones. The file has one row for each (prompt, sample
    index), in the order of the prompts. If failures remain that a retry may fix, the store is kept next to the finished
    file, and the same call retries only these.

    Args:
        backend: Engine; closed by the caller.
        prompts: Prompts with unique ids, iterable more than once in the same order. A resumed run may have fewer or
            other prompts, or another order.
        settings, out, options: Sampling settings, the file to write, and storage options.
        engine_options: Options of the engine other than `settings`, as JSON; a run resumes only with equal ones.
        notes: Other facts to record, e.g. the origin of the prompts, as JSON.

    Returns:
        The content of `OUT.run.json`: the manifest of the run, and counts of the file and of this process;
        resume_reason is the reason for keeping the store, None if it was removed.

    Raises:
        InputError: The target cannot be written, is already finished, belongs to another run, or is in use by another
            process; an id is repeated; no prompt has an output.
        RunStoppedError: The disk is full, or the engine keeps failing. The store is kept.
    """
    out = writable_target(out, "out")
    if out.is_dir():
        raise InputError("out", str(out), "the path of a file, not of a folder")
    partial = out.with_name(out.name + ".partial")
    path = partial / STORE_NAME
    if out.exists() and not path.exists() and not options.overwrite:
        raise InputError("out", str(out), "a new file, or overwrite true to replace this one")
    with locked_folder(partial, "out"):
        if any(partial.iterdir()) and not path.exists():
            allowed = "the state of an interrupted run, or an unused name"
            raise InputError("out", str(partial), allowed)
        with _opened_store(path, options) as store:
            with store.transaction():
                num_prompts = store.register(prompts, hash_only=options.hash_prompts)
                manifest = _manifest_of(store, backend, settings, options, engine_options or {}, notes or {})
            session = _Session(backend, prompts, settings, store, options, num_prompts * settings.num_samples)
            session.sample()
            content = session.finish(out, num_prompts, {**manifest, "notes": dict(notes or {})})
            if content["resume_reason"] is None:
                store.remove()
            return content


@contextlib.contextmanager
def _opened_store(path: Path, options: SamplingRunOptions) -> Iterator[SampleStore]:
    """Opens the store; removes its file after an error if it has no finished sample."""
    is_new = not path.exists()
    try:
        store = SampleStore(path, sync_interval_s=options.sync_interval_s)
    except RunStoppedError:
        if is_new:
            for name in (path.name, f"{path.name}-wal"):
                path.with_name(name).unlink(missing_ok=True)
        raise
    try:
        yield store
    except BaseException:
        with contextlib.suppress(Exception):
            if store.is_empty():
                store.remove()
            else:
                num_outputs = store.count(f"NOT {FAILED}")
                message = "stopped: %d samples are stored in %s; run the same command again to resume"
                log.warning(message, num_outputs, path.parent)
        raise
    finally:
        store.close()


def _manifest_of(
    store: SampleStore,
    backend: Backend,
    settings: SamplingSettings,
    options: SamplingRunOptions,
    engine_options: Mapping[str, object],
    notes: Mapping[str, object],
) -> dict[str, Any]:
    """Returns the stored manifest, or stores a new one; InputError if the store has samples of a run with other options.

    With a seeded engine, the run id is derived from the options, so that repeated runs write identical files; otherwise
    every run has a new id."""
    # A run resumes only if these are equal.
    identity: dict[str, Any] = {
        "format": "run/2",
        "schema": SCHEMA_NAME,
        "engine": backend.name,
        "model": backend.served_model,
        "settings": asdict(settings),
        "engine_options": engine_options,
        "keep_text": options.keep_text,
        "hash_prompts": options.hash_prompts,
    }
    identity = json.loads(json.dumps(identity))  # same types as the stored one
    salt = "" if backend.seeded else uuid.uuid4().hex
    text = json.dumps([identity, notes], sort_keys=True) + salt
    manifest = {
        **identity,
        "run_id": hashlib.sha256(text.encode()).hexdigest()[:12],
        "engine_version": backend.version,
        "seeded": backend.seeded,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions_of(("pyarrow",)),
    }
    stored = store.manifest
    different = [key for key in identity if stored is not None and stored.get(key) != manifest[key]]
    if stored is None or (different and store.is_empty()):
        store.set_manifest(manifest)
        return manifest
    if different:
        old = ", ".join(f"{key} {_differences(stored.get(key), manifest[key])}" for key in different)
        raise InputError(
            "out", str(store.path.parent), f"the state of a run with the same {', '.join(different)} (it has {old}); "
            "remove it or use another --out"
        )  # fmt: skip
    old_version = stored["engine_version"]
    if old_version and backend.version and old_version != backend.version:
        log.warning("resuming with %s %s; it was %s before", backend.name, backend.version, old_version)
    return stored


def _differences(stored: object, new: object) -> str:
    if isinstance(stored, dict) and isinstance(new, dict):
        return " ".join(f"{key}={value}" for key, value in stored.items() if new.get(key) != value)
    return repr(stored)


@dataclass(slots=True)
class _Session:
    """The part of a run that is executed by this process."""

    backend: Backend
    prompts: Iterable[Prompt]
    settings: SamplingSettings
    store: SampleStore
    options: SamplingRunOptions
    num_samples: int  # of the complete run
    num_resumed: int = 0  # outputs stored by earlier processes
    # Prompt id -> prompt and sample indices in flight.
    pending: dict[str, tuple[Prompt, set[int]]] = field(default_factory=dict)
    failed_attempts: Counter[str] = field(default_factory=Counter)
    # Time at which the engine requested its first prompt; excludes loading of the model.
    start: float | None = None
    seconds: float = 0.0
    output_tokens: int = 0
    failures_in_a_row: int = 0
    first_failure: tuple[str, str] | None = None

    def sample(self) -> None:
        """Requests all missing samples, and retries failed ones."""
        self.num_resumed = self.store.count(f"NOT {FAILED}")
        if self.num_resumed:
            log.info("resuming: %d of %d samples are stored", self.num_resumed, self.num_samples)
        for attempt in range(1 + self.options.retries):
            num_open = self.num_samples - self.store.count("final")
            if not num_open:
                break
            if attempt:
                log.info("requesting %d failed samples again", num_open)
            self._round()
        if self.start is not None:
            self.seconds = round(time.monotonic() - self.start, 3)
        if not self.store.count(f"NOT {FAILED}"):
            prompt_id, reason = self.first_failure or ("", "no output")
            raise InputError("prompts", prompt_id, f"at least one prompt with an output ({reason})")

    def _round(self) -> None:
        self.pending.clear()
        done = self.store.count(f"NOT {FAILED}")
        bar = progress_bar(self.num_samples, "sample", enabled=self.options.progress, initial=done)
        with bar, contextlib.closing(self.backend.sample(self._work(), self.settings)) as results:
            for result in results:
                bar.update(self._take(result))
                failures = f", {self.failed_attempts.total()} failures" if self.failed_attempts else ""
                rate = self.output_tokens / max(time.monotonic() - (self.start or 0), 1e-9)
                bar.set_postfix_str(f"{rate:.0f} tokens/s{failures}", refresh=False)
        # Samples without a result are failures.
        for prompt, indices in list(self.pending.values()):
            lost = [
                SampleFailure(index, "no result from the engine", "no_output") for index in sorted(indices)
            ]
            self._take(WorkResult(prompt, None, (), tuple(lost)))

    def _work(self) -> Iterator[Work]:
        self.start = self.start or time.monotonic()
        position = -1
        for position, prompt in enumerate(self.prompts):
            if not self.store.has_prompt(position, prompt):
                raise RunStoppedError(f"the prompts changed during the run, first at position {position}")
            indices = self.store.open_indices(prompt.prompt_id, self.settings.num_samples)
            if indices:
                self.pending[prompt.prompt_id] = (prompt, set(indices))
                yield Work(prompt, indices)
        num_prompts = self.num_samples // self.settings.num_samples
        if position + 1 != num_prompts:
            raise RunStoppedError(
                f"the prompts changed during the run: {position + 1} instead of {num_prompts}"
            )

    def _take(self, result: WorkResult) -> int:
        """Stores and counts the requested samples of a result; returns the number of outputs."""
        prompt_id = result.prompt.prompt_id
        pending = self.pending[prompt_id][1] if prompt_id in self.pending else set()
        outputs = [output for output in result.outputs if output.sample_index in pending]
        failures = [failure for failure in result.failures if failure.sample_index in pending]
        if not (outputs or failures):
            return 0
        self.store.add(
            prompt_id,
            result.prompt_tokens,
            outputs,
            {failure: failure.kind in PERMANENT_FAILURES for failure in failures},
            engine_version=self.backend.version,
            keep_text=self.options.keep_text,
        )
        self.output_tokens += sum(output.output_tokens for output in outputs)
        pending -= {item.sample_index for item in outputs} | {item.sample_index for item in failures}
        if not pending:
            del self.pending[prompt_id]
        if outputs:
            self.failures_in_a_row = 0
        for failure in failures:
            if failure.kind not in self.failed_attempts:
                message = "prompt %s, sample %d failed (%s): %s; more of this kind are only counted"
                log.warning(message, prompt_id, failure.sample_index, failure.kind, failure.reason)
            self.failed_attempts[failure.kind] += 1
            self.failures_in_a_row += failure.kind not in PROMPT_FAILURES
            self.first_failure = self.first_failure or (prompt_id, failure.reason)
        if self.failures_in_a_row >= self.options.max_failures_in_a_row:
            last = failures[-1]
            raise RunStoppedError(
                f"{self.failures_in_a_row} consecutive failures, the last one: {last.kind}, {last.reason}"
            )
        return len(outputs)

    def finish(self, out: Path, num_prompts: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the samples file and its summary; returns the summary."""
        settings = asdict(self.settings)
        del settings["num_samples"]
        constants = {
            "model": self.backend.served_model,
            "engine": self.backend.name,
            "run_id": manifest["run_id"],
        }
        self.store.export(out, settings | constants)
        failures: dict[str, dict[str, Any]] = {}
        for prompt_id, sample_index, error in self.store.failures():
            kind, _, reason = error.partition(": ")
            example = f"prompt {prompt_id} sample {sample_index}: {reason}"
            failures.setdefault(kind, {"count": 0, "example": example})["count"] += 1
        # Reason for keeping the store next to the finished file; None: it is removed.
        resume_reason = (
            "the same command retries the failed samples" if self.store.count("NOT final") else None
        )
        if resume_reason is None and (surplus := self.store.num_surplus()):
            resume_reason = f"it has {surplus} samples of prompts that are no longer in the source"
        reasons = {
            name: self.store.count(f"finish_reason = '{name}'") for name in ("stop", "length", "error")
        }
        num_outputs = reasons["stop"] + reasons["length"]
        num_samples = num_outputs - self.num_resumed
        content = {
            **manifest,
            "engine_version": self.backend.version,
            "engine_counters": dict(getattr(self.backend, "counters", {})),
            "num_prompts": num_prompts,
            "num_samples": num_outputs,
            "num_censored": reasons["length"],
            "finish_reasons": reasons,
            "output_tokens": self.store.output_tokens(),
            "failures": failures,
            "resume_reason": resume_reason,
            "last_process": {
                "num_resumed": self.num_resumed,
                "num_samples": num_samples,
                "output_tokens": self.output_tokens,
                "failed_attempts": dict(self.failed_attempts),
                "seconds": self.seconds,
                "samples_per_s": num_samples / self.seconds if self.seconds else None,
                "output_tokens_per_s": self.output_tokens / self.seconds if self.seconds else None,
            },
        }
        with disk_errors(out):
            write_json(out.with_name(out.name + ".run.json"), content)
        return content


def summary_lines(content: Mapping[str, Any], out: str | Path) -> list[str]:
    """Human-readable summary of a run, from the content that `run_sampling` returned for the file `out`."""
    num_samples, process = content["num_samples"], content["last_process"]
    lines = [
        f"{out}: {content['num_prompts']} prompts, {num_samples} samples, "
        f"{content['num_censored'] / max(num_samples, 1):.1%} of them truncated at max_tokens, "
        f"{content['finish_reasons']['error']} failed"
    ]
    for kind, failure in sorted(content["failures"].items(), key=lambda item: -item[1]["count"]):
        lines.append(f"failed, {kind}: {failure['count']}, e.g. {failure['example']}")
    if process["seconds"]:
        lines.append(
            f"this process: {process['num_samples']} samples in {process['seconds']:.1f} s "
            f"({process['samples_per_s']:.1f} samples/s, {process['output_tokens_per_s']:.0f} tokens/s); "
            f"{process['num_resumed']} samples were already stored"
        )
    if content["resume_reason"] is not None:
        lines.append(f"{out}.partial is kept: {content['resume_reason']}; remove it if this is not needed")
    return lines
