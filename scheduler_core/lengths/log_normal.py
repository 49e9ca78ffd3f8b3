"""The log-normal length distribution: ln X ~ Normal(mu, sigma^2); the log-t with nu = inf."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from scheduler_core.lengths.log_t import LogT


@dataclass(frozen=True, eq=False)
class LogNormal(LogT):
    """Log-normal distribution(s) of output length; parameters broadcast against each other and the arguments.

    Attributes:
        mu: Mean of ln X (ln tokens); exp(mu) is the median length.
        sigma: Standard deviation of ln X, > 0, dimensionless.
        nu: inf.

    Raises:
        InputError: A parameter is not finite, or sigma is not positive.
    """

    nu: Any = field(default=math.inf, init=False)
