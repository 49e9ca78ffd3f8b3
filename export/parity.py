"""Comparison of an artifact with torch over shapes and padding patterns, before anything is published."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import Precision
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import TailcastError

if TYPE_CHECKING:
    from predictors.modules import Checkpoint, PromptPredictor
    from predictors.runtime import ArtifactRuntime

MAX_BATCH = 64

PATTERNS = ("full", "one long", "one short", "all short", "steps", "alternating", "random")


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of `batch` rows and `seq` columns, padded on the right as `pattern` says."""

    batch: int
    seq: int
    pattern: str

    def __str__(self) -> str:
        return f"{self.batch}x{self.seq} {self.pattern}"

    def lengths(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Tokens in each row [batch], from 1 to seq.

        full: no padding. one long, one short: one row has all columns, or 1, the others the opposite. all short: every row
        is padded, as where columns are rounded up. steps: from 1 to all. alternating: 1 and all. random: any.
        """
        full = np.full(self.batch, self.seq, dtype=np.int64)
        ones = np.ones(self.batch, dtype=np.int64)
        one = int(rng.integers(self.batch))
        if self.pattern == "one long":
            ones[one] = self.seq
            return ones
        if self.pattern == "one short":
            full[one] = 1
            return full
        if self.pattern == "all short":
            return rng.integers(1, max(self.seq, 2), size=self.batch, dtype=np.int64)
        if self.pattern == "steps":
            return np.linspace(1, self.seq, self.batch).round().astype(np.int64)
        if self.pattern == "alternating":
            full[1::2] = 1
            return full
        if self.pattern == "random":
            return rng.integers(1, self.seq + 1, size=self.batch, dtype=np.int64)
        assert self.pattern == "full"
        return full


def shapes(longest: int, *, max_tokens: int, num_random: int, rng: np.random.Generator) -> Iterator[Shape]:
    """Every pattern at one small shape; edge shapes and random ones, patterns in turn.

    Args:
        longest: Most columns.
        max_tokens: Most rows times columns; one row of `longest` columns comes in any case.
        num_random: Random shapes, log-uniform over 1 to 64 rows and 1 to `longest` columns.
        rng: Draws them.
    """
    small = (5, min(16, longest))
    yield from (Shape(*small, pattern) for pattern in PATTERNS)
    sizes = [(1, 1), (1, 2), (2, 1), (1, longest), (3, 17)]
    sizes += [(min(MAX_BATCH, max_tokens), 1), (min(MAX_BATCH, max_tokens // 2), 2)]
    sizes += [(min(MAX_BATCH, max_tokens // longest), longest), (MAX_BATCH, max_tokens // MAX_BATCH)]
    for _ in range(num_random):
        batch, seq = np.exp(rng.uniform(0, np.log([MAX_BATCH + 0.99, longest + 0.99]))).astype(int).tolist()
        sizes.append((batch, min(seq, max_tokens // batch)))
    for number, (batch, seq) in enumerate(sizes):
        if batch >= 1 and seq >= 1:
            yield Shape(batch, min(seq, longest), PATTERNS[number % len(PATTERNS)])


MAX_TOKENS = 2048
NUM_RANDOM = 8
TEMPERATURES = (None, 0.0, 0.3, 1.0, 2.0)
# Of these a large number is as right with a proportionally larger difference.
RELATIVE_ABOVE_1 = ("nu", "regression_tokens", "rank")
# Largest difference from torch in single precision that passes. What int8 may cost is told by the task's metrics
# alone; this bound only catches a graph that is broken.
TOLERANCES: Mapping[Precision, float] = {"fp32": 1e-4, "fp16": 5e-2, "int8": 1.0}

PROBES = (
    "Name three rivers in Europe.",
    "Schreibe ein Märchen über Zwerge - naïve café 北京 🚀",
    "def f(x):\n\treturn  x ** 2   # a comment\n",
    "{'json': [1, 2.5, null]}",
    "  leading and trailing space  ",
    "word " * 3000,
)

logger = logging.getLogger(__name__)

Arrays = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was measured: log tokens for mu and sigma, probabilities, and shares of what is larger than 1 for the rest.

    Attributes:
        max_abs_diff: "batch x seq pattern" -> largest |torch - ONNX Runtime| over all outputs.
        by_output: Output -> the same over all shapes.
        padding: Largest change of a prompt's numbers between alone, in a batch, and with more padding.
        tolerance: What all of it had to stay below.
    """

    max_abs_diff: dict[str, float]
    by_output: dict[str, float]
    padding: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class _Batch:
    """Token ids of each prompt, served models by name, temperatures; columns with padding."""

    prompts: list[NDArray[np.int64]]
    served_models: list[str | None]
    temperatures: list[float | None]
    seq: int


def measure_parity(
    model: PromptPredictor,
    runtime: ArtifactRuntime,
    *,
    rng: np.random.Generator,
    tolerance: float | None = None,
    max_tokens: int = MAX_TOKENS,
    num_random: int = NUM_RANDOM,
) -> Parity:
    """Compares torch with the artifact on random tokens and conditions, over shapes and padding patterns.

    Args:
        model: The predictor in eval mode.
        runtime: The artifact made from it.
        tolerance: Largest difference that passes; None: that of the artifact's precision.
        rng: Draws tokens, lengths, served models and temperatures.
        max_tokens, num_random: As in `padding.shapes`.

    Raises:
        TailcastError: A shape fails or differs by more than `tolerance`.
    """
    if tolerance is None:
        tolerance = TOLERANCES[runtime.artifact.manifest.precision]
    by_shape: dict[str, float] = {}
    by_output: dict[str, float] = {}
    longest = model.config.max_length
    for shape in shapes(longest, max_tokens=max_tokens, num_random=num_random, rng=rng):
        rows = _random_batch(model, shape, rng)
        differences = _differences(_torch(model, rows), _onnx(runtime, rows))
        _check(differences, tolerance, f"torch and ONNX Runtime at {shape}")
        by_shape[str(shape)] = max(differences.values())
        logger.info("parity at %s: %.2g", shape, by_shape[str(shape)])
        for name, difference in differences.items():
            by_output[name] = max(difference, by_output.get(name, 0.0))
    padding = measure_padding(model, runtime, rng=rng)
    _check(padding, tolerance, "a prompt alone and in a batch")
    return Parity(
        max_abs_diff=by_shape, by_output=by_output, padding=max(padding.values()), tolerance=tolerance
    )


def measure_padding(
    model: PromptPredictor, runtime: ArtifactRuntime, *, rng: np.random.Generator
) -> dict[str, float]:
    """Largest change of each output between prompts alone, in a batch, and in a batch with as much padding as can be.

    Args:
        model: Tells vocabulary, lengths and conditions.
        runtime: What is measured.
        rng: Draws the prompts.
    """
    longest = model.config.max_length
    rows = _random_batch(model, Shape(6, min(33, longest), "random"), rng)
    single = [
        _onnx(runtime, _Batch([prompt], [served], [temperature], len(prompt)))
        for prompt, served, temperature in zip(
            rows.prompts, rows.served_models, rows.temperatures, strict=True
        )
    ]
    joined = {name: np.concatenate([one[name] for one in single]) for name in single[0]}
    batched = _differences(joined, _onnx(runtime, rows))
    padded = _differences(joined, _onnx(runtime, dataclasses.replace(rows, seq=longest)))
    return {name: max(batched[name], padded[name]) for name in batched}


def check_tokenizer(checkpoint: Checkpoint, tokenizer: PromptTokenizer) -> None:
    """Raises TailcastError unless the artifact's tokenizer gives the token ids that training used."""
    from predictors.modules import tokenize

    config = checkpoint.config
    for probe in PROBES:
        [ids] = tokenize(
            checkpoint.tokenizer,
            [probe],
            max_length=tokenizer.max_length,
            truncation_side=config.truncation_side,
        )
        expected = ids.tolist()
        [prompt] = tokenizer([probe])
        if prompt.ids.tolist() != expected:
            raise TailcastError(
                f"tokenizer.json and the checkpoint's tokenizer differ on {probe[:40]!r}: "
                f"{prompt.ids[:8].tolist()}... and {expected[:8]}..."
            )


def _random_batch(model: PromptPredictor, shape: Shape, rng: np.random.Generator) -> _Batch:
    vocabulary: int = model.encoder.config.vocab_size  # type: ignore[union-attr,assignment]
    conditioning = model.config.conditioning
    served_models: tuple[str | None, ...] = () if conditioning is None else conditioning.served_models
    names = served_models if conditioning is not None and not conditioning.unknown else (*served_models, None)
    return _Batch(
        [rng.integers(0, vocabulary, size=length, dtype=np.int64) for length in shape.lengths(rng)],
        [names[number] for number in rng.integers(len(names), size=shape.batch)],
        [TEMPERATURES[number] for number in rng.integers(len(TEMPERATURES), size=shape.batch)],
        shape.seq,
    )


def _torch(model: PromptPredictor, rows: _Batch) -> Arrays:
    import torch

    ids = torch.zeros((len(rows.prompts), rows.seq), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(rows.prompts):
        ids[row, : len(prompt)] = torch.from_numpy(prompt)
        mask[row, : len(prompt)] = 1
    conditions: dict[str, torch.Tensor] = {}
    if model.config.conditioning is not None:
        numbers = [model.config.conditioning.number_of(name) for name in rows.served_models]
        temperatures = [float("nan") if value is None else value for value in rows.temperatures]
        conditions["served_model"] = torch.tensor(numbers)
        conditions["temperature"] = torch.tensor(temperatures, dtype=torch.float32)
    with torch.no_grad():
        outputs = model(ids, mask, **conditions)
    return {name: values.double().numpy() for name, values in outputs.items()}


def _onnx(runtime: ArtifactRuntime, rows: _Batch) -> Arrays:
    arrays = runtime.run(rows.prompts, rows.served_models, rows.temperatures, seq=rows.seq).arrays()
    return {tensor.name: arrays[tensor.name] for tensor in runtime.artifact.manifest.outputs}


def _differences(one: Arrays, other: Arrays) -> dict[str, float]:
    if set(one) != set(other):
        raise TailcastError(f"torch gives {', '.join(one)}; the artifact {', '.join(other)}")
    differences = {}
    for name, values in one.items():
        difference = np.abs(values - other[name])
        if name in RELATIVE_ABOVE_1:
            difference = difference / np.maximum(np.abs(values), 1.0)
        differences[name] = float(difference.max())
    return differences


def _check(differences: Mapping[str, float], tolerance: float, what: str) -> None:
    for name, difference in differences.items():
        if not difference <= tolerance:  # NaN fails too
            raise TailcastError(f"{what}: {name} differs by {difference:.3g}; allowed: {tolerance:.3g}")
