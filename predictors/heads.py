"""Heads of a predictor: their names, layers, output tensors, and predictions as arrays and records. Networks: `modules.heads`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import (
    BucketPrediction,
    LengthPrediction,
    PointPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)
from scheduler_core.ranges import check_choice

Array = NDArray[np.float64]

Head = Literal["length", "urgency", "bucket", "regression", "rank"]
HEADS: tuple[Head, ...] = get_args(Head)


@dataclass(frozen=True)
class Tower:
    """Layers of a head; the defaults are those of TIE."""

    hidden_sizes: tuple[int, ...] = (256, 256, 128)
    """Widths of the hidden layers; empty: a single linear layer."""
    dropouts: tuple[float, ...] = (0.2, 0.2, 0.1)
    """Dropout rate after each hidden layer."""
    activation: Literal["gelu", "relu"] = "gelu"
    """Activation function between the layers."""
    layer_norm: bool = True
    """Apply LayerNorm after every hidden layer except the last."""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.hidden_sizes):
            raise InputError("hidden_sizes", self.hidden_sizes, "integers > 0")
        if len(self.dropouts) != len(self.hidden_sizes) or not all(0 <= rate < 1 for rate in self.dropouts):
            raise InputError("dropouts", self.dropouts, f"{len(self.hidden_sizes)} numbers >= 0 and < 1")
        check_choice("activation", self.activation, ("gelu", "relu"))


class HeadFields(Protocol):
    """Fields of a manifest that tensors and records depend on; see `Manifest`."""

    heads: tuple[Head, ...]
    nu: float | None
    within: bool
    quantile_levels: tuple[float, ...]
    urgency_levels: tuple[str, ...]
    bucket_edges: tuple[float, ...]
    abstain_threshold: float | None
    artifact_id: str
    artifact_version: str


def output_tensors(manifest: HeadFields) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, unit and shape of a row of each output tensor of a graph with `manifest.heads`, in order; all float32."""
    length: list[tuple[str, str, tuple[int, ...]]] = [("mu", "log tokens", ()), ("sigma", "log tokens", ())]
    length += [("nu", "degrees of freedom", ())] if manifest.nu is None else []
    length += [("sigma_within", "log tokens", ())] if manifest.within else []
    length += (
        [("quantiles", "log tokens", (len(manifest.quantile_levels),))] if manifest.quantile_levels else []
    )
    tensors: dict[Head, Sequence[tuple[str, str, tuple[int, ...]]]] = {
        "length": length,
        "urgency": [("urgency", "probability", (len(manifest.urgency_levels),))],
        "bucket": [("bucket", "probability", (len(manifest.bucket_edges) + 1,))],
        "regression": [("regression_tokens", "tokens", ())],
        "rank": [("rank", "none; larger = longer", ())],
    }
    return [tensor for head in HEADS if head in manifest.heads for tensor in tensors[head]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """Predictions for N prompts; None if the artifact does not have the head.

    Attributes:
        mu, sigma, nu: Parameters of the log-t distribution of the length [N]; mu and sigma in log tokens. One nu is
            shared by all.
        sigma_within: Scale of lengths of one prompt, log tokens [N]; sigma also includes the error in mu.
        quantiles: Quantiles of the length at the manifest's quantile_levels, log tokens [N, K].
        urgency: Probabilities of the urgency levels [N, K], most urgent first.
        bucket: Probabilities of the length buckets [N, K].
        regression_tokens: Length in tokens [N].
        rank: Score [N], larger = longer, on an arbitrary scale.
    """

    mu: Array | None = None
    sigma: Array | None = None
    nu: Array | float | None = None
    sigma_within: Array | None = None
    quantiles: Array | None = None
    urgency: Array | None = None
    bucket: Array | None = None
    regression_tokens: Array | None = None
    rank: Array | None = None

    def __len__(self) -> int:
        return next(len(values) for values in self.arrays().values())

    def arrays(self) -> dict[str, Array]:
        """The predicted arrays by name; a shared nu is repeated."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.nu, float) and self.mu is not None:
            arrays["nu"] = np.full(len(self.mu), self.nu)
        return {name: values for name, values in arrays.items() if values is not None}

    def ordering(self) -> tuple[str, Array]:
        """Name of the head that orders requests, and its score [N], larger = longer; InputError without such a head.

        The score is the first available of: mu, regression tokens, rank score, expected bucket.
        """
        if self.mu is not None:
            return "length", self.mu
        if self.regression_tokens is not None:
            return "regression", self.regression_tokens
        if self.rank is not None:
            return "rank", self.rank
        if self.bucket is not None:
            return "bucket", self.bucket @ np.arange(self.bucket.shape[1], dtype=np.float64)
        raise InputError("predictor, heads", ", ".join(self.arrays()), "a head that predicts the length")

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of each prompt by name, for `ArtifactRuntime.prediction`."""
        columns = {name: values.tolist() for name, values in self.arrays().items()}
        return [dict(zip(columns, numbers, strict=True)) for numbers in zip(*columns.values(), strict=True)]

    @classmethod
    def of(cls, arrays: Mapping[str, Array], *, nu: float | None) -> Predicted:
        """From the outputs of a graph by name; `nu` is the number of degrees of freedom if it is fixed."""
        if nu is not None and "mu" in arrays:
            return cls(**arrays, nu=np.full(len(arrays["mu"]), nu))
        return cls(**arrays)


def record_of(row: Mapping[str, Any], manifest: HeadFields) -> Prediction:
    """The prediction of one prompt from its numbers (see `Predicted.rows`); InputError if one is out of range."""
    heads: dict[str, Any] = {}
    if "mu" in row:
        parameters = (row["mu"], row["sigma"], row["nu"])
        artifact = (manifest.artifact_id, manifest.artifact_version)
        heads["length"] = LengthPrediction(*parameters, *artifact, tuple(row.get("quantiles", ())))
    if "urgency" in row:
        probabilities = _distribution("urgency", row["urgency"])
        heads["urgency"] = UrgencyPrediction(probabilities, manifest.abstain_threshold)
    if "bucket" in row:
        heads["bucket"] = BucketPrediction(_distribution("bucket", row["bucket"]), manifest.bucket_edges)
    if "regression_tokens" in row:
        # An output has at least one token.
        heads["point"] = PointPrediction(max(row["regression_tokens"], 1.0))
    if "rank" in row:
        heads["rank"] = RankPrediction(row["rank"])
    return Prediction(**heads)


def _distribution(name: str, probabilities: Sequence[float]) -> tuple[float, ...]:
    """Probabilities normalized to a sum of 1, which half precision only approximates."""
    total = math.fsum(probabilities)
    if not (min(probabilities) >= 0 and abs(total - 1) <= 1e-3):
        raise InputError(name, probabilities, "numbers >= 0 of sum 1")
    return tuple(probability / total for probability in probabilities)
