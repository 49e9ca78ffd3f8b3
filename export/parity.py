"""Does the artifact give torch's numbers? Measured over batch and sequence shapes before anything is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import TailcastError

if TYPE_CHECKING:
    from predictors.modules import Checkpoint, PromptPredictor
    from predictors.runtime import ArtifactRuntime

SHAPES = ((1, 1), (1, 7), (2, 16), (3, 33), (8, 128))  # and one prompt as long as the model reads
TEMPERATURES = (None, 0.0, 0.3, 1.0, 2.0)
# Of these a large number is as right with a proportionally larger difference.
RELATIVE_ABOVE_1 = ("nu", "regression_tokens", "rank")

PROBES = (
    "Name three rivers in Europe.",
    "Schreibe ein Märchen über Zwerge - naïve café 北京 🚀",
    "def f(x):\n\treturn  x ** 2   # a comment\n",
    "{'json': [1, 2.5, null]}",
    "  leading and trailing space  ",
    "word " * 3000,
)

Arrays = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was measured: log tokens for mu and sigma, probabilities, and shares of what is larger than 1 for the rest.

    Attributes:
        max_abs_diff: "batch x seq" -> largest |torch - ONNX Runtime| over all outputs.
        by_output: Output -> the same over all shapes.
        padding: Largest change of a prompt's numbers between alone and padded beside a longer one.
        tolerance: What all of it had to stay below.
    """

    max_abs_diff: dict[str, float]
    by_output: dict[str, float]
    padding: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class _Batch:
    """Token ids of each prompt, served models by name, temperatures."""

    prompts: list[NDArray[np.int64]]
    served_models: list[str | None]
    temperatures: list[float | None]


def measure_parity(
    model: PromptPredictor, runtime: ArtifactRuntime, *, tolerance: float, rng: np.random.Generator
) -> Parity:
    """Compares torch with the artifact on random tokens under random padding and random conditions.

    Args:
        model: The predictor in eval mode.
        runtime: The artifact made from it.
        tolerance: Largest difference that passes.
        rng: Draws tokens, lengths, served models and temperatures.

    Raises:
        TailcastError: A shape fails or differs by more than `tolerance`.
    """
    longest = model.config.max_length
    shapes = sorted({(batch, min(seq, longest)) for batch, seq in (*SHAPES, (1, longest))})
    by_shape: dict[str, float] = {}
    by_output: dict[str, float] = {}
    for batch, seq in shapes:
        rows = _random_batch(model, batch, seq, rng)
        differences = _differences(_torch(model, rows), _onnx(runtime, rows))
        _check(differences, tolerance, f"torch and ONNX Runtime at {batch} x {seq} tokens")
        by_shape[f"{batch}x{seq}"] = max(differences.values())
        for name, difference in differences.items():
            by_output[name] = max(difference, by_output.get(name, 0.0))
    rows = _random_batch(model, 4, min(33, longest), rng)
    alone = [
        _onnx(runtime, _Batch([prompt], [served], [temperature]))
        for prompt, served, temperature in zip(
            rows.prompts, rows.served_models, rows.temperatures, strict=True
        )
    ]
    joined = {name: np.concatenate([one[name] for one in alone]) for name in alone[0]}
    padding = _differences(joined, _onnx(runtime, rows))
    _check(padding, tolerance, "a prompt alone and in a batch")
    return Parity(
        max_abs_diff=by_shape, by_output=by_output, padding=max(padding.values()), tolerance=tolerance
    )


def check_tokenizer(checkpoint: Checkpoint, tokenizer: PromptTokenizer) -> None:
    """Raises TailcastError unless the artifact's tokenizer gives the token ids that training used."""
    for probe in PROBES:
        wanted = checkpoint.tokenizer(probe, truncation=True, max_length=tokenizer.max_length)["input_ids"]
        [found] = tokenizer([probe])
        if found.ids.tolist() != list(wanted):
            raise TailcastError(
                f"tokenizer.json and the checkpoint's tokenizer differ on {probe[:40]!r}: "
                f"{found.ids[:8].tolist()}... and {list(wanted)[:8]}..."
            )


def _random_batch(model: PromptPredictor, batch: int, seq: int, rng: np.random.Generator) -> _Batch:
    vocabulary: int = model.encoder.config.vocab_size  # type: ignore[union-attr,assignment]
    lengths = [seq, *rng.integers(1, seq + 1, size=batch - 1)]
    conditioning = model.config.conditioning
    known: tuple[str | None, ...] = () if conditioning is None else conditioning.served_models
    names = known if conditioning is not None and not conditioning.unknown else (*known, None)
    return _Batch(
        [rng.integers(0, vocabulary, size=length, dtype=np.int64) for length in lengths],
        [names[number] for number in rng.integers(len(names), size=batch)],
        [TEMPERATURES[number] for number in rng.integers(len(TEMPERATURES), size=batch)],
    )


def _torch(model: PromptPredictor, rows: _Batch) -> Arrays:
    import torch

    longest = max(len(prompt) for prompt in rows.prompts)
    ids = torch.zeros((len(rows.prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(rows.prompts):
        ids[row, : len(prompt)] = torch.from_numpy(prompt)
        mask[row, : len(prompt)] = 1
    conditions = []
    if model.config.conditioning is not None:
        numbers = [model.config.conditioning.number_of(name) for name in rows.served_models]
        temperatures = [float("nan") if value is None else value for value in rows.temperatures]
        conditions = [torch.tensor(numbers), torch.tensor(temperatures, dtype=torch.float32)]
    with torch.no_grad():
        found = model(ids, mask, *conditions)
    return {name: values.double().numpy() for name, values in found.items()}


def _onnx(runtime: ArtifactRuntime, rows: _Batch) -> Arrays:
    found = runtime.run(rows.prompts, rows.served_models, rows.temperatures).arrays()
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
