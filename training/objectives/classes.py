"""Losses of the heads that choose among classes: length buckets and ordered urgency levels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.objectives.answers import Answers


def bucket_cross_entropy(logits: Tensor, edges: Tensor, answers: Answers) -> Tensor:
    """Mean cross entropy of each row's answers over length buckets; bucket k holds edges[k - 1] <= length < edges[k].

    A cut answer says that the length is in its bucket or a later one: it contributes -ln P(bucket or later).

    Args:
        logits: Scores of K buckets [R, K].
        edges: Tokens, ascending [K - 1].
        answers: Of the rows.

    Returns:
        Nats per answer [R].
    """
    bucket = torch.bucketize(answers.lengths, edges.to(answers.lengths), right=True)
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_or_later = torch.logcumsumexp(log_p.flip(-1), dim=-1).flip(-1)
    log_likelihood = torch.where(answers.finished, log_p.gather(1, bucket), log_or_later.gather(1, bucket))
    return -answers.mean(log_likelihood)


def ordinal_cross_entropy(logits: Tensor, level: Tensor) -> Tensor:
    """Binary cross entropy of the cumulative logits: K - 1 questions "is the level above k?".

    Args:
        logits: Of P(level > k) [B, K - 1].
        level: 0 to K - 1, int64 [B].

    Returns:
        Mean over the questions [B].
    """
    questions = torch.arange(logits.shape[-1], device=level.device)
    above = (level.unsqueeze(-1) > questions).float()
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), above, reduction="none").mean(-1)
