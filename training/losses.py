"""Losses of all heads on raw output lengths, fitted parameters and labels, and the registry `LOSSES`.

Censored samples (truncated at max_tokens) enter likelihoods as lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from predictors.modules import PromptPredictor
from training.config import TrainConfig
from training.data import SampleLengths, TrainingBatch
from training.student_t import log_density, log_interval, log_survival

# Quantile levels of the objective crps.
NUM_QUANTILES = 64


def log_t_nll(
    mu: Tensor, sigma: Tensor, nu: Tensor, samples: SampleLengths, *, integers: bool = False
) -> Tensor:
    """Mean negative log-likelihood of each row's samples under X = exp(mu + sigma T), T Student-t.

    A finished sample x contributes -ln t_nu((ln x - mu) / sigma) + ln sigma + ln x, one censored at c -ln P(X > c).
    Computed in float64, whatever comes in; gradients are finite for lengths of 1 to 15000 tokens, sigma of 1e-3 to 5
    and nu of 1 to 100. The derivative by nu of terms with tails is numerical, see `student_t`.

    Args:
        mu, sigma: Log tokens [R].
        nu: Degrees of freedom [R] or [].
        samples: Of the rows.
        integers: Take a finished length x as the interval from x - 1/2 to x + 1/2, whose probability is the
            likelihood; it is then never above 1, also where all samples of a row are equal.

    Returns:
        Nats per sample, float32 [R].
    """
    tokens = samples.tokens.double()
    mu, sigma = mu.double().unsqueeze(-1), sigma.double().unsqueeze(-1)
    nu = nu.double().expand(mu.shape[:-1]).unsqueeze(-1)
    if integers:
        low, high = (torch.log(tokens + step) for step in (-0.5, 0.5))
        loss = -log_interval((low - mu) / sigma, (high - mu) / sigma, nu)
    else:
        logs = torch.log(tokens)
        loss = -log_density((logs - mu) / sigma, nu) + torch.log(sigma) + logs
    loss = torch.where(samples.present & samples.finished, loss, torch.zeros_like(loss))
    censored = samples.present & ~samples.finished
    if bool(censored.any()):
        # Few samples are censored, and a tail costs far more than a density.
        row, _ = torch.nonzero(censored, as_tuple=True)
        t = (torch.log(tokens[censored]) - mu[row, 0]) / sigma[row, 0]
        loss = loss.masked_scatter(censored, -log_survival(t, nu[row, 0]))
    return samples.mean(loss).float()


def standard_quantiles(nu: float, num_levels: int = NUM_QUANTILES) -> tuple[Tensor, Tensor]:
    """Levels (k + 1/2) / K and the Student-t quantiles there, float32 [K] each."""
    from scipy.special import stdtrit

    levels = (np.arange(num_levels) + 0.5) / num_levels
    return torch.from_numpy(levels).float(), torch.from_numpy(stdtrit(nu, levels)).float()


def log_t_crps(mu: Tensor, sigma: Tensor, nu: float, samples: SampleLengths) -> Tensor:
    """Mean CRPS of each row's samples in log tokens, float32 [R], from mu and sigma in log tokens [R].

    CRPS(F, y) = 2 * integral over tau in (0, 1) of the pinball loss of the tau-quantile at y (Gneiting and Raftery
    2007), by the midpoint rule on equal levels. In log tokens because the distribution of tokens has no finite mean (nu
    = 3.5 makes exp(sigma T) heavier than any power). Samples and quantiles are both limited to the row's max_tokens,
    which keeps the score proper for what can be observed.
    """
    levels, standard = (values.to(mu.device) for values in standard_quantiles(nu))
    limit = torch.log(samples.max_tokens).unsqueeze(-1)
    quantiles = torch.minimum(mu.float().unsqueeze(-1) + sigma.float().unsqueeze(-1) * standard, limit)
    observed = torch.minimum(torch.log(samples.tokens), limit)
    excess = observed.unsqueeze(-1) - quantiles.unsqueeze(-2)
    pinball = torch.maximum(levels * excess, (levels - 1) * excess)
    return samples.mean(2 * pinball.mean(dim=-1))


def within_mse(score: Tensor, target: Tensor) -> Tensor:
    """Squared error of sigma_within's z-score [R], times the number of rows over those with a target; 0 without one."""
    has_target = torch.isfinite(target)
    error = torch.where(has_target, score.float() - torch.where(has_target, target, 0.0), 0.0) ** 2
    return error * (len(target) / has_target.sum().clamp_min(1))


def sigma_weight(start: float, end: float, epoch: int, num_epochs: int) -> float:
    """Weight of sigma in TIE's MSE(mu) + w MSE(sigma), linear from the first epoch to the last of all stages."""
    return start + (end - start) * epoch / max(num_epochs - 1, 1)


def bucket_cross_entropy(logits: Tensor, edges: Tensor, samples: SampleLengths) -> Tensor:
    """Mean cross entropy of each row's samples over length buckets, nats [R]; a censored one contributes -ln P(bucket or later).

    Args:
        logits: Scores of K buckets [R, K].
        edges: Tokens, ascending [K - 1]; bucket k holds edges[k - 1] <= length < edges[k].
        samples: Of the rows.
    """
    bucket = torch.bucketize(samples.tokens, edges.to(samples.tokens), right=True)
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_or_later = torch.logcumsumexp(log_p.flip(-1), dim=-1).flip(-1)
    log_likelihood = torch.where(samples.finished, log_p.gather(1, bucket), log_or_later.gather(1, bucket))
    return -samples.mean(log_likelihood)


