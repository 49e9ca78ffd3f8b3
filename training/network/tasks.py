"""Heads to train: the options of each (objective, weight, layers) and its loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from predictors.heads import HEADS, Tower
from scheduler_core.errors import InputError
from scheduler_core.lengths.quantiles import LEVELS as QUANTILE_LEVELS
from scheduler_core.prediction.urgency import LEVELS
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_ranges

if TYPE_CHECKING:
    from torch import Tensor

    from training.network.losses import LossInputs


@dataclass(frozen=True, kw_only=True)
class HeadTask:
    """Options common to all heads."""

    weight: float = 1.0
    """Weight of the head in the loss."""
    tower: Tower | None = None
    """Layers of this head; unset: the option `tower`."""

    def __post_init__(self) -> None:
        head = type(self).__name__.removesuffix("Task").lower()
        check_ranges(self, f"{head}.", weight=(POSITIVE, FINITE))

    def loss(self, score: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Losses of the head's examples (rows or prompts), from its scores, and their weights [N] each; weight 0 excludes
        an example."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LengthTask(HeadTask):
    """The distribution of the output length."""

    objective: Literal["nll", "crps", "mse"] = "nll"
    """nll: censored negative log-likelihood of the raw samples; crps: quantile losses of the raw samples in log tokens; mse: squared errors of fitted parameters, as in the TIE paper (at least 3 samples per prompt)."""
    nu: float = 3.5
    """Degrees of freedom; with learn_nu, their initial value."""
    learn_nu: bool = False
    """Also predict nu (objective nll)."""
    within: bool = False
    """Also predict sigma_within, the scale of the samples of one prompt without the predictor's error in mu. It is trained on rows with at least 3 samples, by the squared error of its z-score (objectives nll and crps)."""
    quantiles: bool = False
    """Predict 23 quantiles instead of a parametric distribution, together with the closest log-t (objective crps)."""
    sigma_weight_start: float = 3.0
    """Weight of sigma in the loss MSE(mu) + weight * MSE(sigma) in the first epoch (objective mse)."""
    sigma_weight_end: float = 4.0
    """Weight of sigma in the last epoch of the last stage; interpolated linearly in between."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weight = (0.0, FINITE)
        check_ranges(self, nu=(POSITIVE, FINITE), sigma_weight_start=weight, sigma_weight_end=weight)
        if self.within and self.objective == "mse":
            allowed = "false with objective mse, whose sigma is already the scale within a prompt"
            raise InputError("length.within", True, allowed)
        if self.objective != "nll" and self.learn_nu:
            raise InputError("length.objective", self.objective, "nll, with learn_nu")
        if self.objective != "crps" and self.quantiles:
            raise InputError("length.objective", self.objective, "crps, with quantiles")

    def loss(self, score: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood, CRPS, or squared errors of the z-scores of fitted mu and sigma (TIE)."""
        from training.network import losses

        batch, model = inputs.batch, inputs.model
        if self.objective == "mse":
            errors = (score[:, :2] - batch.fits[:, :2]) ** 2
            return errors[:, 0] + inputs.sigma_weight * errors[:, 1], batch.weight
        parameters = model.length_parameters(score)
        mu, sigma = parameters["mu"], parameters["sigma"]
        if self.quantiles:
            quantiles = parameters["quantiles"]
            loss = losses.pinball_loss(quantiles, quantiles.new_tensor(QUANTILE_LEVELS), batch.samples)
        elif self.objective == "crps":
            loss = losses.log_t_crps(mu, sigma, self.nu, batch.samples)
        else:
            nu = parameters.get("nu", mu.new_tensor(self.nu))
            loss = losses.log_t_nll(mu, sigma, nu, batch.samples)
        if self.within and inputs.auxiliary:
            loss = loss + losses.WITHIN_WEIGHT * losses.within_mse(score[:, -1], batch.fits[:, 2])
        return loss, batch.weight


@dataclass(frozen=True, kw_only=True)
class UrgencyTask(HeadTask):
    """Ordered urgency level of a request, trained on `urgency_data`."""

    levels: tuple[str, ...] = LEVELS
    """Names of the levels, the most urgent first."""
    odds: Literal["proportional", "free"] = "proportional"
    """proportional: one score compared with ascending thresholds; free: a separate score for each level, for levels that differ in kind of text."""

    def loss(self, score: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Ordinal cross entropy over the prompts with a label."""
        from training.network.losses import ordinal_cross_entropy

        return ordinal_cross_entropy(score, inputs.batch.level), inputs.batch.level_weight


@dataclass(frozen=True, kw_only=True)
class BucketTask(HeadTask):
    """Bucket (interval) of the output length."""

    edges: tuple[float, ...] | None = None
    """Bounds of the buckets in tokens, ascending; unset: quantiles of the training samples."""
    num_buckets: int = 10
    """Number of buckets if edges is unset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, "bucket.", num_buckets=(2, INTEGERS))

    def loss(self, score: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Cross entropy over the buckets."""
        from training.network.losses import bucket_cross_entropy

        head, batch = inputs.model.config.heads.bucket, inputs.batch
        assert head is not None
        return bucket_cross_entropy(score, score.new_tensor(head.edges), batch.samples), batch.weight


@dataclass(frozen=True, kw_only=True)
class RegressionTask(HeadTask):
    """Output length as a single number of tokens."""

    objective: Literal["l1", "mse"] = "l1"
    """Absolute (l1) or squared (mse) error of the z-score of ln(1 + tokens)."""

    def loss(self, score: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """L1 or squared error, with censored samples at their truncated length (SSJF)."""
        statistics, samples = inputs.model.normalization, inputs.batch.samples
        target = (samples.tokens.log1p() - statistics.regression_mean) / statistics.regression_std
        error = score.unsqueeze(-1) - target
        return samples.mean(error.abs() if self.objective == "l1" else error**2), inputs.batch.weight


@dataclass(frozen=True, kw_only=True)
class RankTask(HeadTask):
    """Score that orders requests by length, trained with ListMLE over the rows of a batch."""

    group_tokens: float = 10.0
    """Width in tokens of the intervals within which lengths count as equal."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, "rank.", group_tokens=(POSITIVE, FINITE))

    def loss(self, score: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """ListMLE over the rows of the batch, by mean length."""
        from training.network.losses import list_mle

        samples = inputs.batch.samples
        means = samples.mean(samples.tokens)
        return list_mle(score, means, group_tokens=self.group_tokens), inputs.batch.weight


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The heads to train; unset: the predictor does not have the head."""

    length: LengthTask | None = field(default_factory=LengthTask)
    """Head that predicts the distribution of the length."""
    urgency: UrgencyTask | None = None
    """Head that predicts the urgency level."""
    bucket: BucketTask | None = None
    """Head that predicts the length bucket."""
    regression: RegressionTask | None = None
    """Head that predicts the length as a single number."""
    rank: RankTask | None = None
    """Head that ranks requests by length."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the heads, in a fixed order."""
        return tuple(name for name in HEADS if getattr(self, name) is not None)

    @property
    def needs_rows(self) -> bool:
        """Whether a head is trained on output lengths."""
        return self.tasks != ("urgency",)

    @property
    def needs_fits(self) -> bool:
        """Whether an objective needs fitted parameters."""
        return self.length is not None and self.length.objective == "mse"
