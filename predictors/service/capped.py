"""Numbers of the capped length min(X, max_tokens) for one request, cheap enough for the event loop.

The same numbers as `scheduler_core.lengths.LogT` gives; what depends on the level and nu alone is computed once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.lengths import LogT, expected_and_cvar

DEFAULT_CVAR_LEVEL = 0.9
DEFAULT_QUANTILE_LEVELS = (0.5, 0.9, 0.99)


def capped_length(
    mu: float, sigma: float, nu: float, *, max_tokens: int, cvar_level: float | None, levels: Sequence[float]
) -> pb.CappedLength:
    """Expectation, CVaR and quantiles of min(X, max_tokens) in tokens.

    Args:
        mu: Location of ln X, log tokens.
        sigma: Scale of ln X, > 0.
        nu: Degrees of freedom.
        max_tokens: The cap, >= 1.
        cvar_level: Level in [0, 1); None = 0.9.
        levels: Levels of the quantiles, in (0, 1); empty = 0.5, 0.9, 0.99.
    """
    level = DEFAULT_CVAR_LEVEL if cvar_level is None else cvar_level
    if level >= 0.5:
        expected, cvar = expected_and_cvar(mu, sigma, nu, max_tokens, level)
    else:
        lengths = LogT(mu, sigma, nu)
        expected, cvar = float(lengths.expected(max_tokens)), float(lengths.cvar(level, max_tokens))
    log_cap = math.log(max_tokens)
    quantiles = []
    for wanted in levels or DEFAULT_QUANTILE_LEVELS:
        log_tokens = mu + sigma * _t_quantile(wanted, nu)
        tokens = float(max_tokens) if log_tokens >= log_cap else math.exp(log_tokens)
        quantiles.append(pb.Quantile(level=wanted, tokens=tokens))
    return pb.CappedLength(
        max_tokens=max_tokens,
        expected_tokens=expected,
        cvar_level=level,
        cvar_tokens=cvar,
        quantiles=quantiles,
    )


@functools.lru_cache(maxsize=4096)
def _t_quantile(level: float, nu: float) -> float:
    return float(LogT(0.0, 1.0, nu).logppf(level))
