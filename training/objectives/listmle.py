"""ListMLE: the likelihood of the true order of a batch under the Plackett-Luce model of its scores.

Source: LTR (learning to rank for LLM scheduling); Xia et al. 2008 for ListMLE. Lengths are labels in groups of 10 tokens,
so that differences of sampling noise are no order. Differs: rows with the same label are not put in a random order, each
of them is compared with the whole group and all shorter ones (Breslow's form), so the loss is a function of the data.
"""

from __future__ import annotations

import torch
from torch import Tensor


def list_mle(score: Tensor, length: Tensor, *, group_tokens: float) -> Tensor:
    """Negative log-likelihood of each row's place, longest first.

    Args:
        score: Larger is longer [R].
        length: Tokens [R].
        group_tokens: Width of a label.

    Returns:
        [R]; 0 for a row that is alone or among the shortest and alone there.
    """
    label = torch.floor(length / group_tokens)
    ordered, order = torch.sort(label, stable=True)
    score = score.float()
    sums = torch.logcumsumexp(score[order], dim=0)
    last_of_label = torch.searchsorted(ordered, label, right=True) - 1
    return sums[last_of_label] - score
