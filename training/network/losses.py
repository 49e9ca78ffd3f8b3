"""Losses of heads on raw output lengths, fitted parameters and labels.

Censored samples (truncated at max_tokens) enter likelihoods as lower bounds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from predictors.modules.predictor import PromptPredictor
from training.network.data import SampleLengths, TrainingBatch
from training.network.student_t import log_density, log_survival

# Quantile levels of the objective crps.
NUM_QUANTILES = 64
# Weight of the squared error of sigma_within.
WITHIN_WEIGHT = 0.3


def log_t_nll(mu: Tensor, sigma: Tensor, nu: Tensor, samples: SampleLengths) -> Tensor:
    """Mean negative log-likelihood of each row's samples under X = exp(mu + sigma T), T Student-t.

    A finished sample x contributes -ln t_nu((ln x - mu) / sigma) + ln sigma + ln x; a sample censored at c contributes
    -ln P(X > c). Computed in float64 for inputs of any type; gradients are finite for lengths of 1 to 15000 tokens, sigma
    of 1e-3 to 5 and nu of 1 to 100. The derivative of ln P(X > c) by nu is numerical, see `student_t`.

    Args:
        mu, sigma: Log tokens [R].
        nu: Degrees of freedom [R] or [].
        samples: Output lengths of the rows.

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
        # Computed for censored samples only: they are few, and the tail is far more expensive than the density.
        row, _ = torch.nonzero(censored, as_tuple=True)
        t = (torch.log(tokens[censored]) - mu[row, 0]) / sigma[row, 0]
        loss = loss.masked_scatter(censored, -log_survival(t, nu[row, 0]))
    return samples.mean(loss).float()


def log_t_crps(mu: Tensor, sigma: Tensor, nu: float, samples: SampleLengths) -> Tensor:
    """Mean CRPS of each row's samples in log tokens, float32 [R], from mu and sigma in log tokens [R].

    CRPS(F, y) = 2 * integral over tau in (0, 1) of the pinball loss of the tau-quantile at y (Gneiting and Raftery
    2007), by the midpoint rule on equal levels, as in `pinball_loss`. Log tokens are used because the distribution of
    tokens has no finite mean (for finite nu, the tail of exp(sigma T) is heavier than any power).
    """
    at = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    levels, standard = (torch.from_numpy(values).float().to(mu.device) for values in (at, stdtrit(nu, at)))
    return pinball_loss(mu.float().unsqueeze(-1) + sigma.float().unsqueeze(-1) * standard, levels, samples)


def pinball_loss(quantiles: Tensor, levels: Tensor, samples: SampleLengths) -> Tensor:
    """Twice the mean pinball loss [R] of each row's samples, over quantiles [R, K] of log tokens at levels [K].

    Samples and quantiles are both clipped to the row's max_tokens, so that the score is proper for the observable length.
    """
    limit = torch.log(samples.max_tokens).unsqueeze(-1)
    observed = torch.minimum(torch.log(samples.tokens), limit)
    excess = observed.unsqueeze(-1) - torch.minimum(quantiles, limit).unsqueeze(-2)
    pinball = torch.maximum(levels * excess, (levels - 1) * excess)
    return samples.mean(2 * pinball.mean(dim=-1))


def within_mse(score: Tensor, target: Tensor) -> Tensor:
    """Squared error of the z-score of sigma_within [R]; 0 without a target, scaled by rows / rows with a target."""
    has_target = torch.isfinite(target)
    error = torch.where(has_target, score.float() - torch.where(has_target, target, 0.0), 0.0) ** 2
    return error * (len(target) / has_target.sum().clamp_min(1))


def bucket_cross_entropy(logits: Tensor, edges: Tensor, samples: SampleLengths) -> Tensor:
    """Mean cross entropy of each row's samples over length buckets, nats [R].

    Bucket k of `logits` [R, K] holds edges[k - 1] <= tokens < edges[k]. Censored samples use -ln P(bucket or later).
    """
    bucket = torch.bucketize(samples.tokens, edges.to(samples.tokens), right=True)
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_or_later = torch.logcumsumexp(log_p.flip(-1), dim=-1).flip(-1)
    log_likelihood = torch.where(samples.finished, log_p.gather(1, bucket), log_or_later.gather(1, bucket))
    return -samples.mean(log_likelihood)


def ordinal_cross_entropy(logits: Tensor, level: Tensor) -> Tensor:
    """Mean binary cross entropy [B] over the K - 1 events "level > k", from their logits [B, K - 1]."""
    above = (level.unsqueeze(-1) > torch.arange(logits.shape[-1], device=level.device)).float()
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), above, reduction="none").mean(-1)


def list_mle(score: Tensor, tokens: Tensor, *, group_tokens: float) -> Tensor:
    """ListMLE loss [R]: negative log-likelihood of each row's rank in the batch, longest first.

    Plackett-Luce model of the scores (Xia et al. 2008; LTR for LLM scheduling); larger scores are longer. Lengths are
    divided into intervals of `group_tokens`, so that differences within sampling noise count as ties. Unlike the
    original, ties are not ordered randomly: each row is compared with all rows of equal or shorter length (Breslow's
    form), which makes the loss deterministic."""
    label = torch.floor(tokens / group_tokens)
    ordered, order = torch.sort(label, stable=True)
    score = score.float()
    sums = torch.logcumsumexp(score[order], dim=0)
    last_of_label = torch.searchsorted(ordered, label, right=True) - 1
    return sums[last_of_label] - score


class HeadLoss(NamedTuple):
    """Losses of the examples (rows or prompts) of one head, and their weights [N]; weight 0 excludes an example."""

    values: Tensor
    weights: Tensor

    def mean(self) -> Tensor:
        """Weighted sum divided by the number of examples; 0 without examples.

        Dividing by the sum of weights would give a batch of low-weight examples the same influence as any other batch.
        """
        return (self.values * self.weights).sum() / (self.weights > 0).sum().clamp_min(1)

    def sums(self, *, weighted: bool = False) -> Tensor:
        """Sum over the examples, and their number [2]; weighted: the weighted sum, and the sum of the weights."""
        is_example = self.weights > 0
        weights = torch.where(is_example, self.weights if weighted else 1.0, 0.0).to(self.values)
        return torch.stack([torch.where(is_example, self.values * weights, 0.0).sum(), weights.sum()])


class LossInputs(NamedTuple):
    """Inputs of a head's loss in addition to its scores.

    `sigma_weight` is used by the objective mse. `auxiliary`: whether to add the error of sigma_within, which is left out of
    the score that chooses an epoch: it has no bound for prompts whose outputs are all equal.
    """

    model: PromptPredictor
    batch: TrainingBatch
    sigma_weight: float = 1.0
    auxiliary: bool = True
