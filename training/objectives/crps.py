"""Continuous ranked probability score of the log-t distribution in log tokens, as a mean of pinball losses.

CRPS(F, y) = 2 * integral over tau in (0, 1) of the pinball loss of the tau-quantile at y (Gneiting and Raftery 2007), by
the midpoint rule on equal levels. In log tokens because the distribution of tokens has no finite mean (nu = 3.5 makes
exp(sigma T) heavier than any power). Answers and quantiles are both capped where the row's answers are cut, which keeps
the score proper for what can be observed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from training.objectives.answers import Answers


def standard_quantiles(nu: float, num_levels: int) -> tuple[Tensor, Tensor]:
    """Levels (k + 1/2) / K and the Student-t quantiles there, float32 [K] each."""
    from scipy.special import stdtrit

    levels = (np.arange(num_levels) + 0.5) / num_levels
    return torch.from_numpy(levels).float(), torch.from_numpy(stdtrit(nu, levels)).float()


def log_t_crps(mu: Tensor, sigma: Tensor, levels: Tensor, standard: Tensor, answers: Answers) -> Tensor:
    """Mean CRPS of each row's answers in log tokens.

    Args:
        mu, sigma: Log tokens [R].
        levels, standard: As `standard_quantiles` gives them [L].
        answers: Of the rows.

    Returns:
        float32 [R].
    """
    cap = torch.log(answers.cap).unsqueeze(-1)
    quantiles = torch.minimum(mu.float().unsqueeze(-1) + sigma.float().unsqueeze(-1) * standard, cap)
    observed = torch.minimum(torch.log(answers.lengths), cap)
    excess = observed.unsqueeze(-1) - quantiles.unsqueeze(-2)
    pinball = torch.maximum(levels * excess, (levels - 1) * excess)
    return answers.mean(2 * pinball.mean(dim=-1))
