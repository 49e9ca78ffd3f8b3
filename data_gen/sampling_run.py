"""A sampling run from its prompts to its Parquet file, in as many processes as it takes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from data_gen.backend import Backend, SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult
from data_gen.prompts import Prompt
from data_gen.samples import SCHEMA_NAME
from data_gen.store import RunStoppedError, SampleStore, disk_errors
from scheduler_core.errors import InputError
from scheduler_core.files import locked_folder, writable_target, write_json

log = logging.getLogger(__name__)

STORE_NAME = "samples.sqlite"
# A run continues only where these are the same; the rest of the manifest records where the samples come from.
IDENTITY = ("format", "schema", "engine", "model", "settings", "engine_options", "keep_text", "hash_prompts")
# Failures that lie in the prompt: a thousand of them in a row say nothing about the engine.
PROMPT_FAILURES = frozenset({"too_long", "refused", "content_filter", "template"})
# Failures that the same request would meet again; beyond those of a prompt, the way in which an engine responds.
PERMANENT_FAILURES = PROMPT_FAILURES | {"no_token_count", "finish_reason", "too_many_tokens"}
_NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRunOptions:
    """How a run stores its samples.

    Attributes:
        keep_text: Keep the texts of the outputs.
        hash_prompts: Keep hashes of the prompts instead of their texts and messages.
        retries: How often failed samples are requested again once all others are there.
        max_failures_in_a_row: Stop, to be resumed, after this many failures without an output in between; failures
            that lie in the prompt do not count.
        overwrite: Replace a finished file.
        sync_interval_s: Longest time until a result is safe from a power cut.
    """

    keep_text: bool = False
    hash_prompts: bool = False
    retries: int = 2
    max_failures_in_a_row: int = 1000
    overwrite: bool = False
    sync_interval_s: float = 5.0

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise InputError("retries", self.retries, "integers >= 0")
        if self.max_failures_in_a_row < 1:
            raise InputError("max_failures_in_a_row", self.max_failures_in_a_row, "integers > 0")


class RunObserver:
    """Gets the events of a run, e.g. to move a progress bar; this one does nothing."""

    def on_start(self, num_samples: int, num_done: int) -> None:
        """The engine takes its first prompt; `num_done` of all `num_samples` samples are stored already."""

    def on_result(self, result: WorkResult) -> None:
        """A result is stored."""


@dataclass(slots=True)
class FailureCount:
    """Failures of one kind: how many, and some of them in full."""

    count: int = 0
    examples: list[dict[str, object]] = field(default_factory=list)


@dataclass(slots=True)
class ProcessStats:
    """What this process did: outputs and tokens received, failed attempts by kind, seconds without loading."""

    num_resumed: int = 0
    num_samples: int = 0
    output_tokens: int = 0
    failed_attempts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def per_second(self, count: int) -> float | None:
        """A rate; None if no time has passed."""
        return count / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The end of a run.

    Attributes:
        path: The samples.
        run_id: Identifier in every row.
        num_prompts: Prompts in the file.
        finish_reasons: Rows of the file by how they ended.
        output_tokens: Of all rows.
        failures: Rows without an output, by kind.
        process: What this process did for it.
        partial: Folder of the run's state.
        resume_reason: Why the state is kept beside the finished file; None if it was removed.
    """

    path: Path
    run_id: str
    num_prompts: int
    finish_reasons: Mapping[str, int]
    output_tokens: int
    failures: Mapping[str, FailureCount]
    process: ProcessStats
    partial: Path
    resume_reason: str | None

    @property
    def num_samples(self) -> int:
        """Finished outputs."""
        return self.finish_reasons["stop"] + self.finish_reasons["length"]

    @property
    def num_censored(self) -> int:
        """Outputs truncated at max_tokens."""
        return self.finish_reasons["length"]

    @property
    def num_failed(self) -> int:
        """Rows without an output."""
        return self.finish_reasons["error"]

    def to_json(self) -> dict[str, object]:
        """The summary as it is saved; the manifest's keys stand beside these."""
        process = self.process
        return {
            "num_prompts": self.num_prompts,
            "num_samples": self.num_samples,
            "num_censored": self.num_censored,
            "finish_reasons": dict(self.finish_reasons),
            "output_tokens": self.output_tokens,
            "failures": {kind: asdict(failure) for kind, failure in sorted(self.failures.items())},
            "last_process": asdict(process)
            | {
                "samples_per_s": process.per_second(process.num_samples),
                "output_tokens_per_s": process.per_second(process.output_tokens),
            },
        }

    def lines(self) -> list[str]:
        """The summary for people."""
        process = self.process
        censored = 100 * self.num_censored / self.num_samples if self.num_samples else 0.0
        lines = [
            f"{self.path}: {self.num_prompts} prompts, {self.num_samples} samples, {censored:.1f} % of them truncated "
            f"at max_tokens, {self.num_failed} failed"
        ]
        for kind, failure in sorted(self.failures.items(), key=lambda item: -item[1].count):
            example = failure.examples[0]
            lines.append(
                f"failed, {kind}: {failure.count}, e.g. prompt {example['prompt_id']} sample "
                f"{example['sample_index']}: {example['reason']}"
            )
        if process.num_samples:
            rate, token_rate = (
                process.per_second(process.num_samples),
                process.per_second(process.output_tokens),
            )
            lines.append(
                f"this process: {process.num_samples} samples and {process.output_tokens} tokens in "
                f"{process.seconds:.1f} s"
                + (f" ({rate:.1f} samples/s, {token_rate:.0f} tokens/s)" if rate and token_rate else "")
                + (f"; {process.num_resumed} samples were stored before" if process.num_resumed else "")
            )
        if self.resume_reason is not None:
            lines.append(f"{self.partial} is kept: {self.resume_reason}; remove it if you do not need that")
        return lines


