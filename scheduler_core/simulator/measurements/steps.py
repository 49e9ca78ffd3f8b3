"""Measured steps of an engine: the record, the region that they cover, and the points that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.shell.json_text import read_json_object
from scheduler_core.simulator.step_time.base import StepWork

#: A value is covered if so many steps reach it.
MIN_STEPS = 5
#: A simulation leaves the region if it exceeds its bounds by more than this factor.
TOLERANCE = 1.25


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Mean of `weight` steps of an engine.

    Attributes:
        duration_s: Seconds per step.
        decodes: Requests per step that generate a token.
        context_tokens: Tokens in the KV cache of all these requests together.
        prefill_tokens: Processed prompt tokens per step.
        prefills: Prompts per step; below 1 the fraction of the steps that have one.
        cached_tokens: Tokens in the KV cache before the processed tokens of these prompts.
        weight: Number of steps.
    """

    duration_s: float
    decodes: float
    context_tokens: float = 0.0
    prefill_tokens: float = 0.0
    prefills: float = 0.0
    cached_tokens: float = 0.0
    weight: float = 1.0

    @property
    def linear_work(self) -> tuple[float, float, float]:
        """Prompt tokens, decodes, and all cached tokens per step."""
        return self.prefill_tokens, self.decodes, self.context_tokens + self.cached_tokens

    def works(self) -> Iterator[tuple[float, StepWork]]:
        """Kinds of steps with their fraction of the steps: with and without prompts, with integer numbers of decodes."""
        low = int(self.decodes)
        rest, with_prompt = self.decodes - low, min(1.0, self.prefills)
        chunks: Sequence[PrefillChunk] = ()
        if with_prompt:
            num = max(1, round(self.prefills))
            tokens = _parts(self.prefill_tokens / with_prompt, num)
            before = _parts(self.cached_tokens / with_prompt, num)
            pairs = zip(before, tokens, strict=True)
            chunks = [PrefillChunk("", start, count, True) for start, count in pairs]
        for num, fraction in ((low, 1 - rest), (low + 1, rest)):
            contexts = _parts(self.context_tokens * num / self.decodes, num) if num and self.decodes else []
            if fraction * with_prompt > 0:
                yield fraction * with_prompt, StepWork(chunks, contexts)
            if fraction * (1 - with_prompt) > 0:
                yield fraction * (1 - with_prompt), StepWork((), contexts)

    def expected_s(self, step_s: Callable[[StepWork], float]) -> float:
        """Mean duration of these steps by a model."""
        return sum([fraction * step_s(work) for fraction, work in self.works()])


def _parts(total: float, num: int) -> list[int]:
    """`total` as the sum of `num` almost equal integers."""
    each, rest = divmod(round(total), num)
    return [each + (index < rest) for index in range(num)]


