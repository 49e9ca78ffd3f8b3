"""A sampling run from its prompts to its file, in as many processes as it takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from data_gen.backend import Answer, Backend, Failure, SamplingSettings, Work, WorkResult
from data_gen.prompts import Prompt
from data_gen.runs.errors import RunStoppedError, disk_errors
from data_gen.runs.folder import Manifest, locked_folder, remove_folder, sweep
from data_gen.runs.ledger import DONE, FAILED, GIVEN_UP, MISSING, Ledger
from data_gen.runs.merge import Constants, write_sorted
from data_gen.runs.records import prompt_record, result_record
from data_gen.runs.shards import ShardWriter, shard_paths, sync_folder
from data_gen.runs.summary import Effort, RunSummary, Tally
from data_gen.runs.survey import Survey, survey
from data_gen.samples import prompt_sha256
from scheduler_core.errors import InputError
from scheduler_core.files import writable_target, write_json

log = logging.getLogger(__name__)

# Failures that lie in the prompt: a thousand of them in a row say nothing about the engine.
OF_ONE_PROMPT_KINDS = frozenset({"too_long", "refused", "content_filter", "template"})
# Failures that the same request would meet again. Those that are not of one prompt are the engine's way of answering:
# it does not count, ends answers in another way, ignores the cap.
PERMANENT_KINDS = OF_ONE_PROMPT_KINDS | {"no_token_count", "finish_reason", "too_many_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a run keeps its answers.

    Attributes:
        keep_text: Keep the answers' texts.
        hash_prompts: Keep hashes of the prompts instead of their texts and messages.
        retries: How often failed answers are asked for again once all others are there.
        max_failures_in_a_row: Stop, to be resumed, after so many failures without an answer in between; failures that
            lie in the prompt do not count.
        overwrite: Replace a finished file.
        shard_bytes: Size at which a shard is closed; a merge holds one shard in memory.
        sync_interval_s: Longest time that an answer is on its way to the disk, where a power cut cannot take it.
    """

    keep_text: bool = False
    hash_prompts: bool = False
    retries: int = 2
    max_failures_in_a_row: int = 1000
    overwrite: bool = False
    shard_bytes: int = 32 << 20
    sync_interval_s: float = 5.0

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise InputError("retries", self.retries, "a whole number, not negative")
        for name in ("max_failures_in_a_row", "shard_bytes"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "a whole number of at least 1")


class Observer:
    """Is told how a run goes on, e.g. to move a progress bar; this one does nothing."""

    def started(self, num_answers: int, num_done: int) -> None:
        """The engine is about to take its first prompt; `num_done` of all `num_answers` answers are there already."""

    def arrived(self, result: WorkResult) -> None:
        """A result is safe on disk."""


def run(
    backend: Backend,
    prompts: Iterable[Prompt],
    settings: SamplingSettings,
    out: str | Path,
    options: RunOptions | None = None,
    *,
    engine_options: Mapping[str, object] | None = None,
    notes: Mapping[str, object] | None = None,
    observer: Observer | None = None,
) -> RunSummary:
    """Samples all prompts and writes `out` (Parquet, schema `samples/2`) and `OUT.run.json`.

    Every result goes to a shard in `OUT.partial` as it arrives. Whatever ends the process, the next one with the same
    settings goes on from there, neither repeating nor skipping an answer; failed ones are tried again. In the end the
    file has one row for each (prompt, sample index), in the order of the prompts. Where failures remain that might
    pass another time, the folder stays beside the finished file, and the same call tries just them.

    Args:
        backend: Engine that answers; closed by the caller.
        prompts: Prompts with unique ids, iterable more than once in the same order. A resumed run may have fewer or
            more at the end.
        settings: How to sample.
        out: File to write.
        options: How answers are kept.
        engine_options: How the engine is asked beyond `settings`, as JSON; a run goes on only with the same.
        notes: Whatever else is to be recorded, e.g. where the prompts come from, as JSON.
        observer: Told about every result.

    Raises:
        InputError: The target cannot be written, is finished already or belongs to another run; another process
            works on it; an id repeats; no prompt could be answered.
        RunStoppedError: The disk is full, or the engine only fails. The state is kept.
    """
    options = options or RunOptions()
    observer = observer or Observer()
    out = writable_target(out, "out")
    if out.is_dir():
        raise InputError("out", str(out), "a file path, but a folder stands there")
    partial = out.with_name(out.name + ".partial")
    sweep(partial)
    if out.exists() and not partial.exists() and not options.overwrite:
        raise InputError("out", str(out), "a new file, or overwrite true to replace this one")
    found = survey(prompts)
    wanted = Manifest.of(
        backend,
        settings,
        keep_text=options.keep_text,
        hash_prompts=options.hash_prompts,
        engine_options=engine_options or {},
        notes=notes or {},
    )
    with locked_folder(partial):
        manifest = wanted.settled(partial)
        before = manifest.content["engine_version"]
        if before and backend.version and before != backend.version:
            log.warning("going on with %s %s; before it was %s", backend.name, backend.version, before)
        session = _Session(backend, prompts, settings, partial, options, found, observer)
        try:
            session.sample()
            return session.finish(out, manifest, notes or {})
        except BaseException:
            session.leave()
            raise


