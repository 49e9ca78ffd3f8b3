"""Comparison of an artifact with torch over shapes and padding patterns, before the artifact is written."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import TailcastError

if TYPE_CHECKING:
    from predictors.modules.checkpoint import Checkpoint
    from predictors.modules.predictor import PromptPredictor
    from predictors.runtime import ArtifactRuntime

MAX_BATCH = 64
#: Maximum difference from torch; relative for values above 1 of `RELATIVE_ABOVE_1`.
TOLERANCE = 1e-4
#: Tokens in each row of a batch, from 1 to the number of columns; rows are padded on the right.
PATTERNS: dict[str, Callable[[int, int, np.random.Generator], NDArray[np.int64]]] = {
    "full": lambda batch, seq, rng: np.full(batch, seq),
    "one long": lambda batch, seq, rng: np.where(np.arange(batch) == rng.integers(batch), seq, 1),
    "one short": lambda batch, seq, rng: np.where(np.arange(batch) == rng.integers(batch), 1, seq),
    # Occurs where the number of columns is rounded up.
    "all short": lambda batch, seq, rng: rng.integers(1, max(seq, 2), size=batch),
    "random": lambda batch, seq, rng: rng.integers(1, seq + 1, size=batch),
}
TEMPERATURES = (None, 0.0, 0.3, 1.0, 2.0)
# Outputs whose differences are relative for values above 1.
RELATIVE_ABOVE_1 = ("nu", "regression_tokens", "rank")

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
#: Token ids of each prompt, served models by name, temperatures.
Rows = tuple[list[NDArray[np.int64]], list[str | None], list[float | None]]


def shapes(
    longest: int, *, max_tokens: int, num_random: int, rng: np.random.Generator
) -> Iterator[tuple[int, int, str]]:
    """Tuples (rows, columns, pattern): every pattern at one small shape, then edge shapes and random shapes
    with alternating patterns. Random shapes are log-uniform, at most 64 rows by `longest` columns. Rows times
    columns is at most `max_tokens`, except for 1 x `longest`, which is always included."""
    yield from ((5, min(16, longest), pattern) for pattern in PATTERNS)
    sizes = [(1, 1), (1, 2), (2, 1), (1, longest), (3, 17)]
    sizes += [(min(MAX_BATCH, max_tokens), 1), (min(MAX_BATCH, max_tokens // 2), 2)]
    sizes += [(min(MAX_BATCH, max_tokens // longest), longest), (MAX_BATCH, max_tokens // MAX_BATCH)]
    for _ in range(num_random):
        batch, seq = np.exp(rng.uniform(0, np.log([MAX_BATCH + 0.99, longest + 0.99]))).astype(int).tolist()
        sizes.append((batch, min(seq, max_tokens // batch)))
    for (batch, seq), pattern in zip(sizes, itertools.cycle(PATTERNS), strict=False):
        if batch >= 1 and seq >= 1:
            yield batch, min(seq, longest), pattern


def measure_parity(
    model: PromptPredictor,
    runtime: ArtifactRuntime,
    *,
    rng: np.random.Generator,
    max_tokens: int,
    num_random: int,
) -> dict[str, Any]:
    """Compares torch with the artifact on random tokens and conditions, over shapes and padding patterns.

    Raises TailcastError if a model call fails or an output differs by more than `TOLERANCE`.

    Returns:
        max_abs_diff: "batch x seq pattern" -> largest value of `_differences` over all outputs.
        by_output: output -> largest difference. padding: largest change by padding. tolerance: `TOLERANCE`.
    """
    import torch

    by_shape: dict[str, float] = {}
    by_output: dict[str, float] = {}
    longest = model.config.max_length
    for batch, seq, pattern in shapes(longest, max_tokens=max_tokens, num_random=num_random, rng=rng):
        shape = f"{batch}x{seq} {pattern}"
        rows = _random_rows(model, PATTERNS[pattern](batch, seq, rng), rng)
        feed = runtime.feed(*rows, seq=seq)
        with torch.no_grad():
            outputs = model(**{name: torch.from_numpy(values) for name, values in feed.items()})
        expected = {name: values.double().numpy() for name, values in outputs.items()}
        differences = _differences(expected, _onnx(runtime, rows, seq))
        _check(differences, f"torch and ONNX Runtime at {shape}")
        by_shape[shape] = max(differences.values())
        logger.info("parity at %s: %.2g", shape, by_shape[shape])
        by_output = {name: max(value, by_output.get(name, 0.0)) for name, value in differences.items()}
    padding = measure_padding(model, runtime, rng=rng)
    _check(padding, "a prompt alone and in a batch")
    largest = {"padding": max(padding.values()), "tolerance": TOLERANCE}
    return {"max_abs_diff": by_shape, "by_output": by_output} | largest


def measure_padding(
    model: PromptPredictor, runtime: ArtifactRuntime, *, rng: np.random.Generator
) -> dict[str, float]:
    """Largest change of each output between single prompts and a batch, with and without extra padding."""
    longest = model.config.max_length
    rows = _random_rows(model, PATTERNS["random"](6, min(33, longest), rng), rng)
    single = [
        _onnx(runtime, ([prompt], [served], [temperature]))
        for prompt, served, temperature in zip(*rows, strict=True)
    ]
    joined = {name: np.concatenate([arrays[name] for arrays in single]) for name in single[0]}
    batched = _differences(joined, _onnx(runtime, rows))
    padded = _differences(joined, _onnx(runtime, rows, longest))
    return {name: max(batched[name], padded[name]) for name in batched}


def check_tokenizer(checkpoint: Checkpoint, tokenizer: PromptTokenizer) -> None:
    """Raises TailcastError unless the artifact's tokenizer returns the same token ids as the checkpoint's."""
    from predictors.modules.encoder import tokenize

    expected = tokenize(
        checkpoint.tokenizer,
        PROBES,
        max_length=tokenizer.max_length,
        truncation_side=checkpoint.config.truncation_side,
        amounts=tokenizer.amounts,
    )
    for probe, ids, prompt in zip(PROBES, expected, tokenizer(PROBES), strict=True):
        if prompt.ids.tolist() != ids.tolist():
            raise TailcastError(
                f"tokenizer.json and the checkpoint's tokenizer differ on {probe[:40]!r}: "
                f"{prompt.ids[:8].tolist()}... and {ids[:8].tolist()}..."
            )


def _random_rows(model: PromptPredictor, lengths: NDArray[np.int64], rng: np.random.Generator) -> Rows:
    """Rows of random tokens with the given lengths [B], with random conditions."""
    vocabulary: int = model.encoder.config.vocab_size  # type: ignore[union-attr,assignment]
    conditioning = model.config.conditioning
    names: tuple[str | None, ...] = () if conditioning is None else conditioning.served_models
    if conditioning is None or conditioning.unknown:
        names += (None,)
    return (
        [rng.integers(0, vocabulary, size=length, dtype=np.int64) for length in lengths],
        [names[number] for number in rng.integers(len(names), size=len(lengths))],
        [TEMPERATURES[number] for number in rng.integers(len(TEMPERATURES), size=len(lengths))],
    )


def _onnx(runtime: ArtifactRuntime, rows: Rows, seq: int | None = None) -> Arrays:
    arrays = runtime.run(*rows, seq=seq).arrays()
    return {tensor.name: arrays[tensor.name] for tensor in runtime.artifact.manifest.outputs}


def _differences(expected: Arrays, actual: Arrays) -> dict[str, float]:
    """Largest absolute difference of each output; relative above 1 for those in `RELATIVE_ABOVE_1`."""
    if set(expected) != set(actual):
        raise TailcastError(f"torch returns {', '.join(expected)}; the artifact returns {', '.join(actual)}")
    differences = {}
    for name, values in expected.items():
        difference = np.abs(values - actual[name])
        if name in RELATIVE_ABOVE_1:
            difference = difference / np.maximum(np.abs(values), 1.0)
        differences[name] = float(difference.max())
    return differences


def _check(differences: Mapping[str, float], compared: str) -> None:
    for name, difference in differences.items():
        if not difference <= TOLERANCE:  # NaN fails too
            raise TailcastError(f"{compared}: {name} differs by {difference:.3g}; allowed: {TOLERANCE:.3g}")
