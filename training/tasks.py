"""What a predictor is trained to give: one entry for each head, with its objective, weight and layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TowerOptions:
    """Layers of a head."""

    hidden_sizes: tuple[int, ...] = (256, 256, 128)
    """Widths of the hidden layers; none: one linear layer."""
    dropouts: tuple[float, ...] = (0.2, 0.2, 0.1)
    """Dropout after each hidden layer."""
    activation: Literal["gelu", "relu"] = "gelu"
    """Between the layers."""
    layer_norm: bool = True
    """A LayerNorm after all hidden layers but the last."""

    def __post_init__(self) -> None:
        for name in ("hidden_sizes", "dropouts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


def _check_weight(head: str, weight: float) -> None:
    if not 0 < weight < float("inf"):
        raise InputError(f"{head}.weight", weight, "a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class LengthTask:
    """The distribution of the answer's length."""

    objective: Literal["nll", "crps", "mse"] = "nll"
    """nll: likelihood of the raw answers, cut ones as cut; crps: quantile losses of the raw answers in log tokens; mse: the paper's squared errors of parameters fitted to at least 3 answers of each prompt."""
    weight: float = 1.0
    """Weight of the head in the loss."""
    nu: float = 3.5
    """Degrees of freedom; with learn_nu what an untrained head gives."""
    learn_nu: bool = False
    """Predict nu too (objective nll)."""
    within: bool = False
    """Predict sigma_within too, the spread of answers to one prompt without the predictor's own error in mu; learnt from rows with at least 3 answers, by the squared error of its z-score (objectives nll and crps)."""
    within_weight: float = 0.3
    """Weight of that squared error."""
    integers: bool = False
    """Take a length x as the interval from x - 1/2 to x + 1/2 (objective nll)."""
    sigma_weight_start: float = 3.0
    """Weight of sigma in the loss MSE(mu) + weight * MSE(sigma), in the first epoch (objective mse)."""
    sigma_weight_end: float = 4.0
    """The same in the last epoch of the last stage; linear in between."""
    tower: TowerOptions | None = None
    """Layers, if they differ from `tower`."""

    def __post_init__(self) -> None:
        _check_weight("length", self.weight)
        for name in ("sigma_weight_start", "sigma_weight_end"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(name, getattr(self, name), "a finite number, not negative")
        if not 0 < self.nu < float("inf"):
            raise InputError("nu", self.nu, "a finite number above 0")
        if self.within and self.objective == "mse":
            raise InputError(
                "length.within", True, "false with objective mse, whose sigma is the spread within a prompt"
            )
        if not 0 < self.within_weight < float("inf"):
            raise InputError("length.within_weight", self.within_weight, "a finite number above 0")
        if self.objective != "nll" and (self.learn_nu or self.integers):
            raise InputError("length.objective", self.objective, "nll, with learn_nu or integers")


@dataclass(frozen=True, kw_only=True)
class UrgencyTask:
    """How urgent a request is, by ordered levels; learnt from `urgency_data`."""

    weight: float = 1.0
    """Weight of the head in the loss."""
    levels: tuple[str, ...] = ("emergency", "interactive", "standard", "batch", "background")
    """Names of the levels, the most urgent first."""
    odds: Literal["proportional", "free"] = "proportional"
    """proportional: one number against ascending thresholds; free: a score for each level, for levels that are different kinds of text."""
    tower: TowerOptions | None = None
    """Layers, if they differ from `tower`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        _check_weight("urgency", self.weight)


@dataclass(frozen=True, kw_only=True)
class BucketTask:
    """Which of several intervals the length falls into."""

    weight: float = 1.0
    """Weight of the head in the loss."""
    edges: tuple[float, ...] | None = None
    """Bounds of the buckets in tokens, ascending; unset: quantiles of the training answers."""
    num_buckets: int = 10
    """Number of buckets where the edges are quantiles."""
    tower: TowerOptions | None = None
    """Layers, if they differ from `tower`."""

    def __post_init__(self) -> None:
        if self.edges is not None:
            object.__setattr__(self, "edges", tuple(float(edge) for edge in self.edges))
        _check_weight("bucket", self.weight)
        if self.num_buckets < 2:
            raise InputError("bucket.num_buckets", self.num_buckets, "a whole number of at least 2")


@dataclass(frozen=True, kw_only=True)
class RegressionTask:
    """One number of tokens."""

    objective: Literal["l1", "mse"] = "l1"
    """Absolute or squared error of the z-score of ln(1 + tokens)."""
    weight: float = 1.0
    """Weight of the head in the loss."""
    tower: TowerOptions | None = None
    """Layers, if they differ from `tower`."""

    def __post_init__(self) -> None:
        _check_weight("regression", self.weight)


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """A score that orders requests by length; ListMLE over the rows of a batch."""

    group_tokens: float = 10.0
    """Lengths within the same group of this many tokens count as equal."""
    weight: float = 1.0
    """Weight of the head in the loss."""
    tower: TowerOptions | None = None
    """Layers, if they differ from `tower`."""

    def __post_init__(self) -> None:
        _check_weight("rank", self.weight)
        if not 0 < self.group_tokens < float("inf"):
            raise InputError("rank.group_tokens", self.group_tokens, "a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class ConditioningOptions:
    """What the heads see beside the prompt: the served model and the sampling temperature. Urgency sees neither."""

    width: int = 32
    """Width of the embedding of a served model."""
    temperature: bool = True
    """See the sampling temperature."""
    served_model_dropout: float = 0.1
    """Probability that a training row hides its served model, so that an unknown one can be predicted for; 0: predictions for unknown served models are refused."""

    def __post_init__(self) -> None:
        if not 0 <= self.served_model_dropout < 1:
            raise InputError(
                "conditioning.served_model_dropout", self.served_model_dropout, "a number from 0 to below 1"
            )