def run_sampling(
    backend: Backend,
    prompts: Iterable[Prompt],
    settings: SamplingSettings,
    out: str | Path,
    options: SamplingRunOptions | None = None,
    *,
    engine_options: Mapping[str, object] | None = None,
    notes: Mapping[str, object] | None = None,
    observer: RunObserver | None = None,
) -> RunSummary:
    """Samples all prompts and writes `out` (Parquet, schema `samples/2`) and `OUT.run.json`.

    Every result goes to the store in `OUT.partial` as it arrives. Whatever ends the process, the next one with the same
    settings continues from there, neither repeating nor skipping a sample; failed ones are tried again. The file has
    one row for each (prompt, sample index), in the order of the prompts. Where failures remain that might pass another
    time, the store stays beside the finished file, and the same call tries just them.

    Args:
        backend: Engine; closed by the caller.
        prompts: Prompts with unique ids, iterable more than once in the same order. A resumed run may have fewer,
            others, or another order.
        settings: How to sample.
        out: File to write.
        options: How samples are stored.
        engine_options: How the engine is used beyond `settings`, as JSON; a run continues only with the same.
        notes: Whatever else is to be recorded, e.g. where the prompts come from, as JSON.
        observer: Gets every result.

    Raises:
        InputError: The target cannot be written, is finished already or belongs to another run; another process
            works on it; an id repeats; no prompt got an output.
        RunStoppedError: The disk is full, or the engine only fails. The state is kept.
    """
    options, notes = options or SamplingRunOptions(), notes or {}
    if isinstance(prompts, Iterator):
        raise TypeError(
            "prompts must be iterable more than once: a list, or an object that reopens its source"
        )
    out = writable_target(out, "out")
    if out.is_dir():
        raise InputError("out", str(out), "a file path, but a folder stands there")
    partial = out.with_name(out.name + ".partial")
    if out.exists() and not (partial / STORE_NAME).exists() and not options.overwrite:
        raise InputError("out", str(out), "a new file, or overwrite true to replace this one")
    with locked_folder(partial, "out"):
        if any(partial.iterdir()) and not (partial / STORE_NAME).exists():
            raise InputError(
                "out", str(partial), "the state of an interrupted run, or no folder of that name"
            )
        with _opened_store(partial / STORE_NAME, options) as store:
            with store.transaction():
                num_prompts = store.register(prompts, hash_only=options.hash_prompts)
                manifest = _settled_manifest(store, backend, settings, options, engine_options or {}, notes)
            session = _Session(
                backend, prompts, settings, store, options, num_prompts, observer or RunObserver(), partial
            )
            session.sample()
            summary = session.finish(out, manifest, notes)
            if summary.resume_reason is None:
                store.remove()
            return summary


@contextlib.contextmanager
def _opened_store(path: Path, options: SamplingRunOptions) -> Iterator[SampleStore]:
    """The store; after an error that leaves it without a sample its file is removed."""
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
            num_outputs = store.num_outputs()
            if not num_outputs and not store.num_surplus():
                store.remove()
            else:
                log.warning(
                    "stopped: %d samples are safe in %s; the same command continues from there",
                    num_outputs,
                    path.parent,
                )
        raise
    finally:
        store.close()


