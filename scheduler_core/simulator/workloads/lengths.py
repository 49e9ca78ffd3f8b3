"""Lengths of prompts and outputs from distributions, or from rows of a trace or of fitted distributions."""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.ranges import FINITE, POSITIVE, check_choice, check_ranges
from scheduler_core.shell.files import existing_file
from scheduler_core.shell.table_files import file_rows
from scheduler_core.simulator.trace import MAX_TOKENS, read_number
from scheduler_core.statistics import FloatArray

IntArray = NDArray[np.int64]

#: Maximum output drawn from a fitted distribution if the workload has no max_tokens.
MAX_DRAWN_TOKENS = 32_768
#: Maximum number of values of zipf, whose probabilities are tabulated.
MAX_ZIPF_VALUES = 10_000_000
Kind = Literal["fixed", "uniform", "zipf", "log_t"]
_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "mu", "sigma", "nu")


@dataclass(frozen=True, kw_only=True)
class TokenDistribution:
    """Distribution of a number of tokens, an integer from `low` to `high`."""

    kind: Kind = "uniform"
    """fixed (always low); uniform; zipf (the k-th value from low has probability proportional to k^-theta, as
    in the multi-tier paper's code); log_t (exp(mu + sigma t_nu), rounded and clipped to low..high)."""
    low: int = 1
    """Minimum number of tokens."""
    high: int = 1024
    """Maximum number of tokens."""
    theta: float = 1.2
    """zipf: exponent."""
    mu: float = 5.0
    """log_t: location of ln tokens."""
    sigma: float = 0.8
    """log_t: scale of ln tokens."""
    nu: float = 3.5
    """log_t: degrees of freedom."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        if not 1 <= self.low <= self.high <= MAX_TOKENS:
            allowed = f"integers with 1 <= low <= high <= {MAX_TOKENS}"
            raise InputError("low, high", (self.low, self.high), allowed)
        if self.kind == "zipf" and self.high - self.low >= MAX_ZIPF_VALUES:
            raise InputError("high", self.high, f"less than low + {MAX_ZIPF_VALUES} for zipf")
        check_ranges(
            self, mu=(-FINITE, FINITE), **dict.fromkeys(("theta", "sigma", "nu"), (POSITIVE, FINITE))
        )

    def draw(self, num: int, rng: np.random.Generator) -> IntArray:
        """Draws numbers of tokens; shape [num]."""
        if self.kind == "fixed":
            return np.full(num, self.low, np.int64)
        if self.kind == "uniform":
            return rng.integers(self.low, self.high, num, endpoint=True)
        if self.kind == "zipf":
            weights = np.arange(1, self.high - self.low + 2, dtype=float) ** -self.theta
            return np.asarray(self.low + rng.choice(len(weights), num, p=weights / weights.sum()))
        parameters = np.repeat([[self.mu], [self.sigma], [self.nu]], num, axis=1)
        return log_t_tokens(parameters, self.low, self.high, rng)


def log_t_tokens(parameters: FloatArray, low: int, high: int, rng: np.random.Generator) -> IntArray:
    """Draws one length [N] from each log-t with parameters [3, N], rounded and clipped to low..high."""
    mu, sigma, nu = parameters
    logs = mu + sigma * rng.standard_t(nu)
    return np.asarray(np.rint(np.exp(np.clip(logs, math.log(low), math.log(high)))), np.int64)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of prompts and outputs, from a file or from distributions."""

    file: str | None = None
    """File whose rows are drawn with replacement: a trace (columns prompt_tokens, output_tokens, used as
    pairs), or fitted distributions (columns mu, sigma, nu, as written by fit-dist: an output is drawn from
    each, and the distribution is the prediction of the request; prompts are from the column prompt_tokens or
    from the distribution `prompt`). Alternative to distributions."""
    in_order: bool = False
    """file: use the rows in order, repeated as needed, instead of drawing them."""
    prompt: TokenDistribution | None = None
    """Distribution of prompt tokens."""
    output: TokenDistribution | None = None
    """Distribution of output tokens."""
    total: TokenDistribution | None = None
    """Distribution of prompt plus output tokens. Alternative to prompt and output."""
    prompt_fraction: float = 2 / 3
    """total: fraction of prompt tokens, rounded to integers, at least one token each (2/3: two prompt tokens
    per output token, as in the multi-tier paper)."""
    max_tokens: int | None = None
    """max_tokens of every request; longer outputs are truncated. Unset: the longest drawn output."""
    max_total_tokens: int | None = None
    """Maximum of prompt plus output tokens; longer requests are shortened proportionally (SLAI: 8192)."""

    def __post_init__(self) -> None:
        if self.file is None and self.total is None and (self.prompt is None or self.output is None):
            raise InputError("lengths", "neither file, total nor prompt and output", "one of the three")
        if self.file is not None and (self.output is not None or self.total is not None):
            raise InputError("lengths.file", self.file, "unset together with output or total")
        if self.total is not None and (self.prompt is not None or self.output is not None):
            raise InputError("lengths.total", "set", "unset together with prompt or output")
        if not 0 < self.prompt_fraction < 1:
            raise InputError("prompt_fraction", self.prompt_fraction, "numbers between 0 and 1")
        check_ranges(self, max_tokens=(1, MAX_TOKENS), max_total_tokens=(2, 2 * MAX_TOKENS))

    def draw(
        self, num: int, rng: np.random.Generator
    ) -> tuple[IntArray, IntArray, int, list[LengthPrediction]]:
        """Prompts [num], outputs [num], max_tokens, and the distributions of the outputs if a file has them."""
        predictions: list[LengthPrediction] = []
        if self.file is not None:
            prompt, output, predictions = self._from_file(self.file, num, rng)
        elif self.total is not None:
            total = np.maximum(self.total.draw(num, rng), 2)
            prompt = np.clip(np.rint(total * self.prompt_fraction).astype(np.int64), 1, total - 1)
            output = total - prompt
        else:
            assert self.prompt is not None and self.output is not None  # noqa: PT018
            prompt, output = self.prompt.draw(num, rng), self.output.draw(num, rng)
        if self.max_total_tokens is not None:
            factor = np.minimum(1.0, self.max_total_tokens / (prompt + output))
            output = np.maximum(1, np.floor(output * factor)).astype(np.int64)
            prompt = np.maximum(1, np.floor(prompt * factor)).astype(np.int64)
            prompt = np.minimum(prompt, self.max_total_tokens - output)
        max_tokens = int(output.max()) if self.max_tokens is None else self.max_tokens
        return prompt, np.minimum(output, max_tokens), max_tokens, predictions

    def _from_file(
        self, file: str, num: int, rng: np.random.Generator
    ) -> tuple[IntArray, IntArray, list[LengthPrediction]]:
        rows = read_lengths(file)
        indices = np.arange(num) % len(rows) if self.in_order else rng.integers(0, len(rows), num)
        if self.prompt is not None:
            prompt = self.prompt.draw(num, rng)
        elif rows.prompt_tokens is not None:
            prompt = rows.prompt_tokens[indices]
        else:
            allowed = "a file with a column prompt_tokens, or a distribution lengths.prompt"
            raise InputError("lengths.file", rows.source, allowed)
        if rows.output_tokens is not None:
            return prompt, rows.output_tokens[indices], []
        assert rows.parameters is not None
        parameters = rows.parameters[:, indices]
        output = log_t_tokens(parameters, 1, self.max_tokens or MAX_DRAWN_TOKENS, rng)
        return prompt, output, [LengthPrediction(*row) for row in parameters.T.tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class LengthRows:
    """Columns [N] of a file of lengths; None if the file does not have them. `parameters` [3, N] are mu,
    sigma, nu of the log-t distributions of outputs; None if there is a column output_tokens."""

    source: str
    prompt_tokens: IntArray | None
    output_tokens: IntArray | None
    parameters: FloatArray | None
    arrival_s: FloatArray | None

    def __len__(self) -> int:
        column = self.output_tokens if self.output_tokens is not None else self.parameters
        assert column is not None
        return int(column.shape[-1])


def read_lengths(path: str) -> LengthRows:
    """Reads a file of lengths: .parquet, .csv or .jsonl with a column output_tokens, or with mu, sigma and
    optionally nu (default: 3.5); optional prompt_tokens and arrival_s. Unchanged files are cached.
    `InputError` if the file or a column is missing, or a value is missing or not above 0."""
    file = existing_file(path, "lengths.file")
    return _read(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read(file: Path, _modified_ns: int) -> LengthRows:
    source = str(file)
    rows = [
        {
            name: read_number(f"{file.name} row {number}", name, row[name])
            for name in _COLUMNS
            if row.get(name) not in (None, "")
        }
        for number, row in file_rows(file, "lengths.file", _COLUMNS)
    ]
    columns = {
        name: np.array([row[name] for row in rows])
        for name in _COLUMNS
        if rows and all(name in row for row in rows)
    }
    for name in ("prompt_tokens", "output_tokens", "mu", "sigma", "nu"):
        if name not in columns and any(name in row for row in rows):
            raise InputError("lengths.file", source, f"a value of {name} in all rows or in none")
    prompt, output, arrival = (columns.get(name) for name in ("prompt_tokens", "output_tokens", "arrival_s"))
    if output is not None:
        return LengthRows(source, prompt, output, None, arrival)
    if "mu" not in columns or "sigma" not in columns:
        allowed = "at least one row, and a column output_tokens, or mu and sigma"
        raise InputError("lengths.file", source, allowed)
    parameters = np.stack([columns["mu"], columns["sigma"], columns.get("nu", np.full(len(rows), 3.5))])
    if np.any(parameters[1:] <= 0):
        raise InputError("lengths.file", source, "sigma and nu above 0 in all rows")
    return LengthRows(source, prompt, None, parameters, arrival)
