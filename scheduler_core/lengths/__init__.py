"""Distributions of output length X in tokens: log-t, and the one given by predicted quantiles.

Probabilities, quantiles and expectations of a log-t have relative errors below 1e-9 (tests against mpmath)
for mu in [0, 10], sigma in [1e-3, 3], nu in [1, 100] or inf, and max_tokens in [1, 131072].
"""

from scheduler_core.lengths.distribution import LogT, expected_and_cvar
from scheduler_core.lengths.quantiles import LogQuantiles

__all__ = ["LogQuantiles", "LogT", "expected_and_cvar"]
