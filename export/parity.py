"""Does the artifact give torch's numbers? Measured over batch and sequence shapes before anything is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import TailcastError

if TYPE_CHECKING:
    from predictors.modules import Checkpoint, LengthPredictor
    from predictors.runtime import ArtifactRuntime

SHAPES = ((1, 1), (1, 7), (2, 16), (3, 33), (8, 128))  # and one prompt as long as the model reads

PROBES = (
    "Name three rivers in Europe.",
    "Schreibe ein Märchen über Zwerge - naïve café 北京 🚀",
    "def f(x):\n\treturn  x ** 2   # a comment\n",
    "{'json': [1, 2.5, null]}",
    "  leading and trailing space  ",
    "word " * 3000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was measured, in log tokens.

    Attributes:
        max_abs_diff: "batch x seq" -> largest |torch - ONNX Runtime| over mu and sigma.
        padding: Largest change of a prompt's numbers between alone and padded beside a longer one.
        tolerance: What both had to stay below.
    """

    max_abs_diff: dict[str, float]
    padding: float
    tolerance: float


def measure_parity(
    model: LengthPredictor, runtime: ArtifactRuntime, *, tolerance: float, rng: np.random.Generator
) -> Parity:
    """Compares torch with the artifact on random tokens under random padding.

    Args:
        model: The predictor in eval mode.
        runtime: The artifact made from it.
        tolerance: Largest difference that passes, log tokens.
        rng: Draws tokens and lengths.

    Raises:
        TailcastError: A shape fails or differs by more than `tolerance`.
    """
    longest = model.config.max_length
    vocabulary: int = model.encoder.config.vocab_size  # type: ignore[union-attr,assignment]
    shapes = sorted({(batch, min(seq, longest)) for batch, seq in (*SHAPES, (1, longest))})
    differences = {}
    for batch, seq in shapes:
        prompts = _random_prompts(batch, seq, vocabulary, rng)
        difference = _difference(_torch(model, prompts), runtime.run(prompts))
        differences[f"{batch}x{seq}"] = difference
        _check(difference, tolerance, f"torch and ONNX Runtime at {batch} x {seq} tokens")
    prompts = _random_prompts(4, min(33, longest), vocabulary, rng)
    alone = [runtime.run([prompt]) for prompt in prompts]
    mu, sigma = (np.concatenate([one[part] for one in alone]) for part in (0, 1))
    padding = _difference((mu, sigma), runtime.run(prompts))
    _check(padding, tolerance, "a prompt alone and in a batch")
    return Parity(max_abs_diff=differences, padding=padding, tolerance=tolerance)


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


def _random_prompts(
    batch: int, seq: int, vocabulary: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    lengths = [seq, *rng.integers(1, seq + 1, size=batch - 1)]
    return [rng.integers(0, vocabulary, size=length, dtype=np.int64) for length in lengths]


def _torch(
    model: LengthPredictor, prompts: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    import torch

    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.from_numpy(prompt)
        mask[row, : len(prompt)] = 1
    with torch.no_grad():
        parameters = model(ids, mask)
    return parameters.mu.double().numpy(), parameters.sigma.double().numpy()


def _difference(
    one: tuple[NDArray[np.float64], NDArray[np.float64]],
    other: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> float:
    return float(max(np.abs(a - b).max() for a, b in zip(one, other, strict=True)))


def _check(difference: float, tolerance: float, what: str) -> None:
    if not difference <= tolerance:  # NaN fails too
        raise TailcastError(f"{what} differ by {difference:.3g} log tokens; allowed: {tolerance:.3g}")
