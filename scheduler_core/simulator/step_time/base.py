"""Step times of the engine: the interface of all models, the linear model, and runs of steps.

The end of the k-th step of a run only depends on the start and on k, so that individual and combined steps
have bit-identical times.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.errors import InputError
from scheduler_core.ranges import check_ranges

#: Minimum duration of a step in seconds, because of the resolution of the simulated clock, a float.
MIN_STEP_S = 1e-9
#: Maximum duration of each part of a step in seconds, to keep that resolution.
MAX_STEP_S = 3600.0


class DecodeContexts(Sequence[int]):
    """Lazy sequence of the contexts of `num` decoding requests with the sum `total`; `read` computes them when needed.

    Valid until the next step of the requests.
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
    """Work of one step: chunks of prompts, contexts of the decoding requests (cached tokens before the step),
    and the number of tokens copied between the KV cache and host memory."""

    prefills: Sequence[PrefillChunk] = ()
    contexts: Sequence[int] = ()
    num_swapped_tokens: int = 0

    @property
    def num_prefill_tokens(self) -> int:
        """Number of processed prompt tokens."""
        return sum([chunk.num_tokens for chunk in self.prefills])

    @property
    def num_tokens(self) -> int:
        """Number of processed tokens: prompt tokens, and one per decode."""
        return self.num_prefill_tokens + len(self.contexts)

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens read from the KV cache, for prompts and decodes together."""
        return sum([chunk.start_token for chunk in self.prefills]) + total_of(self.contexts)


class StepGroup(NamedTuple):
    """`num_steps` > 0 consecutive steps; the first takes `first_s`, each next one `growth_s` >= 0 longer."""

    first_s: float
    growth_s: float
    num_steps: int

    @property
    def longest_s(self) -> float:
        """Duration of the last step, which is the longest."""
        return self.first_s + self.growth_s * (self.num_steps - 1)

    @property
    def total_s(self) -> float:
        """Sum of the durations."""
        return self.num_steps * (self.first_s + self.growth_s * (self.num_steps - 1) / 2)


StepGroups = Sequence[StepGroup]


class EngineDelays(NamedTuple):
    """What a request waits for beside the steps that it is in.

    Attributes:
        frontend_s: Time outside the engine, such as for HTTP and tokenization.
        plans_ahead: The next step is already planned when one starts, so that a request that arrives during a step is in
            none of the two.
    """

    frontend_s: float = 0.0
    plans_ahead: bool = False


def delays_of(step_time: object) -> EngineDelays:
    """The delays of the engine with these step times; none if the model does not know them."""
    delays = getattr(step_time, "delays", None)
    return delays if isinstance(delays, EngineDelays) else EngineDelays()


class DecodeRun(ABC):
    """A run of decode steps that starts at `start_s`; the caller counts completed steps in `num_done`."""

    __slots__ = ("_start_s", "num_done")

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self.num_done = 0

    @abstractmethod
    def elapsed_s(self, num_steps: int) -> float:
        """Seconds from the start to the end of step `num_steps`, counted from 1; strictly increasing."""

    def at(self, num_steps: int) -> float:
        """End of step number `num_steps`, counted from 1."""
        return self._start_s + self.elapsed_s(num_steps)

    def end_s(self, more_steps: int) -> float:
        """End of the run after `more_steps` further steps."""
        return self._start_s + self.elapsed_s(self.num_done + more_steps)

    def steps_to_reach(self, time_s: float, limit: int) -> int:
        """Minimum number of further steps that end at or after `time_s`, from 1 to `limit`."""
        steps = min(self._guess(time_s, limit), limit)
        while steps < limit and self.end_s(steps) < time_s:
            steps += 1
        while steps > 1 and self.end_s(steps - 1) >= time_s:
            steps -= 1
        return steps

    @abstractmethod
    def steps(self, first: int, num_steps: int) -> StepGroups:
        """Durations of `num_steps` steps from number `first` on, counted from 0."""

    @abstractmethod
    def _guess(self, time_s: float, limit: int) -> int:
        """`steps_to_reach` up to rounding errors, at least 1; computes no steps beyond `limit`."""


class PolynomialRun(DecodeRun):
    """Run whose steps take `growth_s` longer than the previous one: k first_s + growth_s k (k-1) / 2."""

    __slots__ = ("_first_s", "_growth_s")

    def __init__(self, start_s: float, first_s: float, growth_s: float) -> None:
        super().__init__(start_s)
        self._first_s = first_s
        self._growth_s = growth_s

    def elapsed_s(self, num_steps: int) -> float:
        return num_steps * self._first_s + self._growth_s * (num_steps * (num_steps - 1) // 2)

    def steps(self, first: int, num_steps: int) -> StepGroups:
        if not num_steps:
            return ()
        return (StepGroup(self._first_s + first * self._growth_s, self._growth_s, num_steps),)

    def _guess(self, time_s: float, limit: int) -> int:
        half = self._growth_s / 2
        linear = self._first_s - half
        elapsed = max(time_s - self._start_s, 0.0)
        root = linear + math.sqrt(linear * linear + 4 * half * elapsed)
        return max(1, math.ceil(2 * elapsed / root) - self.num_done) if root > 0 else 1


class PiecewiseRun(DecodeRun):
    """Run of segments with identical steps; `segment` maps the number of a step (from 0) to its duration and
    to the number of the first later step with a different duration."""

    __slots__ = ("_before_s", "_each_s", "_end", "_firsts", "_segment")

    def __init__(self, start_s: float, segment: Callable[[int], tuple[float, int]]) -> None:
        super().__init__(start_s)
        self._segment = segment
        #: For each segment: number of its first step, seconds before that step, duration of each step.
        self._firsts: list[int] = []
        self._before_s: list[float] = []
        self._each_s: list[float] = []
        #: Steps in these segments.
        self._end = 0

    def elapsed_s(self, num_steps: int) -> float:
        while self._end < num_steps:
            self._extend()
        index = bisect_right(self._firsts, num_steps - 1) - 1
        return self._before_s[index] + (num_steps - self._firsts[index]) * self._each_s[index]

    def steps(self, first: int, num_steps: int) -> StepGroups:
        last = first + num_steps
        while self._end < last:
            self._extend()
        groups = []
        index = bisect_right(self._firsts, first) - 1
        while first < last:
            end = self._firsts[index + 1] if index + 1 < len(self._firsts) else self._end
            groups.append(StepGroup(self._each_s[index], 0.0, min(end, last) - first))
            first, index = end, index + 1
        return groups

    def _guess(self, time_s: float, limit: int) -> int:
        elapsed = time_s - self._start_s
        last = self.num_done + limit
        while self._end < last and (not self._end or self.elapsed_s(self._end) < elapsed):
            self._extend()
        index = max(bisect_right(self._before_s, elapsed) - 1, 0)
        steps = self._firsts[index] + math.ceil((elapsed - self._before_s[index]) / self._each_s[index])
        return max(1, steps - self.num_done)

    def _extend(self) -> None:
        first = self._end
        self._before_s.append(self.elapsed_s(first) if first else 0.0)
        each_s, self._end = self._segment(first)
        self._firsts.append(first)
        self._each_s.append(each_s)


class StepTime(Protocol):
    """Model of the engine's step times. Sizes outside its range are an `InputError`, never clamped."""

    def step_s(self, work: StepWork) -> float:
        """Duration of a step in seconds, > 0."""
        ...

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """Consecutive steps, starting at `start_s`, in which only these requests generate one token each.
        `contexts` are those before the first step, and only valid during the call."""
        ...


