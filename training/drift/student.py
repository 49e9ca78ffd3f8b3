"""Student's t, one number at a time: what a stream needs, a hundred times faster than through arrays."""

from __future__ import annotations

import math
from functools import lru_cache

from scipy import special


def cdf(z: float, nu: float) -> float:
    """P(T <= z); nu may be infinite."""
    return float(special.ndtr(z) if math.isinf(nu) else special.stdtr(nu, z))


def hazard(z: float, nu: float) -> float:
    """Density over P(T > z)."""
    tail = cdf(-z, nu)
    if tail < 1e-290:  # far out: the normal's z, or the power law
        return z if math.isinf(nu) else (nu + 1) * z / (nu + z * z)
    return math.exp(_log_density(z, nu)) / tail


def _log_density(z: float, nu: float) -> float:
    if math.isinf(nu):
        return -0.5 * z * z - 0.5 * math.log(2 * math.pi)
    return _log_constant(nu) - 0.5 * (nu + 1) * math.log1p(z * z / nu)


@lru_cache(maxsize=1024)
def _log_constant(nu: float) -> float:
    return float(-special.betaln(0.5, 0.5 * nu) - 0.5 * math.log(nu))
