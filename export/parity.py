"""Does the artifact give torch's numbers? Measured over batch and sequence shapes before anything is published."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export.padding import Shape, shapes
from predictors.artifact import Artifact, Precision
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import TailcastError
from scheduler_core.lengths import LogT

if TYPE_CHECKING:
    from predictors.modules import Checkpoint, PromptPredictor
    from predictors.runtime import ArtifactRuntime

MAX_TOKENS = 2048
NUM_RANDOM = 8
TEMPERATURES = (None, 0.0, 0.3, 1.0, 2.0)
# Of these a large number is as right with a proportionally larger difference.
RELATIVE_ABOVE_1 = ("nu", "regression_tokens", "rank")
# Largest difference from torch in single precision that passes. What int8 may cost is told by the task's metrics
# alone; this bound only catches a graph that is broken.
TOLERANCES: Mapping[Precision, float] = {"fp32": 1e-4, "fp16": 5e-2, "int8": 1.0}
# The capped length's numbers may be off by so much, relative to scheduler_core's.
CAPPED_TOLERANCE = 1e-4

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
    """Token ids of each prompt, served models by name, temperatures, lexical features; columns with padding."""

    prompts: list[NDArray[np.int64]]
    served_models: list[str | None]
    temperatures: list[float | None]
    lexical: list[NDArray[np.float32] | None]
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
    alone = [
        _onnx(runtime, _Batch([prompt], [served], [temperature], [lexical], len(prompt)))
        for prompt, served, temperature, lexical in zip(
            rows.prompts, rows.served_models, rows.temperatures, rows.lexical, strict=True
        )
    ]
    joined = {name: np.concatenate([one[name] for one in alone]) for name in alone[0]}
    batched = _differences(joined, _onnx(runtime, rows))
    padded = _differences(joined, _onnx(runtime, dataclasses.replace(rows, seq=longest)))
    return {name: max(batched[name], padded[name]) for name in batched}


def measure_capped(artifact: Artifact, *, rng: np.random.Generator, num_rows: int = 512) -> float:
    """Largest relative difference of the capped length's graph from scheduler_core over random parameters.

    Raises:
        TailcastError: It is above 1e-4.
    """
    import onnxruntime as ort

    capped, nu = artifact.manifest.capped, artifact.manifest.nu
    assert capped is not None
    feed: dict[str, NDArray[Any]] = {
        "mu": rng.uniform(0, 10, num_rows).astype(np.float32),
        "sigma": np.exp(rng.uniform(math.log(1e-3), math.log(3), num_rows)).astype(np.float32),
        "nu": np.exp(rng.uniform(0, math.log(100), num_rows)).astype(np.float32),
        "max_tokens": np.exp(rng.uniform(0, math.log(131072), num_rows)).astype(np.int64),
    }
    session = ort.InferenceSession(str(artifact.capped_model_path), providers=["CPUExecutionProvider"])
    found = session.run(None, {tensor.name: feed[tensor.name] for tensor in capped.inputs})
    mu, sigma = (feed[name].astype(np.float64) for name in ("mu", "sigma"))
    lengths = LogT(mu, sigma, feed["nu"].astype(np.float64) if nu is None else nu)
    cap = feed["max_tokens"].astype(np.float64)
    expected, cvar = lengths.expected_and_cvar(capped.cvar_level, cap)
    logs = np.stack([lengths.logppf(level) for level in capped.quantile_levels], axis=1)
    quantiles = np.exp(np.minimum(logs, np.log(cap)[:, None]))
    worst = 0.0
    for tensor, got, wanted in zip(capped.outputs, found, (expected, cvar, quantiles), strict=True):
        difference = float(np.max(np.abs(got / wanted - 1)))
        _check({tensor.name: difference}, CAPPED_TOLERANCE, "the capped length's graph and scheduler_core")
        worst = max(worst, difference)
    return worst


def check_tokenizer(checkpoint: Checkpoint, tokenizer: PromptTokenizer) -> None:
    """Raises TailcastError unless the artifact's tokenizer gives the token ids that training used."""
    from predictors.modules import read_tokens

    config = checkpoint.config
    for probe in PROBES:
        [ids] = read_tokens(
            checkpoint.tokenizer,
            [probe],
            max_length=tokenizer.max_length,
            truncation_side=config.truncation_side,
        )
        wanted = ids.tolist()
        [found] = tokenizer([probe])
        if found.ids.tolist() != wanted:
            raise TailcastError(
                f"tokenizer.json and the checkpoint's tokenizer differ on {probe[:40]!r}: "
                f"{found.ids[:8].tolist()}... and {wanted[:8]}..."
            )


