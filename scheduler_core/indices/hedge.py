"""Learning from experts: weights that follow whichever did best, with bounded regret.

Freund & Schapire 1997 ("A decision-theoretic generalization of on-line learning and an application to boosting", J.
Comput. Syst. Sci. 55, 119-139): after T rounds with losses in [0, 1] the loss exceeds the best expert's by at most
sqrt(T ln N / 2) if the rate is sqrt(8 ln N / T).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler_core.errors import InputError


class Hedge:
    """w_i proportional to exp(-rate_t * (loss of expert i so far)), rate_t = sqrt(8 ln N / t): no horizon needed.

    With this rate the regret is at most 2 sqrt(T ln N / 2) + sqrt(ln N / 8) (Cesa-Bianchi & Lugosi 2006, theorem 2.3).

    Args:
        num_experts: N >= 2.
    """

    __slots__ = ("_losses", "loss", "num_rounds", "weights")

    def __init__(self, num_experts: int) -> None:
        if num_experts < 2:
            raise InputError("num_experts", num_experts, "integers >= 2")
        self._losses = [0.0] * num_experts
        self.weights = [1.0 / num_experts] * num_experts
        self.loss = 0.0
        self.num_rounds = 0

    @property
    def regret(self) -> float:
        """Loss so far less that of the best single expert."""
        return self.loss - min(self._losses)

    @property
    def regret_bound(self) -> float:
        """What the regret cannot exceed, whatever happens."""
        log_n = math.log(len(self.weights))
        return 2.0 * math.sqrt(self.num_rounds * log_n / 2.0) + math.sqrt(log_n / 8.0)

    def observe(self, losses: Sequence[float]) -> None:
        """One round: the loss of each expert, in [0, 1]."""
        self.loss += sum(weight * loss for weight, loss in zip(self.weights, losses, strict=True))
        self._losses = [total + loss for total, loss in zip(self._losses, losses, strict=True)]
        self.num_rounds += 1
        rate = math.sqrt(8.0 * math.log(len(self.weights)) / (self.num_rounds + 1))
        least = min(self._losses)
        raw = [math.exp(-rate * (total - least)) for total in self._losses]
        whole = sum(raw)
        self.weights = [value / whole for value in raw]
