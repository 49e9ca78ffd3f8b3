"""Requests, limits and sides of `deadlines.py`: the mixes of the papers, in the units of the engine that is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.vllm.plan import Ask, asks
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import TraceRequest

#: Tokens per KV block; vLLM's CPU attention prefers multiples of 32.
BLOCK_TOKENS = 32
#: Ids of the tokens of prompts, without the special ones at the start of a vocabulary.
TOKEN_IDS = (100, 32_000)
#: 90 % quantile of the standard normal distribution.
_P90 = NormalDist().inv_cdf(0.9)
#: Number of spikes in the released code of Semantic Scheduling.
SPIKES = 20


@dataclass(frozen=True, slots=True)
class Scale:
    """The papers' tokens and seconds on another engine.

    A step of the linear model takes a fixed time, and a time for each of its tokens. In units of the fixed time, and of the
    number of tokens that take as long as it, all engines of this model are the same. So lengths, token budgets and slots of a
    paper are multiplied with `tokens`, memory with its square (lengths times slots), and times with `seconds`.

    Attributes:
        tokens: Tokens that take as long as the fixed time, as a multiple of those on the paper's engine.
        seconds: Fixed time of a step, as a multiple of that of the paper's engine.
    """

    tokens: float
    seconds: float

    @classmethod
    def of(cls, engine: LinearStepTime, paper: LinearStepTime) -> Scale:
        """From the step times of both engines."""
        sizes = [model.base_s / model.per_prefill_token_s for model in (engine, paper)]
        return cls(sizes[0] / sizes[1], engine.base_s / paper.base_s)

    def num(self, tokens: float) -> int:
        """A number of tokens or slots of the paper, at least 1."""
        return max(1, round(tokens * self.tokens))


@dataclass(frozen=True, slots=True)
class SideConfig:
    """A scheduler.

    Attributes:
        policy, batching: Names, in the simulator and in our scheduler; without `is_plugin`, vLLM does the same.
        is_plugin: Our scheduler in vLLM; otherwise vLLM's own.
        parameters, batching_parameters: Their parameters.
        options: Options of vLLM's server.
        budget: Tokens per step, as a multiple of those of the other sides.
    """

    policy: str = "fcfs"
    batching: str = "chunked_prefill"
    is_plugin: bool = True
    parameters: Mapping[str, float] = field(default_factory=dict)
    batching_parameters: Mapping[str, float] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    budget: int = 1

    def limits(self, limits: SchedulerConfig) -> SchedulerConfig:
        """The engine's limits in the simulator, with this side's batches."""
        return replace(
            limits,
            max_num_batched_tokens=self.budget * limits.max_num_batched_tokens,
            batching=self.batching,
            batching_parameters=dict(self.batching_parameters),
        )

    def settings(self) -> dict[str, Any] | None:
        """Settings of our scheduler in vLLM; None for vLLM's own."""
        if not self.is_plugin:
            return None
        values: dict[str, Any] = {"policy": self.policy, "policy_parameters": dict(self.parameters)}
        if self.batching != "chunked_prefill":
            values |= {"batching": self.batching, "batching_parameters": dict(self.batching_parameters)}
        return values


VLLM = "vllm"
#: vLLM's own scheduler, with which the others are compared.
STOCK = SideConfig(is_plugin=False)


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests with the limits of the engine that serves them, and the sides to compare.

    Attributes:
        rows: Requests without arrivals; the tenant names their class.
        limits: Limits of the engine, for the simulator.
        max_model_len: Longest request in tokens.
        sides: Sides by name, vLLM's own first.
        gap_s: Seconds between two spikes in which all requests arrive; None: arrivals at a load.
    """

    rows: tuple[TraceRequest, ...]
    limits: SchedulerConfig
    max_model_len: int
    sides: Mapping[str, SideConfig]
    gap_s: float | None = None

    def server_options(self, side: str) -> list[str]:
        """Options of vLLM's server; one block of its cache is never used."""
        limits = self.limits
        budget = self.sides[side].budget * limits.max_num_batched_tokens
        words = ["--max-model-len", self.max_model_len]
        words += ["--max-num-batched-tokens", budget]
        words += ["--block-size", BLOCK_TOKENS, "--num-gpu-blocks-override", limits.capacity_blocks + 1]
        return [*map(str, words), *self.sides[side].options]

    def asks(self, repetition: int, rate: float | None, seed: int) -> list[Ask]:
        """The requests of a run, see `plan.asks`: long and short ones are distributed evenly; all at once without a rate."""
        rng = np.random.default_rng([seed, 1])
        prompts = [tuple(rng.integers(*TOKEN_IDS, row.prompt_tokens).tolist()) for row in self.rows]
        work = [row.prompt_tokens + row.output_tokens for row in self.rows]
        drawn = asks([row.request_id for row in self.rows], repetition, rate, 1, seed, work)
        if rate is not None and self.gap_s is not None:
            drawn = spikes(drawn, self.gap_s, np.random.default_rng([seed, 2, repetition]))
        return [
            replace(
                ask,
                prompt=prompts[number],
                max_tokens=self.rows[number].max_tokens,
                hints=hints(self.rows[number]),
            )
            for ask, number in ((ask, int(ask.request_id[1:])) for ask in drawn)
        ]


