"""How long one step of the engine takes: the interface of every model, and the linear one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from scheduler_core.errors import InputError
from scheduler_core.plan import PrefillChunk
from scheduler_core.ranges import check_ranges
from scheduler_core.simulator.step_time.decode_run import DecodeRun, PolynomialRun

#: Shortest step in seconds: a shorter one is lost when it is added to the simulated clock.
MIN_STEP_S = 1e-9
#: Longest time of a step's part, in seconds: with longer ones the simulated clock, a float, has no resolution left.
MAX_STEP_S = 3600.0


class DecodeContexts(Sequence[int]):
    """Contexts of `num` decoding requests, of the sum `total`; `read` computes them all when they are needed.

    Valid until the requests take their next step.
    """

    __slots__ = ("_num", "_read", "total")

    def __init__(self, num: int, total: int, read: Callable[[], Sequence[int]]) -> None:
        self._num = num
        self._read = read
        self.total = total

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._read())


def total_of(contexts: Sequence[int]) -> int:
    """Sum of the contexts."""
    return contexts.total if isinstance(contexts, DecodeContexts) else sum(contexts)


@dataclass(slots=True)
class StepWork:
    """The work of one step: chunks of prompts, the tokens in the KV cache before the step of every request that generates a
    token (`contexts`), and tokens copied between the KV cache and the host's memory."""

    prefills: Sequence[PrefillChunk] = ()
    contexts: Sequence[int] = ()
    num_swapped_tokens: int = 0

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens processed."""
        return sum([chunk.num_tokens for chunk in self.prefills])

    @property
    def num_tokens(self) -> int:
        """Tokens processed: those of the prompts and one per decode."""
        return self.num_prefill_tokens + len(self.contexts)

    @property
    def num_context_tokens(self) -> int:
        """Tokens read from the KV cache, for prompts and decodes together."""
        return sum([chunk.start_token for chunk in self.prefills]) + total_of(self.contexts)


class StepTime(Protocol):
    """A model of the engine's speed. It never clamps: sizes beyond its range are an `InputError`."""

    def step_s(self, work: StepWork) -> float:
        """Duration of a step in seconds, > 0."""
        ...

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """Consecutive steps from `start_s` on in which the same requests generate one token each, and nothing else is done;
        `contexts` are as of before the first step, and valid during the call alone."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinearStepTime:
    """t = base_s + per_prefill_token_s * P + per_decode_s * D + per_context_token_s * C + per_swapped_token_s * S.

    P prefill tokens, D decoding requests, C tokens read from the KV cache, S tokens copied between the KV cache and the
    host. The defaults stand for a 7B model on one 48 GB GPU: base and per-token times are the least-squares line through
    the chunk timings that SLAI ships for Mistral-7B on an RTX 6000 Ada (64 to 1024 tokens: 22.7 to 74.7 ms; agrimUT/SLAI @
    5098a7a); the context term is Mistral-7B's 128 KiB of keys and values per token (32 layers, 8 heads of 128, fp16) over
    960 GB/s; the swap term is the same 128 KiB over the 25 GB/s that PCIe 4.0 x16 reaches.
    """

    base_s: float = 0.01716
    """Seconds every step takes."""
    per_prefill_token_s: float = 5.47e-5
    """Seconds per prompt token processed."""
    per_decode_s: float = 5.47e-5
    """Seconds per request that generates a token."""
    per_context_token_s: float = 1.37e-7
    """Seconds per token read from the KV cache."""
    per_swapped_token_s: float = 5.24e-6
    """Seconds per token copied between the KV cache and the host's memory; the step waits for it."""

    def __post_init__(self) -> None:
        check_ranges(self, **{item.name: (0, MAX_STEP_S) for item in fields(self)})
        if self.base_s + min(self.per_prefill_token_s, self.per_decode_s) < MIN_STEP_S:
            raise InputError(
                "base_s", self.base_s, f"seconds >= {MIN_STEP_S:g}, if the time per token is less"
            )

    def step_s(self, work: StepWork) -> float:
        """See `StepTime`."""
        return (
            self.base_s
            + self.per_prefill_token_s * work.num_prefill_tokens
            + self.per_decode_s * len(work.contexts)
            + self.per_context_token_s * work.num_context_tokens
            + self.per_swapped_token_s * work.num_swapped_tokens
        )

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """k steps take k (base + D per_decode + C per_context) + D per_context k (k-1) / 2."""
        num = len(contexts)
        first = self.base_s + self.per_decode_s * num + self.per_context_token_s * total_of(contexts)
        return PolynomialRun(start_s, first, self.per_context_token_s * num)