def _random_batch(model: PromptPredictor, shape: Shape, rng: np.random.Generator) -> _Batch:
    vocabulary: int = model.encoder.config.vocab_size  # type: ignore[union-attr,assignment]
    conditioning = model.config.conditioning
    known: tuple[str | None, ...] = () if conditioning is None else conditioning.served_models
    names = known if conditioning is not None and not conditioning.unknown else (*known, None)
    return _Batch(
        [rng.integers(0, vocabulary, size=length, dtype=np.int64) for length in shape.lengths(rng)],
        [names[number] for number in rng.integers(len(names), size=shape.batch)],
        [TEMPERATURES[number] for number in rng.integers(len(TEMPERATURES), size=shape.batch)],
        [_random_lexical(model, rng) for _ in range(shape.batch)],
        shape.seq,
    )


def _random_lexical(model: PromptPredictor, rng: np.random.Generator) -> NDArray[np.float32] | None:
    """Features around those of training; now and then unknown."""
    if model.lexical is None or rng.random() < 0.3:
        return None
    mean, std = model.lexical.mean.numpy(), model.lexical.std.numpy()
    return np.asarray(mean + std * rng.normal(0, 2, size=len(mean)), dtype=np.float32)


def _torch(model: PromptPredictor, rows: _Batch) -> Arrays:
    import torch

    ids = torch.zeros((len(rows.prompts), rows.seq), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(rows.prompts):
        ids[row, : len(prompt)] = torch.from_numpy(prompt)
        mask[row, : len(prompt)] = 1
    conditions: dict[str, torch.Tensor] = {}
    if model.lexical is not None:
        unknown = np.full(model.lexical.width - 1, np.nan, dtype=np.float32)
        table = [unknown if features is None else features for features in rows.lexical]
        conditions["lexical"] = torch.from_numpy(np.stack(table))
    if model.config.conditioning is not None:
        numbers = [model.config.conditioning.number_of(name) for name in rows.served_models]
        temperatures = [float("nan") if value is None else value for value in rows.temperatures]
        conditions["served_model"] = torch.tensor(numbers)
        conditions["temperature"] = torch.tensor(temperatures, dtype=torch.float32)
    with torch.no_grad():
        found = model(ids, mask, **conditions)
    return {name: values.double().numpy() for name, values in found.items()}


def _onnx(runtime: ArtifactRuntime, rows: _Batch) -> Arrays:
    found = runtime.run(
        rows.prompts, rows.served_models, rows.temperatures, lexical=rows.lexical, seq=rows.seq
    ).arrays()
    return {tensor.name: found[tensor.name] for tensor in runtime.artifact.manifest.outputs}


def _differences(one: Arrays, other: Arrays) -> dict[str, float]:
    if set(one) != set(other):
        raise TailcastError(f"torch gives {', '.join(one)}; the artifact {', '.join(other)}")
    found = {}
    for name, values in one.items():
        difference = np.abs(values - other[name])
        if name in RELATIVE_ABOVE_1:
            difference = difference / np.maximum(np.abs(values), 1.0)
        found[name] = float(difference.max())
    return found


def _check(differences: Mapping[str, float], tolerance: float, what: str) -> None:
    for name, difference in differences.items():
        if not difference <= tolerance:  # NaN fails too
            raise TailcastError(f"{what}: {name} differs by {difference:.3g}; allowed: {tolerance:.3g}")