def hints(row: TraceRequest) -> dict[str, Any]:
    """What a client of our scheduler declares of its request."""
    values: dict[str, Any] = {"tailcast_tier": row.tier, "tailcast_tenant": row.tenant}
    return values if row.tbt_slo_s is None else values | {"tailcast_tbt_slo_s": row.tbt_slo_s}


def spikes(drawn: Sequence[Ask], gap_s: float, rng: np.random.Generator) -> list[Ask]:
    """The same requests in the same order, in `SPIKES` spikes of random sizes, `gap_s` apart."""
    bounds = np.sort(rng.integers(0, len(drawn) + 1, SPIKES - 1))
    number = np.searchsorted(bounds, np.arange(len(drawn)), side="right")
    return [replace(ask, at_s=gap_s * int(spike)) for ask, spike in zip(drawn, number, strict=True)]


def log_normal(num: int, median: float, p90: float, scale: float, rng: np.random.Generator) -> list[int]:
    """Token counts at equidistant quantiles of a log-normal distribution, in random order, times `scale`."""
    sigma = math.log(p90 / median) / _P90
    levels = (np.arange(num) + 0.5) / num
    tokens = [scale * median * math.exp(sigma * NormalDist().inv_cdf(float(level))) for level in levels]
    return [max(1, round(value)) for value in rng.permutation(tokens).tolist()]


def sample_evenly(num: int, marked: int, rank: Sequence[int], rng: np.random.Generator) -> set[int]:
    """`marked` of `num` indices, one in each of as many equal parts of the order of `rank`."""
    order = np.argsort(rank, kind="stable")
    parts = np.array_split(order, marked) if marked else []
    return {int(rng.choice(part)) for part in parts}


def requests(
    prompts: Sequence[int],
    outputs: Sequence[int],
    longest: int,
    classes: Callable[[int], Mapping[str, Any]],
) -> tuple[TraceRequest, ...]:
    """Requests with at most `longest` tokens each; `classes`: fields of the request with a number."""
    rows = []
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        output = min(output, longest - 1)
        rows.append(
            TraceRequest(
                request_id=f"q{number}",
                arrival_s=0.0,
                prompt_tokens=min(prompt, longest - output),
                output_tokens=output,
                max_tokens=output,
                **classes(number),
            )
        )
    return tuple(rows)


def deadlines(num: int, engine: LinearStepTime, seed: int) -> Mix:
    """SLAI, section 7: lengths of openchat_shareGPT4, 5 % of the requests with a limit of 0.1 s between tokens, 0.5 s for the
    others; 512 tokens per step, 128 slots and memory for 219,000 tokens of Mistral-7B on an RTX 6000 Ada.

    Prompts, outputs and memory are half of the paper's: with twice as many requests per second the steps are the same, and a
    run has twice as many requests."""
    scale, rng = Scale.of(engine, LinearStepTime()), np.random.default_rng([seed, 0])
    shorter = scale.tokens / 2
    prompts, outputs = log_normal(num, 1730, 5696, shorter, rng), log_normal(num, 415, 834, shorter, rng)
    paying = sample_evenly(num, max(1, round(0.05 * num)), prompts, rng)
    longest = scale.num(8192 / 2)

    def of_class(number: int) -> dict[str, Any]:
        tenant, limit = ("paying", 0.1) if number in paying else ("free", 0.5)
        return {"tenant": tenant, "tier": int(tenant == "free"), "tbt_slo_s": round(limit * scale.seconds, 3)}

    threshold = round(0.04 * longest)  # vLLM's value for several partial prompts at once
    slots, budget = scale.num(128), scale.num(512)
    limits = _limits(slots, max(budget, slots), 219_000 / 2 * scale.tokens**2, longest)
    sides = {
        VLLM: STOCK,
        "vllm_threshold": SideConfig(
            is_plugin=False,
            batching=LONG_PREFILL,
            batching_parameters={"threshold": threshold},
            options=("--long-prefill-token-threshold", str(threshold)),
        ),
        "vllm_twice": SideConfig(is_plugin=False, budget=2),
        "spf": SideConfig("spf"),
        "slai": SideConfig("spf", "slai", batching_parameters={"max_decodes": slots}),
        "slai_fitted": SideConfig(
            "spf",
            "slai",
            batching_parameters={"max_decodes": slots, "fitted": True, "delta_low": 2.0, "delta_high": 3.0},
        ),
    }
    return Mix(requests(prompts, outputs, longest, of_class), limits, longest, sides)


