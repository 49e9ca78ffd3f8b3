"""Negative log-likelihood of answer lengths under the log-t distribution, cut answers counted as cut.

X = exp(mu + sigma T), T Student-t with nu degrees of freedom. A finished answer x contributes
-ln f(x) = -ln t_nu((ln x - mu) / sigma) + ln sigma + ln x, an answer cut at c contributes -ln P(X > c).
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.objectives.answers import Answers
from training.objectives.student import log_density, log_interval, log_survival


def log_t_nll(mu: Tensor, sigma: Tensor, nu: Tensor, answers: Answers, *, integers: bool = False) -> Tensor:
    """Mean negative log-likelihood of each row's answers.

    Computed in float64, whatever comes in; gradients are finite for lengths of 1 to 15000 tokens, sigma of 1e-3 to 5
    and nu of 1 to 100. The derivative by nu of terms with tails is numerical, see `student`.

    Args:
        mu: Location, log tokens [R].
        sigma: Scale, log tokens [R], above 0.
        nu: Degrees of freedom [R] or [].
        answers: Of the rows.
        integers: Take a finished length x as the interval from x - 1/2 to x + 1/2, whose probability is the
            likelihood; it is then never above 1, also where all answers of a row are equal.

    Returns:
        Nats per answer, float32 [R].
    """
    lengths = answers.lengths.double()
    mu, sigma = mu.double().unsqueeze(-1), sigma.double().unsqueeze(-1)
    nu = nu.double().expand(mu.shape[:-1]).unsqueeze(-1)
    ended = answers.present & answers.finished
    cut = answers.present & ~answers.finished
    if integers:
        low, high = (torch.log(lengths + step) for step in (-0.5, 0.5))
        loss = -log_interval((low - mu) / sigma, (high - mu) / sigma, nu)
    else:
        logs = torch.log(lengths)
        loss = -log_density((logs - mu) / sigma, nu) + torch.log(sigma) + logs
    loss = torch.where(ended, loss, torch.zeros_like(loss))
    if bool(cut.any()):
        # Few answers are cut, and a tail costs far more than a density.
        row, _ = torch.nonzero(cut, as_tuple=True)
        t = (torch.log(lengths[cut]) - mu[row, 0]) / sigma[row, 0]
        loss = loss.masked_scatter(cut, -log_survival(t, nu[row, 0]))
    return answers.mean(loss).float()