@runtime_checkable
class SeparableStepTime(StepTime, Protocol):
    """A model whose steps take a time for their tokens, and one for the attention of each of their requests."""

    def least_s(self, num_steps: float, prefill_tokens: float, decodes: float) -> float:
        """Lower bound of the time of `num_steps` or more steps with these tokens in total, without attention: the value of a
        convex function for the mean step, or less, times the number of steps (Jensen); non-decreasing in all arguments."""
        ...

    def least_attention_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Minimum of the attention time of a request over all ways to split its prompt, with `output_tokens` - 1 decodes."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinearStepTime:
    """t = base_s + per_prefill_token_s * P + per_decode_s * D + per_context_token_s * C + per_swapped_token_s * S.

    P prefill tokens, D decoding requests, C tokens read from the KV cache, S tokens copied between the KV cache and
    the host. The defaults are for a 7B model on one 48 GB GPU: base and per-token times are a least-squares line
    through the chunk timings published with SLAI for Mistral-7B on an RTX 6000 Ada (64 to 1024 tokens: 22.7 to 74.7
    ms; agrimUT/SLAI @ 5098a7a); the context term is Mistral-7B's 128 KiB of keys and values per token (32 layers, 8
    heads of 128, fp16) at 960 GB/s; the swap term is the same 128 KiB at 25 GB/s, which PCIe 4.0 x16 reaches.
    """

    base_s: float = 0.01716
    """Seconds per step."""
    per_prefill_token_s: float = 5.47e-5
    """Seconds per processed prompt token."""
    per_decode_s: float = 5.47e-5
    """Seconds per request that generates a token."""
    per_context_token_s: float = 1.37e-7
    """Seconds per token read from the KV cache."""
    per_swapped_token_s: float = 5.24e-6
    """Seconds per token copied between the KV cache and host memory; the step waits for it."""
    frontend_s: float = 0.0
    """Seconds of each request outside the engine: HTTP, tokenization, first token to the client."""
    async_scheduling: bool = False
    """The engine plans a step while the one before it runs, so that a new request waits for a whole step more (vLLM on GPUs)."""

    @property
    def delays(self) -> EngineDelays:
        """What requests wait for beside the steps that they are in."""
        return EngineDelays(self.frontend_s, self.async_scheduling)

    def __post_init__(self) -> None:
        check_ranges(self, **{item.name: (0, MAX_STEP_S) for item in fields(self)})
        if self.base_s + min(self.per_prefill_token_s, self.per_decode_s) < MIN_STEP_S:
            allowed = f"seconds >= {MIN_STEP_S:g}, unless the time per token is at least that"
            raise InputError("base_s", self.base_s, allowed)

    def step_s(self, work: StepWork) -> float:
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

    def least_s(self, num_steps: float, prefill_tokens: float, decodes: float) -> float:
        """See `SeparableStepTime`."""
        tokens_s = self.per_prefill_token_s * prefill_tokens + self.per_decode_s * decodes
        return self.base_s * num_steps + tokens_s

    def least_attention_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Nothing for the prompt in one chunk, and the context of each decode."""
        decodes = output_tokens - 1
        return self.per_context_token_s * decodes * (prompt_tokens + (decodes - 1) / 2)