def reasoning(num: int, engine: LinearStepTime, seed: int) -> Mix:
    """UniBoost, table 2: 70 % short questions with long light-tailed outputs (median 4,000, P90 6,000), 30 % conversations of
    Azure; 1,024 tokens per step, 256 slots, and memory for 11 requests of mean size (5 GB), so that requests wait for memory.

    Outputs are a twentieth of the paper's, so that the longest take a small part of a run; memory is in proportion."""
    paper = LinearStepTime(
        base_s=8e-3, per_prefill_token_s=5e-5, per_decode_s=5e-5
    )  # Llama-3-8B on an A100, data sheets
    scale, rng = Scale.of(engine, paper), np.random.default_rng([seed, 0])
    num_long = round(0.7 * num)
    shorter, rest = 1 / 20, num - num_long
    prompts = log_normal(num_long, 120, 400, scale.tokens, rng) + log_normal(
        rest, 928, 2050, scale.tokens, rng
    )
    outputs = log_normal(num_long, 4000, 6000, shorter, rng) + log_normal(rest, 129, 420, scale.tokens, rng)
    longest = max(map(sum, zip(prompts, outputs, strict=True)))
    rows = requests(
        prompts, outputs, longest, lambda number: {"tenant": "reasoning" if number < num_long else "chat"}
    )
    slots, budget = scale.num(256), scale.num(1024)
    limits = _limits(slots, max(budget, slots), 11 * (sum(prompts) + sum(outputs)) / num, longest)
    return Mix(rows, limits, longest, {VLLM: STOCK, "uniboost": SideConfig("uniboost", "uniboost")})


def levels(num: int, engine: LinearStepTime, seed: int) -> Mix:
    """Semantic Scheduling, section 4.1 and its released code: five levels, prompts and outputs of up to 499 tokens, 16 slots;
    Qwen1.5-4B on an A100. Levels are declared, and lengths known by `max_tokens`."""
    paper = LinearStepTime(base_s=1.195828e-2, per_prefill_token_s=1.0515576e-4)
    scale, rng = Scale.of(engine, paper), np.random.default_rng([seed, 0])
    lengths = [1 + math.floor(499 * (number + 0.5) / num) for number in range(num)]
    prompts, outputs = ([scale.num(tokens) for tokens in rng.permutation(lengths).tolist()] for _ in range(2))
    level = rng.permutation([number % 5 for number in range(num)]).tolist()
    longest = scale.num(499) * 2
    rows = requests(
        prompts, outputs, longest, lambda number: {"tenant": f"level {level[number]}", "tier": level[number]}
    )
    limits = _limits(16, 16 * scale.num(499), 37_748 * scale.tokens, longest)
    sides = {
        VLLM: STOCK,
        "semantic": SideConfig("semantic"),
        "stage_aware": SideConfig("semantic", "stage_aware"),
    }
    return Mix(rows, limits, longest, sides, gap_s=0.1 * scale.seconds)


#: vLLM's batches with `--long-prefill-token-threshold`; see `outcomes.LongPrefill`.
LONG_PREFILL = "long_prefill"
MIXES: dict[str, Callable[[int, LinearStepTime, int], Mix]] = {
    "deadlines": deadlines,
    "reasoning": reasoning,
    "levels": levels,
}


def _limits(slots: int, budget: int, kv_tokens: float, longest: int) -> SchedulerConfig:
    """Limits of vLLM without its prefix cache: it keeps no blocks free at admission."""
    return SchedulerConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        num_kv_blocks=math.ceil(max(kv_tokens, longest) / BLOCK_TOKENS),
        kv_block_tokens=BLOCK_TOKENS,
        kv_watermark=0.0,
        prefix_caching=False,
    )
