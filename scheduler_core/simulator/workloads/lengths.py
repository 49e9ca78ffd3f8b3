"""How long prompts and answers are: simple laws, or rows of a trace or of fitted distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.simulator.trace import MAX_TOKENS

IntArray = NDArray[np.int64]

#: The law zipf has a table with the probability of each value.
MAX_ZIPF_VALUES = 10_000_000

LAWS = ("fixed", "uniform", "zipf", "log_t", "buckets")


@dataclass(frozen=True, kw_only=True)
class Law:
    """Distribution of a number of tokens, always an integer from `low` to `high`.

    Raises:
        InputError: A value is outside its range.
    """

    law: Literal["fixed", "uniform", "zipf", "log_t", "buckets"] = "uniform"
    """fixed (always low); uniform; zipf (the k-th value from low has probability proportional to k^-theta: the
    multi-tier paper's code); log_t (exp(mu + sigma t_nu), rounded; drawn anew while outside low..high is not done: values
    are cut off there, as max_tokens does); buckets (a bucket by its weight, uniform inside)."""
    low: int = 1
    """Smallest number of tokens."""
    high: int = 1024
    """Largest number of tokens."""
    theta: float = 1.2
    """zipf: exponent."""
    mu: float = 5.0
    """log_t: location of ln tokens."""
    sigma: float = 0.8
    """log_t: scale of ln tokens."""
    nu: float = 3.5
    """log_t: degrees of freedom."""
    edges: tuple[int, ...] = ()
    """buckets: ascending bounds, one more than weights; a bucket holds edge[k] <= tokens < edge[k+1], the last one its
    upper bound too."""
    weights: tuple[float, ...] = ()
    """buckets: their weights, in any unit."""

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise InputError("law", self.law, ", ".join(LAWS))
        if self.law == "buckets":
            ascends = all(a < b for a, b in zip(self.edges, self.edges[1:], strict=False))
            if len(self.edges) < 2 or not ascends or self.edges[0] < 1 or self.edges[-1] > MAX_TOKENS:
                allowed = f"ascending integers from 1 to {MAX_TOKENS}, at least two"
                raise InputError("edges", self.edges, allowed)
            good = len(self.weights) == len(self.edges) - 1 and all(weight >= 0 for weight in self.weights)
            if not good or not 0 < sum(self.weights) < math.inf:
                raise InputError("weights", self.weights, f"{len(self.edges) - 1} numbers >= 0, not all 0")
            return
        if not 1 <= self.low <= self.high <= MAX_TOKENS:
            raise InputError(
                "low, high", (self.low, self.high), f"integers with 1 <= low <= high <= {MAX_TOKENS}"
            )
        if self.law == "zipf" and self.high - self.low >= MAX_ZIPF_VALUES:
            raise InputError("high", self.high, f"less than low + {MAX_ZIPF_VALUES} for zipf")
        for name in ("theta", "sigma", "nu"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "numbers > 0")
        if not math.isfinite(self.mu):
            raise InputError("mu", self.mu, "a finite number")

    def draw(self, num: int, rng: np.random.Generator) -> IntArray:
        """Numbers of tokens; shape [num]."""
        if self.law == "fixed":
            return np.full(num, self.low, np.int64)
        if self.law == "uniform":
            return rng.integers(self.low, self.high, num, endpoint=True)
        if self.law == "zipf":
            weights = np.arange(1, self.high - self.low + 2, dtype=float) ** -self.theta
            return self.low + rng.choice(len(weights), num, p=weights / weights.sum())
        if self.law == "log_t":
            return log_t_tokens(
                np.full(num, self.mu),
                np.full(num, self.sigma),
                np.full(num, self.nu),
                self.low,
                self.high,
                rng,
            )
        share = np.array(self.weights, float) / sum(self.weights)
        bucket = rng.choice(len(share), num, p=share)
        edges = np.array(self.edges)
        edges[-1] += 1
        return np.asarray(rng.integers(edges[bucket], edges[bucket + 1]), np.int64)


def log_t_tokens(
    mu: NDArray[np.float64],
    sigma: NDArray[np.float64],
    nu: NDArray[np.float64],
    low: int,
    high: int,
    rng: np.random.Generator,
) -> IntArray:
    """One answer's length from each log-t law, rounded and cut to low..high; arrays of shape [N]."""
    logs = mu + sigma * rng.standard_t(nu)
    return np.rint(np.exp(np.clip(logs, math.log(low), math.log(high)))).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of prompts and answers: from a file, or from laws.

    Raises:
        InputError: Two values contradict each other.
    """

    file: str | None = None
    """Rows to draw prompt and answer lengths from, with replacement: a trace (columns prompt_tokens, output_tokens: the
    pairs as they are), or fitted distributions (columns mu, sigma, nu, as fit-dist writes them: an answer is drawn from
    each, and that distribution is the request's prediction; prompts come from prompt_tokens or from the law `prompt`).
    Instead of laws."""
    in_order: bool = False
    """file: take the rows in their order from the first on, as often as needed, instead of drawing them."""
    prompt: Law | None = None
    """Law of the prompt's tokens."""
    output: Law | None = None
    """Law of the answer's tokens."""
    total: Law | None = None
    """Law of prompt and answer together, instead of one for each."""
    prompt_share: float = 2 / 3
    """total: share of the prompt, rounded to whole tokens, at least one each (2/3: two prompt tokens per answer token, as
    in the multi-tier paper)."""
    max_tokens: int | None = None
    """Cap of every request; longer answers end there. Unset: the longest answer drawn."""
    max_total_tokens: int | None = None
    """Requests with more tokens in all are shortened to this many, prompt and answer in proportion (SLAI: 8192)."""

    def __post_init__(self) -> None:
        laws = (self.prompt, self.output, self.total)
        if self.file is None and self.total is None and (self.prompt is None or self.output is None):
            raise InputError("lengths", "neither file, total nor prompt and output", "one of the three")
        if self.file is not None and (self.output is not None or self.total is not None):
            raise InputError("lengths.file", self.file, "unset together with the laws output or total")
        if self.total is not None and any(law is not None for law in laws[:2]):
            raise InputError("lengths.total", "given", "unset together with prompt or output")
        if not 0 < self.prompt_share < 1:
            raise InputError("prompt_share", self.prompt_share, "numbers between 0 and 1")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_TOKENS:
            raise InputError("max_tokens", self.max_tokens, f"integers from 1 to {MAX_TOKENS}, or unset")
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise InputError("max_total_tokens", self.max_total_tokens, "integers > 1, or unset")

    def draw_laws(self, num: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Prompt and answer lengths by the laws; two of shape [num]."""
        if self.total is None:
            assert self.prompt is not None
            assert self.output is not None
            return self.prompt.draw(num, rng), self.output.draw(num, rng)
        total = np.maximum(self.total.draw(num, rng), 2)
        prompt = np.clip(np.rint(total * self.prompt_share).astype(np.int64), 1, total - 1)
        return prompt, total - prompt


def shortened(prompt: IntArray, output: IntArray, most: int) -> tuple[IntArray, IntArray]:
    """Lengths with at most `most` tokens in all, both parts shortened by the same factor, at least one token each."""
    total = prompt + output
    factor = np.minimum(1.0, most / total)
    answers = np.maximum(1, np.floor(output * factor)).astype(np.int64)
    return np.minimum(np.maximum(1, np.floor(prompt * factor)).astype(np.int64), most - answers), answers
