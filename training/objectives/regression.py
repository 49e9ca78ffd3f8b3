"""Loss of the regression head: the z-score of ln(1 + tokens) of each answer.

Source: SSJF, which regresses one length per prompt by L1 or squared error. A cut answer counts as the length it was cut
at, as there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from training.objectives.answers import Answers


def length_regression(
    score: Tensor, answers: Answers, *, mean: float, std: float, error: Literal["l1", "mse"]
) -> Tensor:
    """Mean error of each row's answers.

    Args:
        score: Predicted z-score [R].
        answers: Of the rows.
        mean, std: Of ln(1 + tokens) in the training split.
        error: Absolute or squared.

    Returns:
        [R].
    """
    target = (torch.log1p(answers.lengths) - mean) / std
    difference = score.float().unsqueeze(-1) - target
    return answers.mean(difference.abs() if error == "l1" else difference**2)
