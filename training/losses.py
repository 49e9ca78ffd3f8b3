"""Losses of all heads on raw output lengths, fitted parameters and labels, and `head_loss`, which has one for each head.

Censored samples (truncated at max_tokens) enter likelihoods as lower bounds.
"""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from predictors.modules.predictor import PromptPredictor
from scheduler_core.lengths.quantiles import LEVELS
from training.config import BucketTask, HeadTask, LengthTask, RankTask, RegressionTask, UrgencyTask
from training.data import SampleLengths, TrainingBatch
from training.student_t import log_density, log_survival

# Quantile levels of the objective crps.
NUM_QUANTILES = 64
# Weight of the squared error of sigma_within.
WITHIN_WEIGHT = 0.3


def log_t_nll(mu: Tensor, sigma: Tensor, nu: Tensor, samples: SampleLengths) -> Tensor:
    """Mean negative log-likelihood of each row's samples under X = exp(mu + sigma T), T Student-t.

    A finished sample x contributes -ln t_nu((ln x - mu) / sigma) + ln sigma + ln x, one censored at c -ln P(X > c).
    Computed in float64, whatever comes in; gradients are finite for lengths of 1 to 15000 tokens, sigma of 1e-3 to 5
    and nu of 1 to 100. The derivative by nu of terms with tails is numerical, see `student_t`.

    Args:
        mu, sigma: Log tokens [R].
        nu: Degrees of freedom [R] or [].
        samples: Of the rows.

    Returns:
        Nats per sample, float32 [R].
    """
    tokens = samples.tokens.double()
    mu, sigma = mu.double().unsqueeze(-1), sigma.double().unsqueeze(-1)
    nu = nu.double().expand(mu.shape[:-1]).unsqueeze(-1)
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


def log_t_crps(mu: Tensor, sigma: Tensor, nu: float, samples: SampleLengths) -> Tensor:
    """Mean CRPS of each row's samples in log tokens, float32 [R], from mu and sigma in log tokens [R].

    CRPS(F, y) = 2 * integral over tau in (0, 1) of the pinball loss of the tau-quantile at y (Gneiting and Raftery
    2007), by the midpoint rule on equal levels, as in `pinball_loss`. In log tokens because the distribution of tokens has
    no finite mean (nu = 3.5 makes exp(sigma T) heavier than any power).
    """
    at = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    levels, standard = (torch.from_numpy(values).float().to(mu.device) for values in (at, stdtrit(nu, at)))
    return pinball_loss(mu.float().unsqueeze(-1) + sigma.float().unsqueeze(-1) * standard, levels, samples)


def pinball_loss(quantiles: Tensor, levels: Tensor, samples: SampleLengths) -> Tensor:
    """Twice the mean pinball loss of each row's samples over quantiles [R, K] of log tokens at levels [K], [R].

    Samples and quantiles are both limited to the row's max_tokens, which keeps the score proper for what can be observed.
    """
    limit = torch.log(samples.max_tokens).unsqueeze(-1)
    observed = torch.minimum(torch.log(samples.tokens), limit)
    excess = observed.unsqueeze(-1) - torch.minimum(quantiles, limit).unsqueeze(-2)
    pinball = torch.maximum(levels * excess, (levels - 1) * excess)
    return samples.mean(2 * pinball.mean(dim=-1))


def within_mse(score: Tensor, target: Tensor) -> Tensor:
    """Squared error of sigma_within's z-score [R], times the number of rows over those with a target; 0 without one."""
    has_target = torch.isfinite(target)
    error = torch.where(has_target, score.float() - torch.where(has_target, target, 0.0), 0.0) ** 2
    return error * (len(target) / has_target.sum().clamp_min(1))


def bucket_cross_entropy(logits: Tensor, edges: Tensor, samples: SampleLengths) -> Tensor:
    """Mean cross entropy of each row's samples over length buckets, nats [R]; a censored one contributes -ln P(bucket or later).

    Bucket k of `logits` [R, K] holds edges[k - 1] <= tokens < edges[k].
    """
    bucket = torch.bucketize(samples.tokens, edges.to(samples.tokens), right=True)
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_or_later = torch.logcumsumexp(log_p.flip(-1), dim=-1).flip(-1)
    log_likelihood = torch.where(samples.finished, log_p.gather(1, bucket), log_or_later.gather(1, bucket))
    return -samples.mean(log_likelihood)


