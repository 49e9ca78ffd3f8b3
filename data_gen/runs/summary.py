"""What a run did: counts, what failed and why, how fast; saved beside the samples and told at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_EXAMPLES = 3


@dataclass(slots=True)
class FailureKind:
    """Failures of one kind: how many, and some of them in full."""

    count: int = 0
    examples: list[dict[str, object]] = field(default_factory=list)

    def add(self, prompt_id: str, sample_index: int, reason: str) -> None:
        """Counts one more."""
        self.count += 1
        if len(self.examples) < NUM_EXAMPLES:
            self.examples.append({"prompt_id": prompt_id, "sample_index": sample_index, "reason": reason})


@dataclass(slots=True)
class Tally:
    """Counts over the rows of the finished file."""

    num_prompts: int = 0
    finish_reasons: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "error": 0})
    output_tokens: int = 0
    failures: dict[str, FailureKind] = field(default_factory=dict)
    _last_prompt: str | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes in one row; the rows of a prompt follow each other."""
        if row["prompt_id"] != self._last_prompt:
            self._last_prompt = row["prompt_id"]
            self.num_prompts += 1
        self.finish_reasons[row["finish_reason"]] += 1
        self.output_tokens += row["output_tokens"]
        if row["finish_reason"] == "error":
            kind, _, reason = row["error"].partition(": ")
            self.failures.setdefault(kind, FailureKind()).add(row["prompt_id"], row["sample_index"], reason)


@dataclass(slots=True)
class Effort:
    """What this process did: answers and tokens received, failed tries by kind, wall seconds without loading."""

    num_resumed: int = 0
    num_answers: int = 0
    output_tokens: int = 0
    failed_attempts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def per_second(self, count: int) -> float | None:
        """A rate; None if no time has passed."""
        return count / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The end of a run.

    Attributes:
        path: The samples.
        run_id: Identifier in every row.
        tally: Counts over the file.
        effort: What this process did for it.
        num_damaged: Records that were left out because they were torn or altered.
        folder: Where the state of the run is, or was.
        kept: Why the folder is kept; None if it was removed.
    """

    path: Path
    run_id: str
    tally: Tally
    effort: Effort
    num_damaged: int
    folder: Path
    kept: str | None

    @property
    def num_samples(self) -> int:
        """Finished answers."""
        return self.tally.finish_reasons["stop"] + self.tally.finish_reasons["length"]

    @property
    def num_censored(self) -> int:
        """Answers that were cut at max_tokens."""
        return self.tally.finish_reasons["length"]

    @property
    def num_failed(self) -> int:
        """Rows without an answer."""
        return self.tally.finish_reasons["error"]

    def to_json(self) -> dict[str, object]:
        """The summary as it is saved; the manifest's keys stand beside these."""
        effort = self.effort
        return {
            "num_prompts": self.tally.num_prompts,
            "num_samples": self.num_samples,
            "num_censored": self.num_censored,
            "finish_reasons": dict(self.tally.finish_reasons),
            "output_tokens": self.tally.output_tokens,
            "failures": {
                kind: {"count": found.count, "examples": found.examples}
                for kind, found in sorted(self.tally.failures.items())
            },
            "num_damaged_records": self.num_damaged,
            "last_process": {
                "num_resumed": effort.num_resumed,
                "num_answers": effort.num_answers,
                "output_tokens": effort.output_tokens,
                "failed_attempts": dict(sorted(effort.failed_attempts.items())),
                "seconds": round(effort.seconds, 3),
                "answers_per_s": effort.per_second(effort.num_answers),
                "output_tokens_per_s": effort.per_second(effort.output_tokens),
            },
        }

    def lines(self) -> list[str]:
        """The summary for people."""
        tally, effort = self.tally, self.effort
        share = 100 * self.num_censored / self.num_samples if self.num_samples else 0.0
        told = [
            f"{self.path}: {tally.num_prompts} prompts, {self.num_samples} answers, {share:.1f} % of them cut at "
            f"max_tokens, {self.num_failed} failed"
        ]
        for kind, found in sorted(tally.failures.items(), key=lambda item: -item[1].count):
            example = found.examples[0]
            told.append(
                f"failed, {kind}: {found.count}, e.g. prompt {example['prompt_id']} answer "
                f"{example['sample_index']}: {example['reason']}"
            )
        if effort.num_answers:
            answers, tokens = effort.per_second(effort.num_answers), effort.per_second(effort.output_tokens)
            told.append(
                f"this time {effort.num_answers} answers and {effort.output_tokens} tokens in {effort.seconds:.1f} s"
                + (f" ({answers:.1f} answers/s, {tokens:.0f} tokens/s)" if answers and tokens else "")
                + (f"; {effort.num_resumed} answers were there before" if effort.num_resumed else "")
            )
        if self.kept is not None:
            told.append(f"{self.folder} is kept: {self.kept}; remove it to leave it at that")
        return told
