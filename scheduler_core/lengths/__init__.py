"""Distributions of output length X in tokens, behind one interface: `distribution.LengthDistribution`.

Relative error of every probability, quantile and expectation below 1e-9 (tests against mpmath) for the log-t with mu in
[0, 10], sigma in [1e-3, 3], nu in [1, 100] or inf, max_tokens in [1, 131072], and for the other families.
"""

from scheduler_core.lengths.distribution import LengthDistribution, RemainingLength
from scheduler_core.lengths.families import (
    FAMILIES,
    Exponential,
    Gamma,
    LogNormal,
    LogT,
    Weibull,
    expected_and_cvar,
)

__all__ = [
    "FAMILIES",
    "Exponential",
    "Gamma",
    "LengthDistribution",
    "LogNormal",
    "LogT",
    "RemainingLength",
    "Weibull",
    "expected_and_cvar",
]
