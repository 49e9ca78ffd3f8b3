"""Interface of sampling engines, which take requests for missing samples and yield results in any order."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from data_gen.prompts import Prompt

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings; lengths are in tokens of the served model."""

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
class SampledOutput:
    """One finished output; its fields are columns of `data_gen.samples`."""

    sample_index: int
    output_tokens: int
    finish_reason: FinishReason
    text: str = ""
    queue_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A sample that the engine failed to return, after its internal retries."""

    sample_index: int
    reason: str  # human-readable, one line
    kind: str  # short, stable identifier for counts: timeout, http_429, malformed, too_long, ...


@dataclass(frozen=True, slots=True)
class WorkResult:
    """Results of some or all indices of a `Work`; `prompt_tokens` is None if the engine does not report it."""

    prompt: Prompt
    prompt_tokens: int | None
    outputs: tuple[SampledOutput, ...] = ()
    failures: tuple[SampleFailure, ...] = ()


class Backend(Protocol):
    """A sampling engine; its name, version and served model are recorded with every sample."""

    @property
    def name(self) -> str:
        """Name of the engine."""

    @property
    def version(self) -> str:
        """Version of the engine; may be "" until the first result, if it is not known earlier."""

    @property
    def served_model(self) -> str:
        """Name of the served model."""

    @property
    def seeded(self) -> bool:
        """Whether the output is determined by (settings, prompt id, sample index).

        Batched engines may deviate by floating-point differences between batch shapes.
        """

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Generator[WorkResult, None, None]:
        """Samples `work`, in any order; every index of every `Work` is returned exactly once.

        The indices of one `Work` may be spread over several results. `work` is consumed lazily, with a bounded
        look-ahead. Closing the iterator cancels all samples in flight; another iterator may be requested afterwards.
        """

    def close(self) -> None:
        """Releases the resources of the engine, which must not be used afterwards."""


def uniforms(seed: int, prompt_id: str, sample_index: int, count: int) -> NDArray[np.float64]:
    """Uniform random numbers in [0, 1) to sample the tokens of one output; shape [count].

    They depend only on the arguments, so an output is independent of its batch and a run can be resumed.
    """
    key = np.frombuffer(_digest(seed, prompt_id, sample_index)[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def sample_seed(seed: int, prompt_id: str, sample_index: int) -> int:
    """Seed of a request for one output, from 0 to 2**31 - 1."""
    return int.from_bytes(_digest(seed, prompt_id, sample_index)[:4], "big") >> 1


def _digest(seed: int, prompt_id: str, sample_index: int) -> bytes:
    return hashlib.sha256(f"{seed}\x00{prompt_id}\x00{sample_index}".encode()).digest()
