"""The log-t length distribution: X = exp(mu + sigma T), T ~ Student-t(nu) (TIE, section 3.1, Eqs. 3-4).

    f(x) = t_nu((ln x - mu)/sigma) / (sigma x)

Its mean is infinite for every finite nu. nu = inf is the log-normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scheduler_core.errors import InputError
from scheduler_core.lengths import panels
from scheduler_core.lengths.arrays import FloatArray, Rows, broadcast, parameter, probability, tokens, unwrap
from scheduler_core.lengths.base import LengthDistribution
from scheduler_core.lengths.law import Law
from scheduler_core.lengths.normal_law import NormalLaw
from scheduler_core.lengths.student_law import StudentLaw


@dataclass(frozen=True, eq=False)
class LogT(LengthDistribution):
    """Log-t distribution(s) of output length; parameters broadcast against each other and the arguments.

    Attributes:
        mu: Location of ln X (ln tokens); exp(mu) is the median length.
        sigma: Scale of ln X, > 0, dimensionless.
        nu: Degrees of freedom, > 0; 3.5 is TIE's fixed choice (section 3.1, appendix D), inf the log-normal.

    Raises:
        InputError: A parameter is NaN, mu or sigma is infinite, or sigma or nu is not positive.
    """

    mu: Any
    sigma: Any
    nu: Any = 3.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", parameter("mu", self.mu, positive=False))
        object.__setattr__(self, "sigma", parameter("sigma", self.sigma, positive=True))
        object.__setattr__(self, "nu", parameter("nu", self.nu, positive=True, finite=False))
        broadcast(self._parameters())

    def _parameters(self) -> dict[str, FloatArray]:
        return {"mu": self.mu, "sigma": self.sigma, "nu": self.nu}

    def _location_and_spread(self) -> tuple[FloatArray, FloatArray]:
        return self.mu, self.sigma

    def _law_parameter(self) -> FloatArray:
        return np.asarray(self.nu)

    def _laws(self, parameter: FloatArray) -> Iterator[tuple[Rows, Law]]:
        limit = np.isinf(parameter[:, 0])
        if limit.all():
            yield slice(None), NormalLaw()
        elif not limit.any():
            yield slice(None), StudentLaw(parameter)
        else:
            yield np.flatnonzero(limit), NormalLaw()
            yield np.flatnonzero(~limit), StudentLaw(parameter[~limit])

    def _draws(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        limit = np.broadcast_to(np.isinf(self.nu), self.shape)
        if limit.all():
            draws = rng.standard_normal(size)
        else:
            draws = rng.standard_t(np.broadcast_to(np.where(limit, 1.0, self.nu), self.shape), size=size)
            if limit.any():
                draws = np.where(limit, rng.standard_normal(size), draws)
        return np.asarray(np.exp(self.mu + self.sigma * draws))

    def expected(self, max_tokens: ArrayLike) -> FloatArray:
        """E[min(X, M)] = G(-inf, z_M) + M (1 - F(z_M)) in tokens (TIE, Eq. 9).

        Args:
            max_tokens: M > 0, in tokens.
        """
        if not self._on_panels(np.asarray(0.5)):
            return super().expected(max_tokens)
        return self.expected_and_cvar(0.5, max_tokens)[0]

    def cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> FloatArray:
        """CVaR_alpha(min(X, M)): mean of the worst 1 - alpha share of censored lengths, in tokens (TIE, Eq. 10).

        M where the alpha-quantile reaches M, else [G(z_alpha, z_M) + M (1 - F(z_M))] / (1 - alpha).

        Args:
            alpha: Level in [0, 1); 0 gives the expectation.
            max_tokens: M > 0, in tokens.
        """
        if not self._on_panels(np.asarray(alpha)):
            return super().cvar(alpha, max_tokens)
        return self.expected_and_cvar(alpha, max_tokens)[1]

    def expected_and_cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(`expected`, `cvar`) with expected <= cvar <= max_tokens; the vectorised fast path for one nu and alpha.

        Args:
            alpha: Level in [0, 1).
            max_tokens: M > 0, in tokens.
        """
        level = probability("alpha", alpha, below_one=True)
        if not self._on_panels(level):
            return super().expected_and_cvar(level, max_tokens)
        cap = tokens("max_tokens", max_tokens, positive=True)
        wide = broadcast({**self._parameters(), "alpha": level, "max_tokens": cap})
        shape = wide[0].shape
        mu, sigma, top = (
            np.ascontiguousarray(np.broadcast_to(array, shape)).ravel()
            for array in (self.mu, self.sigma, cap)
        )
        mean, tail_mean = panels.expected_and_cvar_rows(mu, sigma, top, self.nu.item(), level.item())
        hard = np.isnan(mean)
        if hard.any():
            rows = LogT(mu[hard], sigma[hard], self.nu.item())
            tail_mean[hard] = LengthDistribution.cvar(rows, level.item(), top[hard])
            mean[hard] = np.minimum(LengthDistribution.expected(rows, top[hard]), tail_mean[hard])
        return unwrap(mean.reshape(shape)), unwrap(tail_mean.reshape(shape))

    def _on_panels(self, alpha: FloatArray) -> bool:
        """Whether all rows share one nu and one alpha for which there is a lattice."""
        return self.nu.size == 1 == alpha.size and panels.covers(self.nu.item(), alpha.item())


def expected_and_cvar(
    mu: float, sigma: float, nu: float, max_tokens: float, alpha: float = 0.9
) -> tuple[float, float]:
    """(E[min(X, M)], CVaR_alpha(min(X, M))) in tokens for one request: the scheduler's fast path.

    The numbers of `LogT.expected_and_cvar` for plain floats.

    Args:
        mu: Location of ln X (ln tokens).
        sigma: Scale of ln X, > 0.
        nu: Degrees of freedom, > 0; inf is the log-normal.
        max_tokens: M > 0, in tokens.
        alpha: Level in [0.5, 1).

    Raises:
        InputError: A parameter is not in its range, or not finite (but nu).
    """
    if not (-math.inf < mu < math.inf and 0 < sigma < math.inf and nu > 0):
        raise InputError("mu, sigma, nu", (mu, sigma, nu), "finite mu, finite sigma > 0, nu > 0")
    if not (0 < max_tokens < math.inf and 0.5 <= alpha < 1):
        raise InputError(
            "max_tokens, alpha", (max_tokens, alpha), "a finite max_tokens > 0 and alpha in [0.5, 1)"
        )
    if panels.covers(nu, alpha):
        found = panels.expected_and_cvar_one(mu, sigma, max_tokens, nu, alpha)
        if found is not None:
            return found
    mean, tail_mean = LogT(mu, sigma, nu).expected_and_cvar(alpha, max_tokens)
    return float(mean), float(tail_mean)