@dataclass(frozen=True, slots=True)
class Region:
    """Ranges (minimum, maximum) of what the measured steps contain; `prefill_tokens` of those with a prompt."""

    decodes: tuple[float, float]
    context_tokens: tuple[float, float]
    prefill_tokens: tuple[float, float]

    @classmethod
    def of(cls, measurements: Sequence[StepMeasurement]) -> Region:
        """The region of some measurements; its ends are values that `MIN_STEPS` steps reach."""
        prompts = [one for one in measurements if one.prefills > 0]
        return cls(
            _range([(one.decodes, one.weight) for one in measurements]),
            _range([(one.context_tokens + one.cached_tokens, one.weight) for one in measurements]),
            _range(
                [(one.prefill_tokens / min(1.0, one.prefills), one.weight * one.prefills) for one in prompts]
            ),
        )

    @classmethod
    def of_file(cls, path: str) -> Region | None:
        """The region in a result of `simulate calibrate`; None for one without."""
        ranges = read_json_object(Path(path), "step_time_parameters").get("region")
        if ranges is None:
            return None
        try:
            return cls(**{name: (float(low), float(high)) for name, (low, high) in ranges.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(f"{path}: region", ranges, "ranges as simulate calibrate writes them") from error

    def to_json(self) -> dict[str, list[float]]:
        return {name: list(ends) for name, ends in asdict(self).items()}

    def exceeded(self, largest: Mapping[str, float]) -> str | None:
        """A sentence about the largest values, by field, that are beyond the region; None if none are."""
        parts = []
        for name, value in largest.items():
            high = getattr(self, name)[1]
            if value > TOLERANCE * high + 1:
                parts.append(f"{value:,.0f} {NOUNS[name]} in a step (measured: up to {high:,.0f})")
        return None if not parts else f"the step times are extrapolated to {', '.join(parts)}"


NOUNS = {"decodes": "requests", "context_tokens": "cached tokens", "prefill_tokens": "prompt tokens"}


def _range(values: list[tuple[float, float]]) -> tuple[float, float]:
    """The smallest and largest values that steps with a total weight of `MIN_STEPS`, or all of them, reach."""
    if not values:
        return 0.0, 0.0
    table = np.array(sorted(values))
    needed = min(float(MIN_STEPS), float(table[:, 1].sum()) * (1 - 1e-9))
    low = int(np.searchsorted(np.cumsum(table[:, 1]), needed))
    high = int(np.searchsorted(np.cumsum(table[::-1, 1]), needed))
    ends = table[min(low, len(table) - 1), 0], table[::-1][min(high, len(table) - 1), 0]
    return float(min(ends)), float(max(ends))


def missing_points(region: Region, limits: SchedulerConfig, kv_tokens: int | None = None) -> dict[str, str]:
    """What should be measured too, as sentences with a command by kind, for an engine with these limits; `kv_tokens` is the
    size of its KV cache, if it is known."""
    missing = {}
    slots, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    if region.decodes[1] < slots / 2:
        missing["batch"] = (
            f"no step with more than {region.decodes[1]:,.0f} requests (max_num_seqs {slots}): "
            + _bench(slots, 4 * slots, 128, 256)
        )
    elif region.decodes[0] > slots / 4:
        missing["batch"] = f"no step with fewer than {region.decodes[0]:,.0f} requests: " + _bench(
            1, 20, 128, 128
        )
    memory = limits.capacity_blocks * limits.kv_block_tokens if kv_tokens is None else kv_tokens
    if region.context_tokens[1] < memory / 4:
        num = max(1, min(slots, 32))
        length = max(128, memory // (2 * num))
        missing["context"] = (
            f"no step with more than {region.context_tokens[1]:,.0f} cached tokens (KV cache: {memory:,}): "
            + _bench(num, 2 * num, length, 128)
        )
    if region.prefill_tokens[1] < budget / 2:
        missing["prefill"] = (
            f"no step with more than {region.prefill_tokens[1]:,.0f} prompt tokens (max_num_batched_tokens {budget}): "
            + _bench(4, 32, budget, 16)
        )
    return missing


def _bench(concurrency: int, num_prompts: int, input_tokens: int, output_tokens: int) -> str:
    return (
        f"`vllm bench serve --dataset-name random --random-input-len {input_tokens} --random-output-len {output_tokens} "
        f"--max-concurrency {concurrency} --num-prompts {num_prompts} --save-result --save-detailed`"
    )


def step_of_log(row: Sequence[float]) -> StepMeasurement:
    """The measurement in a row of a step log: end, seconds, prompt tokens, decodes, context tokens, new tokens, and
    optionally seconds of scheduling and tokens before the prompts' chunks."""
    _, seconds, prefill, decodes, context, new, *others = row
    cached = others[1] if len(others) > 1 else 0.0
    prefills = max(1.0, new - decodes) if prefill else 0.0
    return StepMeasurement(seconds, decodes, context, prefill, prefills, cached if prefill else 0.0)


def step_of_table(row: Mapping[str, Any]) -> StepMeasurement:
    """The measurement in a row of the table `--steps` of `simulate run`."""
    num, decodes = row["num_steps"], row["num_decodes"]
    # The number of cached tokens is that of the first of the equal steps.
    context = row["num_context_tokens"] + decodes * (num - 1) / 2
    prefills = row["num_prefills"]
    cached = 0.0 if decodes else context
    return StepMeasurement(
        row["step_s"], decodes, context - cached, row["num_prefill_tokens"], prefills, cached, num
    )