def _settled_manifest(
    store: SampleStore,
    backend: Backend,
    settings: SamplingSettings,
    options: SamplingRunOptions,
    engine_options: Mapping[str, object],
    notes: Mapping[str, object],
) -> dict[str, Any]:
    """The manifest to continue with: the stored one, or a new one.

    Where the engine is seeded a repeated run has the same id, so that its files are equal; elsewhere every run has its
    own.

    Raises:
        InputError: The store has samples of another run.
    """
    identity = {
        "format": "run/2",
        "schema": SCHEMA_NAME,
        "engine": backend.name,
        "model": backend.served_model,
        "settings": asdict(settings),
        "engine_options": dict(engine_options),
        "keep_text": options.keep_text,
        "hash_prompts": options.hash_prompts,
    }
    # Through JSON and back, as it will be compared.
    identity, notes = json.loads(json.dumps([identity, dict(notes)]))
    salt = "" if backend.seeded else uuid.uuid4().hex
    text = json.dumps([identity, notes], sort_keys=True) + salt
    manifest = {
        **identity,
        "run_id": hashlib.sha256(text.encode()).hexdigest()[:12],
        "engine_version": backend.version,
        "seeded": backend.seeded,
        "notes": notes,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "tailcast": metadata.version("tailcast"),
            "pyarrow": metadata.version("pyarrow"),
        },
    }
    stored = store.manifest
    different = [key for key in IDENTITY if stored is not None and stored.get(key) != manifest[key]]
    if stored is None or (different and not (store.num_outputs() or store.num_surplus())):
        store.set_manifest(manifest)
        return manifest
    if different:
        old = ", ".join(f"{key} {_differences(stored.get(key), manifest[key])}" for key in different)
        raise InputError(
            "out", str(store.path.parent), f"the state of a run with the same {', '.join(different)} (it has {old}); "
            "remove it or use another --out"
        )  # fmt: skip
    before = stored["engine_version"]
    if before and backend.version and before != backend.version:
        log.warning("continuing with %s %s; before it was %s", backend.name, backend.version, before)
    return stored


def _differences(stored: object, new: object) -> str:
    if isinstance(stored, dict) and isinstance(new, dict):
        return " ".join(f"{key}={value}" for key, value in stored.items() if new.get(key) != value)
    return repr(stored)


@dataclass(slots=True)
class _Pending:
    """A prompt that the backend works on, and the sample indices that are still to come."""

    prompt: Prompt
    indices: set[int]


