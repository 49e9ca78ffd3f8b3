"""A predictor out of any folder: a checkpoint of `train`, an artifact of `export-onnx`, or a lexical artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError

FloatArray = NDArray[np.float64]
MANIFEST, CONFIG, TRAINING = "manifest.json", "config.json", "training.json"
#: Degrees of freedom that answers are fitted with where a predictor has no distribution of its own.
DEFAULT_NU = 3.5


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a predictor says of G rows; what it does not predict is None.

    Attributes:
        mu, sigma: Parameters of the log-t distribution [G], log tokens.
        nu: Its degrees of freedom, one for all or [G].
        sigma_within: How far answers to the same prompt lie from each other [G], log tokens; sigma holds the predictor's
            own error in mu as well.
        bucket: Probabilities of length buckets [G, K].
        regression_tokens: One length in tokens [G].
        rank: Score [G], larger = longer.
    """

    mu: FloatArray | None = None
    sigma: FloatArray | None = None
    nu: float | FloatArray = DEFAULT_NU
    bucket: FloatArray | None = None
    regression_tokens: FloatArray | None = None
    rank: FloatArray | None = None
    sigma_within: FloatArray | None = None

    def take(self, rows: NDArray[np.intp]) -> Prediction:
        """The prediction of some of the rows."""

        def part(values: FloatArray | None) -> FloatArray | None:
            return None if values is None else values[rows]

        nu = self.nu if isinstance(self.nu, float | int) else self.nu[rows]
        return Prediction(
            part(self.mu),
            part(self.sigma),
            nu,
            part(self.bucket),
            part(self.regression_tokens),
            part(self.rank),
            part(self.sigma_within),
        )

    def ordering(self) -> tuple[str, FloatArray]:
        """What requests are ordered by: the head's name and a score [G], larger = longer.

        The median of the distribution, or else the regression's tokens, the rank's score, or the expected bucket.

        Raises:
            InputError: No head predicts anything about the length.
        """
        if self.mu is not None:
            return "length", self.mu
        if self.regression_tokens is not None:
            return "regression", self.regression_tokens
        if self.rank is not None:
            return "rank", self.rank
        if self.bucket is not None:
            return "bucket", self.bucket @ np.arange(self.bucket.shape[1], dtype=np.float64)
        raise InputError("predictor, heads", "urgency alone", "a head that predicts the length")


Predict = Callable[[Sequence[str], Sequence[str | None], Sequence[float | None]], Prediction]


@dataclass(frozen=True, slots=True)
class OpenedPredictor:
    """A predictor out of either kind of folder.

    Attributes:
        kind: "checkpoint", "artifact" or "lexical artifact".
        name: What identifies it.
        nu: Degrees of freedom of its distributions if they are all the same, None if it has none or learns them.
        bucket_edges: Of the bucket head, in tokens.
        served_models: Those it tells apart; empty: it does not see the served model.
        data: What it was trained on: name, SHA-256, split, baselines.
        predict: (prompts, served models, temperatures), each [G], to the prediction.
        conversations: It reads whole conversations, not the last user message alone.
        folder: Where it came from; None for a predictor made in a program.
    """

    kind: str
    name: Mapping[str, str]
    nu: float | None
    predict: Predict
    bucket_edges: tuple[float, ...] = ()
    served_models: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    conversations: bool = False
    folder: Path | None = None

    @property
    def fit_nu(self) -> float:
        """Degrees of freedom to fit answers with, so that parameters can be compared."""
        return DEFAULT_NU if self.nu is None else self.nu


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a predictor is run: prompts per call, threads (None: one for an artifact, torch's choice else), bars."""

    batch_size: int = 16
    threads: int | None = None
    progress: bool = True


def open_predictor(folder: str | Path, options: RunOptions, field: str = "predictor") -> OpenedPredictor:
    """Opens a folder as what it is: an artifact has a manifest, a checkpoint has none.

    Args:
        folder: The folder.
        options: How it is run.
        field: Name of the option that gave the folder, for messages.

    Raises:
        InputError: It is neither, or it is broken.
    """
    path = Path(folder)
    if (path / MANIFEST).is_file():
        from training.evaluating.artifacts import open_artifact_predictor

        return open_artifact_predictor(path, options)
    if (path / CONFIG).is_file():
        from training.evaluating.checkpoints import open_checkpoint_predictor

        return open_checkpoint_predictor(path, options)
    raise InputError(field, str(path), "an artifact folder of export-onnx or a checkpoint folder of train")


def distinct(*columns: Sequence[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First row of each different combination of values [D], and the number of each row's combination [G]."""
    numbers: dict[tuple[Any, ...], int] = {}
    first: list[int] = []
    of_row = np.empty(len(columns[0]), dtype=np.intp)
    for row, values in enumerate(zip(*columns, strict=True)):
        number = numbers.setdefault(values, len(numbers))
        if number == len(first):
            first.append(row)
        of_row[row] = number
    return np.array(first, dtype=np.intp), of_row