@dataclass(slots=True)
class _Asked:
    """A prompt that the backend works on, and which answers are still to come."""

    position: int
    prompt: Prompt
    indices: set[int]


@dataclass(slots=True)
class _Session:
    """One process's part of a run."""

    backend: Backend
    prompts: Iterable[Prompt]
    settings: SamplingSettings
    folder: Path
    options: RunOptions
    found: Survey
    observer: Observer
    ledger: Ledger = field(init=False)
    effort: Effort = field(init=False)
    _writer: ShardWriter = field(init=False)
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _began: float | None = None
    _failures_in_a_row: int = 0
    _first_failure: tuple[str, str] = ("", "no answer came")

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.found, self.settings.num_samples)
        self.ledger.load(shard_paths(self.folder))
        self.effort = Effort(num_resumed=self.ledger.count(DONE))
        self._writer = ShardWriter(
            self.folder,
            max_bytes=self.options.shard_bytes,
            sync_interval_s=self.options.sync_interval_s,
        )

    def sample(self) -> None:
        """Asks for all that is missing, and again for what failed."""
        total = self.ledger.state.size
        if self.effort.num_resumed:
            log.info("going on: %d of %d answers are there", self.effort.num_resumed, total)
        try:
            for number in range(1 + self.options.retries):
                left = self.ledger.count(MISSING, FAILED)
                if not left:
                    break
                if number:
                    log.info("asking again for %d failed answers", left)
                self._round()
        finally:
            if self._began is not None:
                self.effort.seconds = time.monotonic() - self._began
            self._writer.close()
        if not self.ledger.count(DONE):
            raise InputError(
                "prompts",
                self._first_failure[0],
                f"at least one prompt that can be answered ({self._first_failure[1]})",
            )

    def _round(self) -> None:
        self._asked.clear()
        results = self.backend.sample(self._work(), self.settings)
        close = getattr(results, "close", None)
        try:
            for result in results:
                self._take(result)
        finally:
            if close is not None:
                close()
        # What the backend forgot must not pass for done.
        for asked in list(self._asked.values()):
            lost = tuple(Failure(i, "the engine gave no answer", "no_answer") for i in sorted(asked.indices))
            self._take(WorkResult(asked.prompt, None, (), lost))

    def _work(self) -> Iterator[Work]:
        # Only now is the engine ready: before it takes the first prompt it may load a model for minutes.
        if self._began is None:
            self._began = time.monotonic()
            self.observer.started(self.ledger.state.size, self.effort.num_resumed)
        position = -1
        for position, prompt in enumerate(self.prompts):
            if not self.ledger.matches(position, prompt.prompt_id, prompt_sha256(prompt)):
                raise RunStoppedError(f"the prompts changed during the run, first at position {position}")
            indices = self.ledger.open_indices(position)
            if indices:
                self._asked[prompt.prompt_id] = _Asked(position, prompt, set(indices))
                yield Work(prompt, indices)
        if position + 1 != len(self.found):
            raise RunStoppedError(
                f"the prompts changed during the run: {position + 1} of {len(self.found)} are left"
            )

    def _take(self, result: WorkResult) -> None:
        """Puts a result on disk, then in the ledger."""
        asked = self._asked.get(result.prompt.prompt_id)
        expected = asked.indices if asked is not None else set()
        answers, failures = _sorted_out(result, expected)
        if asked is None or not (answers or failures):
            return
        position = asked.position
        records = b""
        if not self.ledger.stored[position]:
            records = prompt_record(position, asked.prompt, hash_only=self.options.hash_prompts)
        records += result_record(
            position,
            result.prompt_tokens,
            answers,
            failures,
            engine_version=self.backend.version,
            keep_text=self.options.keep_text,
        )
        self._writer.append(records)
        self.ledger.stored[position] = True
        for answer in answers:
            self.ledger.state[position, answer.sample_index] = DONE
            self.effort.output_tokens += answer.output_tokens
        self.effort.num_answers += len(answers)
        expected.difference_update(a.sample_index for a in answers)
        expected.difference_update(f.sample_index for f in failures)
        if not expected:
            del self._asked[result.prompt.prompt_id]
        self._count_failures(position, result.prompt, answers, failures)
        self.observer.arrived(WorkResult(result.prompt, result.prompt_tokens, answers, failures))

    def _count_failures(
        self, position: int, prompt: Prompt, answers: tuple[Answer, ...], failures: tuple[Failure, ...]
    ) -> None:
        if answers:
            self._failures_in_a_row = 0
        for failure in failures:
            permanent = failure.kind in PERMANENT_KINDS
            self.ledger.state[position, failure.sample_index] = GIVEN_UP if permanent else FAILED
            attempts = self.effort.failed_attempts
            if failure.kind not in attempts:
                log.warning(
                    "prompt %s, answer %d failed (%s): %s; further ones are counted",
                    prompt.prompt_id,
                    failure.sample_index,
                    failure.kind,
                    failure.reason,
                )
            attempts[failure.kind] = attempts.get(failure.kind, 0) + 1
            self._failures_in_a_row += failure.kind not in OF_ONE_PROMPT_KINDS
            if not self._first_failure[0]:
                self._first_failure = (prompt.prompt_id, failure.reason)
        if self._failures_in_a_row >= self.options.max_failures_in_a_row:
            last = failures[-1]
            raise RunStoppedError(
                f"{self._failures_in_a_row} failures in a row, the last: {last.kind}, {last.reason}"
            )

    def finish(self, out: Path, manifest: Manifest, notes: Mapping[str, object]) -> RunSummary:
        """Writes the file and its summary; removes the folder unless failures may be tried again."""
        constants = Constants(
            {
                "model": self.backend.served_model,
                "temperature": self.settings.temperature,
                "top_p": self.settings.top_p,
                "seed": self.settings.seed,
                "max_tokens": self.settings.max_tokens,
                "engine": self.backend.name,
                "run_id": manifest.run_id,
            },
            self.settings.num_samples,
        )
        tally = Tally()
        with disk_errors(out):
            rows = write_sorted(
                shard_paths(self.folder), self.folder / "merge", out, constants, len(self.found)
            )
            with closing(rows):
                for row in rows:
                    tally.add(row)
            kept = self._reason_to_keep()
            summary = RunSummary(
                out, manifest.run_id, tally, self.effort, self.ledger.damage.num_lines, self.folder, kept
            )
            told = {
                **manifest.content,
                "notes": dict(notes),
                "engine_version": self.backend.version,
                "engine_counters": dict(getattr(self.backend, "counters", {})),
                **summary.to_json(),
            }
            write_json(out.with_name(out.name + ".run.json"), told)
            sync_folder(out.parent)
            if kept is None:
                remove_folder(self.folder)
        return summary

    def _reason_to_keep(self) -> str | None:
        """Why the state is worth keeping beside the finished file, if it is."""
        if self.ledger.count(FAILED):
            return "the same command tries the failed answers again"
        if self.ledger.num_surplus:
            return f"{self.ledger.num_surplus} answers to prompts that are no longer asked for are in it"
        return None

    def leave(self) -> None:
        """Says how to go on after an early end; a folder without any answer is removed."""
        done = self.ledger.count(DONE)
        if not done and not self.ledger.num_surplus:
            with suppress(OSError):
                remove_folder(self.folder)
            return
        log.warning(
            "stopped: %d of %d answers are safe in %s; the same command goes on from there",
            done,
            self.ledger.state.size,
            self.folder,
        )


def _sorted_out(result: WorkResult, expected: set[int]) -> tuple[tuple[Answer, ...], tuple[Failure, ...]]:
    """Answers and failures that were asked for, each index once; an answer without a token is a failure."""
    answers: dict[int, Answer] = {}
    failures: dict[int, Failure] = {f.sample_index: f for f in result.failures if f.sample_index in expected}
    for answer in result.answers:
        index = answer.sample_index
        if index not in expected or index in answers:
            log.warning("prompt %s: answer %d was not asked for", result.prompt.prompt_id, index)
        elif answer.output_tokens < 1:
            reason = f"an answer of {answer.output_tokens} tokens"
            failures[index] = Failure(index, reason, "malformed")
        else:
            answers[index] = answer
    return tuple(answers.values()), tuple(f for i, f in failures.items() if i not in answers)