def ordinal_cross_entropy(logits: Tensor, level: Tensor) -> Tensor:
    """Mean binary cross entropy [B] of the K - 1 questions "is the level [B] above k?", logits of P(level > k) [B, K - 1]."""
    above = (level.unsqueeze(-1) > torch.arange(logits.shape[-1], device=level.device)).float()
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), above, reduction="none").mean(-1)


def list_mle(score: Tensor, tokens: Tensor, *, group_tokens: float) -> Tensor:
    """ListMLE: negative log-likelihood of each row's position in the order of the batch, longest first, [R].

    Plackett-Luce model of the scores (Xia et al. 2008; LTR for LLM scheduling). Lengths are labels in groups of
    `group_tokens`, so that differences of sampling noise are no order. Differs: rows with the same label are not put in
    a random order, each is compared with the whole group and all shorter ones (Breslow's form), so the loss is a
    function of the data. Larger scores are longer.
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
    """Everything a head's loss is computed from besides its scores; `sigma_weight` is that of the objective mse."""

    model: PromptPredictor
    batch: TrainingBatch
    sigma_weight: float = 1.0


@singledispatch
def head_loss(task: HeadTask, score: Tensor, inputs: LossInputs) -> HeadLoss:
    """Loss of a head's scores; one function is registered for each class of options."""
    raise NotImplementedError(type(task).__name__)


@head_loss.register
def _(task: LengthTask, score: Tensor, inputs: LossInputs) -> HeadLoss:
    """Likelihood, CRPS, or TIE's squared errors of the z-scores of fitted mu and sigma."""
    batch, model = inputs.batch, inputs.model
    if task.objective == "mse":
        errors = (score[:, :2] - batch.fits[:, :2]) ** 2
        return HeadLoss(errors[:, 0] + inputs.sigma_weight * errors[:, 1], batch.weight)
    parameters = model.length_parameters(score)
    mu, sigma = parameters["mu"], parameters["sigma"]
    if task.quantiles:
        quantiles = parameters["quantiles"]
        loss = pinball_loss(quantiles, quantiles.new_tensor(LEVELS), batch.samples)
    elif task.objective == "crps":
        loss = log_t_crps(mu, sigma, task.nu, batch.samples)
    else:
        loss = log_t_nll(mu, sigma, parameters.get("nu", mu.new_tensor(task.nu)), batch.samples)
    if task.within:
        loss = loss + WITHIN_WEIGHT * within_mse(score[:, -1], batch.fits[:, 2])
    return HeadLoss(loss, batch.weight)


@head_loss.register
def _(task: UrgencyTask, score: Tensor, inputs: LossInputs) -> HeadLoss:
    """Over the prompts with a label."""
    return HeadLoss(ordinal_cross_entropy(score, inputs.batch.level), inputs.batch.level_weight)


@head_loss.register
def _(task: BucketTask, score: Tensor, inputs: LossInputs) -> HeadLoss:
    head, batch = inputs.model.config.heads.bucket, inputs.batch
    assert head is not None
    return HeadLoss(bucket_cross_entropy(score, torch.tensor(head.edges), batch.samples), batch.weight)


@head_loss.register
def _(task: RegressionTask, score: Tensor, inputs: LossInputs) -> HeadLoss:
    """L1 or squared error of the z-score of ln(1 + tokens); a censored sample counts as it is. Source: SSJF."""
    statistics, samples = inputs.model.normalization, inputs.batch.samples
    target = (torch.log1p(samples.tokens) - statistics.regression_mean) / statistics.regression_std
    error = score.unsqueeze(-1) - target
    loss = samples.mean(error.abs() if task.objective == "l1" else error**2)
    return HeadLoss(loss, inputs.batch.weight)


@head_loss.register
def _(task: RankTask, score: Tensor, inputs: LossInputs) -> HeadLoss:
    """Over the rows of the batch."""
    samples = inputs.batch.samples
    loss = list_mle(score, samples.mean(samples.tokens), group_tokens=task.group_tokens)
    return HeadLoss(loss, inputs.batch.weight)
