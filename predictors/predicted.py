"""What an artifact predicts for some prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictions import LengthPrediction

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """Predictions for N prompts; None where the artifact has no such head.

    Attributes:
        mu, sigma, nu: Parameters of the log-t distribution of the length [N]; mu and sigma in log tokens.
        sigma_within: How far answers to the same prompt lie from each other, log tokens [N]; sigma holds the predictor's
            own error in mu as well.
        urgency: Probabilities of the urgency levels [N, K], the most urgent first.
        bucket: Probabilities of the length buckets [N, K].
        regression_tokens: Length in tokens [N].
        rank: Score [N], larger = longer; its scale has no meaning.
    """

    mu: Array | None = None
    sigma: Array | None = None
    nu: Array | None = None
    sigma_within: Array | None = None
    urgency: Array | None = None
    bucket: Array | None = None
    regression_tokens: Array | None = None
    rank: Array | None = None

    def __len__(self) -> int:
        return next(len(values) for values in self.arrays().values())

    def arrays(self) -> dict[str, Array]:
        """The arrays that are there, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: values for name, values in found.items() if values is not None}

    def rows(self) -> list[PredictedRow]:
        """One prediction per prompt, as plain numbers."""
        found: dict[str, list[Any]] = {name: values.tolist() for name, values in self.arrays().items()}
        columns = zip(*found.values(), strict=True)
        return [PredictedRow(**dict(zip(found, numbers, strict=True))) for numbers in columns]

    @classmethod
    def of(cls, arrays: Mapping[str, Array], *, nu: float | None) -> Predicted:
        """From the outputs of a graph by name; `nu` is the fixed number of degrees of freedom, if it is fixed."""
        found = cls(**arrays)
        if nu is not None and found.mu is not None:
            found = replace(found, nu=np.full(len(found.mu), nu))
        return found

    @classmethod
    def gathered(cls, parts: Sequence[Predicted], rows: Sequence[Sequence[int]]) -> Predicted:
        """Puts parts together.

        Args:
            parts: One or more predictions of the same artifact.
            rows: Which rows of the whole each part is.
        """
        order = np.concatenate([np.asarray(numbers, dtype=np.int64) for numbers in rows])
        places = np.argsort(order)
        return cls(
            **{
                name: np.concatenate([part.arrays()[name] for part in parts])[places]
                for name in parts[0].arrays()
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """The prediction for one prompt; fields as those of `Predicted`."""

    mu: float | None = None
    sigma: float | None = None
    nu: float | None = None
    sigma_within: float | None = None
    urgency: Sequence[float] | None = None
    bucket: Sequence[float] | None = None
    regression_tokens: float | None = None
    rank: float | None = None


def check_range(found: PredictedRow) -> None:
    """Raises TailcastError for numbers that are not the caller's fault and that no scheduler can use."""
    if found.mu is not None and found.sigma is not None and found.nu is not None:
        try:
            LengthPrediction(found.mu, found.sigma, found.nu)
        except InputError as error:
            raise TailcastError(
                f"the model gave mu = {found.mu}, sigma = {found.sigma}, nu = {found.nu}: {error}"
            ) from error
    for name in ("sigma_within", "regression_tokens", "rank"):
        value = getattr(found, name)
        if value is not None and not math.isfinite(value):
            raise TailcastError(f"the model gave {name} = {value}")
    for name in ("urgency", "bucket"):
        values = getattr(found, name)
        if values is not None and not (min(values) >= 0 and abs(math.fsum(values) - 1) <= 1e-3):
            raise TailcastError(f"the model gave {name} = {values}")
