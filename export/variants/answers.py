"""How a variant's answers differ from the artifact's, and from its own in other company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export.variants.prompts import Row
from predictors.runtime import ArtifactRuntime

#: Prompts in a batch of strangers.
BATCH = 8
PROBABILITIES = ("urgency", "bucket")

Outputs = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Differences of answers, by output of the graph, over some prompts.

    Attributes:
        to_artifact: Root of the mean squared difference to the artifact's answers, as a share of their spread.
        probability: Of probabilities, mean absolute difference.
        batch_mates: Largest change of an answer between alone and in a batch, as a share of the spread.
    """

    to_artifact: dict[str, float]
    probability: dict[str, float]
    batch_mates: dict[str, float]


class AnswerCheck:
    """Compares runtimes on the same prompts.

    Args:
        reference: The artifact's runtime.
        rows: Prompts with conditions, at least two different ones.
    """

    def __init__(self, reference: ArtifactRuntime, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._read = reference.tokenizer([row.prompt for row in rows])
        self._wanted = self._alone(reference)
        # An output that does not vary over these prompts is measured against 1.
        self._spread = {name: _spread(values) for name, values in self._wanted.items()}

    def compare(self, runtime: ArtifactRuntime) -> Differences:
        """What another runtime answers."""
        alone = self._alone(runtime)
        batched = self._batched(runtime)
        return Differences(
            to_artifact={
                name: float(np.sqrt(((alone[name] - wanted) ** 2).mean()) / self._spread[name])
                for name, wanted in self._wanted.items()
            },
            probability={
                name: float(np.abs(alone[name] - wanted).mean())
                for name, wanted in self._wanted.items()
                if name in PROBABILITIES
            },
            batch_mates={
                name: float(np.abs(batched[name] - values).max() / self._spread[name])
                for name, values in alone.items()
            },
        )

    def _alone(self, runtime: ArtifactRuntime) -> Outputs:
        return self._run(runtime, [[number] for number in range(len(self._rows))])

    def _batched(self, runtime: ArtifactRuntime) -> Outputs:
        # In the file's order, so that short and long prompts meet and most rows are padded.
        numbers = range(len(self._rows))
        return self._run(
            runtime, [list(numbers[start : start + BATCH]) for start in range(0, len(numbers), BATCH)]
        )

    def _run(self, runtime: ArtifactRuntime, batches: Sequence[Sequence[int]]) -> Outputs:
        parts = [
            runtime.run(
                [self._read[number].values for number in batch],
                [self._rows[number].served_model for number in batch],
                [self._rows[number].temperature for number in batch],
                lexical=[self._read[number].lexical for number in batch],
            ).arrays()
            for batch in batches
        ]
        names = [tensor.name for tensor in runtime.artifact.manifest.outputs]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _spread(values: NDArray[np.float64]) -> float:
    found = float(values.std(axis=0).max())
    return found if found > 0 else 1.0
