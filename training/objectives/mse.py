"""Squared errors of the z-scores of fitted parameters, as the paper trains.

Source: TIE, loss MSE(mu) + w MSE(sigma), with w rising linearly over the epochs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fitted_parameters_mse(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors of mu and of sigma.

    Args:
        scores: Predicted z-scores of mu and log(1 + sigma) [R, 2 or more].
        targets: z-scores of the fits [R, 2 or more].

    Returns:
        Of mu [R], of sigma [R].
    """
    errors = (scores[:, :2].float() - targets[:, :2]) ** 2
    return errors[:, 0], errors[:, 1]


def within_mse(score: Tensor, target: Tensor) -> Tensor:
    """Squared error of sigma_within's z-score [R], times the number of rows over those with a target; 0 without one."""
    known = torch.isfinite(target)
    error = torch.where(known, score.float() - torch.where(known, target, 0.0), 0.0) ** 2
    return error * (len(target) / known.sum().clamp_min(1))


def sigma_weight(start: float, end: float, epoch: int, num_epochs: int) -> float:
    """Weight of sigma's error in an epoch, linear from the first epoch to the last of all stages."""
    return start + (end - start) * epoch / max(num_epochs - 1, 1)
