"""By how much the true lengths differ from the expected ones in the mean, learned for each size of prediction."""

from __future__ import annotations

import math

from scheduler_core.errors import InputError

#: Groups of predictions to an octave.
_GROUPS_PER_OCTAVE = 2


class PredictionBias:
    """ratio(g) = (sum of true + k m_g) / (sum of predicted + k m_g), over the finished requests of group g.

    The expectation of a fitted log-t depends on its tail, which few answers tell: it may be off by a sixth in the mean while
    every quantile is right. A single ratio over all that have finished would miss that: under shortest first those predicted
    long have not. Given what is predicted, who has finished does not depend on the true length.

    A group is half an octave of predicted lengths, m_g its geometric middle, k as many requests predicted rightly that it
    starts with.

    Args:
        prior_requests: k > 0.

    Raises:
        InputError: k is not positive.
    """

    __slots__ = ("_predicted", "_prior", "_true")

    def __init__(self, prior_requests: float = 4.0) -> None:
        if not 0 < prior_requests < math.inf:
            raise InputError("prior_requests", prior_requests, "numbers > 0")
        self._prior = prior_requests
        self._true: dict[int, float] = {}
        self._predicted: dict[int, float] = {}

    @staticmethod
    def group(predicted_tokens: float) -> int:
        """The group of a prediction, in tokens; below one token all are alike."""
        return math.floor(_GROUPS_PER_OCTAVE * math.log2(max(predicted_tokens, 1.0)))

    def learn(self, predicted_tokens: float, true_tokens: float) -> None:
        """An answer that was expected to have `predicted_tokens` has had `true_tokens`."""
        group = self.group(predicted_tokens)
        self._predicted[group] = self._predicted.get(group, 0.0) + predicted_tokens
        self._true[group] = self._true.get(group, 0.0) + true_tokens

    def ratio(self, group: int) -> float:
        """Expected true tokens for each predicted one; 1 before anything is learned."""
        known = self._prior * math.pow(2.0, (group + 0.5) / _GROUPS_PER_OCTAVE)
        return (self._true.get(group, 0.0) + known) / (self._predicted.get(group, 0.0) + known)
