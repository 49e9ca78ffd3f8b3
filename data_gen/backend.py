"""What a sampling engine looks like to a run: it is given missing answers and yields finished ones, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from data_gen.prompts import Prompt

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How answers are drawn; the units are the served model's own tokens."""

    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and the sample indices that are still missing, in increasing order, at least one."""

    prompt: Prompt
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer.

    Attributes:
        sample_index: Which of the prompt's repeats it is, from 0.
        output_tokens: Its length with the end marker, at least 1.
        finish_reason: "stop", or "length" if it was cut at max_tokens.
        text: The decoded answer.
        queue_s: Seconds from the request's being ready until the engine took it; None if unknown.
        ttft_s: Seconds from sending the request to the first token; None if unknown.
        total_s: Seconds from sending the request to the last token; None if unknown.
    """

    sample_index: int
    output_tokens: int
    finish_reason: FinishReason
    text: str = ""
    queue_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that the engine did not give, after its own retries.

    Attributes:
        sample_index: Which of the prompt's repeats it is, from 0.
        reason: One line for people.
        kind: A short stable word that failures are counted by: timeout, http_429, http_500, malformed, refused,
            too_long, ...
    """

    sample_index: int
    reason: str
    kind: str


@dataclass(frozen=True, slots=True)
class WorkResult:
    """What came of some or all indices of a `Work`; `prompt_tokens` is None if the engine does not say."""

    prompt: Prompt
    prompt_tokens: int | None
    answers: tuple[Answer, ...] = ()
    failures: tuple[Failure, ...] = ()


class Backend(Protocol):
    """A sampling engine; its name, version and served model are recorded with every answer."""

    @property
    def name(self) -> str:
        """Name of the engine."""
        ...

    @property
    def version(self) -> str:
        """Version of the engine; may be "" until the first result is there, if only the engine can tell."""
        ...

    @property
    def served_model(self) -> str:
        """Name of the model that answers."""
        ...

    @property
    def seeded(self) -> bool:
        """Whether the same (settings, prompt id, sample index) gives the same answer.

        Up to floating-point differences between batch shapes, where the engine computes in batches.
        """
        ...

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Iterator[WorkResult]:
        """Answers `work`, in any order; every index of every `Work` comes back exactly once.

        The indices of one `Work` may be spread over several results. `work` is consumed lazily, with a look-ahead
        that does not grow with its length. Closing the iterator stops everything that is in flight; a second
        iterator may be asked for afterwards.
        """
        ...

    def close(self) -> None:
        """Frees what the engine holds; it is not used afterwards."""
        ...