def ordinal_cross_entropy(logits: Tensor, level: Tensor) -> Tensor:
    """Mean binary cross entropy [B] of the K - 1 questions "is the level above k?".

    Args:
        logits: Of P(level > k) [B, K - 1].
        level: 0 to K - 1, int64 [B].
    """
    above = (level.unsqueeze(-1) > torch.arange(logits.shape[-1], device=level.device)).float()
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), above, reduction="none").mean(-1)


def list_mle(score: Tensor, tokens: Tensor, *, group_tokens: float) -> Tensor:
    """ListMLE: negative log-likelihood of each row's position in the order of the batch, longest first, [R].

    Plackett-Luce model of the scores (Xia et al. 2008; LTR for LLM scheduling). Lengths are labels in groups of
    `group_tokens`, so that differences of sampling noise are no order. Differs: rows with the same label are not put in
    a random order, each is compared with the whole group and all shorter ones (Breslow's form), so the loss is a
    function of the data.

    Args:
        score: Larger is longer [R].
        tokens: Lengths [R].
        group_tokens: Width of a label.
    """
    label = torch.floor(tokens / group_tokens)
    ordered, order = torch.sort(label, stable=True)
    score = score.float()
    sums = torch.logcumsumexp(score[order], dim=0)
    last_of_label = torch.searchsorted(ordered, label, right=True) - 1
    return sums[last_of_label] - score


class HeadLoss(NamedTuple):
    """Losses of one head's examples, rows or prompts, and their weights [N]; weight 0: no example."""

    values: Tensor
    weights: Tensor

    def mean(self) -> Tensor:
        """Weighted sum over the number of examples; 0 without any.

        Not over the sum of the weights: a batch of light examples would then count as much as one of heavy ones.
        """
        return (self.values * self.weights).sum() / (self.weights > 0).sum().clamp_min(1)

    def sums(self) -> Tensor:
        """Sum over the examples, each counted once, and their number [2]."""
        is_example = self.weights > 0
        return torch.stack(
            [torch.where(is_example, self.values, 0.0).sum(), is_example.sum().to(self.values)]
        )


class LossInputs(NamedTuple):
    """Everything a head's loss is computed from; `sigma_weight` is that of the objective mse."""

    config: TrainConfig
    model: PromptPredictor
    batch: TrainingBatch
    sigma_weight: float = 1.0


def length_loss(score: Tensor, inputs: LossInputs) -> HeadLoss:
    """Of the length head: likelihood, CRPS, or TIE's squared errors of the z-scores of fitted mu and sigma."""
    options, batch, model = inputs.config.length, inputs.batch, inputs.model
    head = model.config.heads.length
    assert options is not None and head is not None  # noqa: PT018
    if options.objective == "mse":
        errors = (score[:, :2] - batch.fits[:, :2]) ** 2
        return HeadLoss(errors[:, 0] + inputs.sigma_weight * errors[:, 1], batch.weight)
    parameters = model.length_parameters(score)
    mu, sigma = parameters["mu"], parameters["sigma"]
    if options.objective == "crps":
        loss = log_t_crps(mu, sigma, options.nu, batch.samples)
    else:
        nu = parameters.get("nu", mu.new_tensor(head.nu))
        loss = log_t_nll(mu, sigma, nu, batch.samples, integers=options.integers)
    if options.within:
        loss = loss + options.within_weight * within_mse(score[:, -1], batch.fits[:, 2])
    return HeadLoss(loss, batch.weight)


def urgency_loss(score: Tensor, inputs: LossInputs) -> HeadLoss:
    """Of the urgency head, over the prompts with a label."""
    return HeadLoss(ordinal_cross_entropy(score, inputs.batch.level), inputs.batch.level_weight)


def bucket_loss(score: Tensor, inputs: LossInputs) -> HeadLoss:
    """Of the bucket head."""
    head = inputs.model.config.heads.bucket
    assert head is not None
    return HeadLoss(
        bucket_cross_entropy(score, torch.tensor(head.edges), inputs.batch.samples), inputs.batch.weight
    )


def regression_loss(score: Tensor, inputs: LossInputs) -> HeadLoss:
    """L1 or squared error of the z-score of ln(1 + tokens); a censored sample counts as it is. Source: SSJF."""
    options, statistics, samples = inputs.config.regression, inputs.model.normalization, inputs.batch.samples
    assert options is not None
    target = (torch.log1p(samples.tokens) - statistics.regression_mean) / statistics.regression_std
    error = score.unsqueeze(-1) - target
    loss = samples.mean(error.abs() if options.objective == "l1" else error**2)
    return HeadLoss(loss, inputs.batch.weight)


def rank_loss(score: Tensor, inputs: LossInputs) -> HeadLoss:
    """Of the rank head, over the rows of the batch."""
    options, samples = inputs.config.rank, inputs.batch.samples
    assert options is not None
    loss = list_mle(score, samples.mean(samples.tokens), group_tokens=options.group_tokens)
    return HeadLoss(loss, inputs.batch.weight)


#: Head -> its loss of the head's scores; the heads themselves: `predictors.modules.HEADS`.
LOSSES: dict[str, Callable[[Tensor, LossInputs], HeadLoss]] = {
    "length": length_loss,
    "urgency": urgency_loss,
    "bucket": bucket_loss,
    "regression": regression_loss,
    "rank": rank_loss,
}