@dataclass(slots=True)
class _Session:
    """One process's part of a run."""

    backend: Backend
    prompts: Iterable[Prompt]
    settings: SamplingSettings
    store: SampleStore
    options: SamplingRunOptions
    num_prompts: int
    observer: RunObserver
    partial: Path
    stats: ProcessStats = field(default_factory=ProcessStats)
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _start: float | None = None
    _failures_in_a_row: int = 0
    _first_failure: tuple[str, str] = ("", "no output came")

    def sample(self) -> None:
        """Requests all that is missing, and again what failed."""
        total = self.num_prompts * self.settings.num_samples
        self.stats.num_resumed = self.store.num_outputs()
        if self.stats.num_resumed:
            log.info("resuming: %d of %d samples are stored", self.stats.num_resumed, total)
        try:
            for attempt in range(1 + self.options.retries):
                num_open = total - self.store.num_closed()
                if not num_open:
                    break
                if attempt:
                    log.info("requesting %d failed samples again", num_open)
                self._round()
        finally:
            if self._start is not None:
                self.stats.seconds = round(time.monotonic() - self._start, 3)
        if not self.store.num_outputs():
            prompt_id, reason = self._first_failure
            raise InputError("prompts", prompt_id, f"at least one prompt that gets an output ({reason})")

    def _round(self) -> None:
        self._pending.clear()
        results = self.backend.sample(self._work(), self.settings)
        try:
            for result in results:
                self._take(result)
        finally:
            close = getattr(results, "close", None)
            if close is not None:
                close()
        # What the backend lost must not pass for done.
        for pending in list(self._pending.values()):
            lost = tuple(
                SampleFailure(index, "the engine returned nothing", "no_output")
                for index in sorted(pending.indices)
            )
            self._take(WorkResult(pending.prompt, None, (), lost))

    def _work(self) -> Iterator[Work]:
        # Only now is the engine ready: before it takes the first prompt it may load a model for minutes.
        if self._start is None:
            self._start = time.monotonic()
            self.observer.on_start(self.num_prompts * self.settings.num_samples, self.stats.num_resumed)
        position = -1
        for position, prompt in enumerate(self.prompts):
            if not self.store.has_prompt(position, prompt):
                raise RunStoppedError(f"the prompts changed during the run, first at position {position}")
            indices = self.store.open_indices(prompt.prompt_id, self.settings.num_samples)
            if indices:
                self._pending[prompt.prompt_id] = _Pending(prompt, set(indices))
                yield Work(prompt, indices)
        if position + 1 != self.num_prompts:
            raise RunStoppedError(
                f"the prompts changed during the run: {position + 1} of {self.num_prompts} are left"
            )

    def _take(self, result: WorkResult) -> None:
        """Stores a result and counts it."""
        prompt_id = result.prompt.prompt_id
        pending = self._pending.get(prompt_id)
        if pending is None:
            return
        outputs, failures = _requested_only(result, pending.indices)
        if not (outputs or failures):
            return
        self.store.add(
            prompt_id,
            result.prompt_tokens,
            outputs,
            {failure: failure.kind in PERMANENT_FAILURES for failure in failures},
            engine_version=self.backend.version,
            keep_text=self.options.keep_text,
        )
        self.stats.num_samples += len(outputs)
        self.stats.output_tokens += sum(output.output_tokens for output in outputs)
        pending.indices -= {output.sample_index for output in outputs}
        pending.indices -= {failure.sample_index for failure in failures}
        if not pending.indices:
            del self._pending[prompt_id]
        self.observer.on_result(WorkResult(result.prompt, result.prompt_tokens, outputs, failures))
        self._count_failures(prompt_id, failures, reset=bool(outputs))

    def _count_failures(self, prompt_id: str, failures: tuple[SampleFailure, ...], *, reset: bool) -> None:
        if reset:
            self._failures_in_a_row = 0
        attempts = self.stats.failed_attempts
        for failure in failures:
            if failure.kind not in attempts:
                log.warning(
                    "prompt %s, sample %d failed (%s): %s; further ones are counted",
                    prompt_id,
                    failure.sample_index,
                    failure.kind,
                    failure.reason,
                )
            attempts[failure.kind] = attempts.get(failure.kind, 0) + 1
            self._failures_in_a_row += failure.kind not in PROMPT_FAILURES
            if not self._first_failure[0]:
                self._first_failure = (prompt_id, failure.reason)
        if self._failures_in_a_row >= self.options.max_failures_in_a_row:
            last = failures[-1]
            raise RunStoppedError(
                f"{self._failures_in_a_row} failures in a row, the last: {last.kind}, {last.reason}"
            )

    def finish(self, out: Path, manifest: Mapping[str, Any], notes: Mapping[str, object]) -> RunSummary:
        """Writes the file and its summary."""
        self.store.export(
            out,
            {
                "model": self.backend.served_model,
                "temperature": self.settings.temperature,
                "top_p": self.settings.top_p,
                "seed": self.settings.seed,
                "max_tokens": self.settings.max_tokens,
                "engine": self.backend.name,
                "run_id": manifest["run_id"],
            },
        )
        failures: dict[str, FailureCount] = {}
        for prompt_id, sample_index, error in self.store.failures():
            kind, _, reason = error.partition(": ")
            failure = failures.setdefault(kind, FailureCount())
            failure.count += 1
            if failure.count <= _NUM_EXAMPLES:
                failure.examples.append(
                    {"prompt_id": prompt_id, "sample_index": sample_index, "reason": reason}
                )
        totals = self.store.totals()
        summary = RunSummary(
            path=out,
            run_id=manifest["run_id"],
            num_prompts=self.num_prompts,
            finish_reasons={name: totals.get(name, (0, 0))[0] for name in ("stop", "length", "error")},
            output_tokens=sum(tokens for _, tokens in totals.values()),
            failures=failures,
            process=self.stats,
            partial=self.partial,
            resume_reason=self._resume_reason(),
        )
        content = {
            **manifest,
            "notes": dict(notes),
            "engine_version": self.backend.version,
            "engine_counters": dict(getattr(self.backend, "counters", {})),
            **summary.to_json(),
        }
        with disk_errors(out):
            write_json(out.with_name(out.name + ".run.json"), content)
        return summary

    def _resume_reason(self) -> str | None:
        """Why the store is worth keeping beside the finished file, if it is."""
        if self.store.num_retryable():
            return "the same command tries the failed samples again"
        num_surplus = self.store.num_surplus()
        if num_surplus:
            return f"{num_surplus} samples of prompts that the source does not have any more are in it"
        return None


def _requested_only(
    result: WorkResult, requested: set[int]
) -> tuple[tuple[SampledOutput, ...], tuple[SampleFailure, ...]]:
    """Outputs and failures of requested indices, each index once; an output without a token is a failure."""
    outputs: dict[int, SampledOutput] = {}
    failures = {item.sample_index: item for item in result.failures if item.sample_index in requested}
    for output in result.outputs:
        index = output.sample_index
        if index not in requested or index in outputs:
            log.warning("prompt %s: sample %d was not requested", result.prompt.prompt_id, index)
        elif output.output_tokens < 1:
            failures[index] = SampleFailure(index, f"an output of {output.output_tokens} tokens", "malformed")
        else:
            outputs[index] = output
    return tuple(outputs.values()), tuple(item for index, item in failures.items() if index not in outputs)


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """While it lasts, SIGTERM raises `KeyboardInterrupt`; does nothing outside the main thread, where it cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
