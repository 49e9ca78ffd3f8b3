"""What a sampling engine looks like to the generator: it is asked for whole prompts and yields finished answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from data_gen.prompts import Prompt


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How answers are drawn; the units are the served model's own tokens."""

    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer: `finish_reason` is "stop" or "length", `text` the decoded answer."""

    sample_index: int
    output_tokens: int
    finish_reason: str
    text: str


@dataclass(frozen=True, slots=True)
class PromptResult:
    """All answers to one prompt, ordered by sample index, or the reason why there are none."""

    prompt: Prompt
    prompt_tokens: int
    answers: tuple[Answer, ...]
    error: str = ""


class Backend(Protocol):
    """A sampling engine; its name, version and served model are recorded with every sample."""

    @property
    def name(self) -> str:
        """Name of the engine."""
        ...

    @property
    def version(self) -> str:
        """Version of the engine."""
        ...

    @property
    def served_model(self) -> str:
        """Name of the model that answers."""
        ...

    def sample(self, prompts: Iterable[Prompt], settings: SamplingSettings) -> Iterator[PromptResult]:
        """Yields one result per prompt as soon as all its answers are finished, in any order.

        An answer depends only on (model, settings, prompt id, sample index), up to floating-point differences
        between batch shapes; so an interrupted run can be resumed in another batch composition.
        """
        ...
