"""The families of output-length distributions.

| family | X | parameters |
| --- | --- | --- |
| log-t | exp(mu + sigma T), T ~ Student-t(nu); f(x) = t_nu((ln x - mu)/sigma) / (sigma x) (TIE, section 3.1, Eqs. 3-4) | mu, sigma, nu |
| log-normal | the log-t with nu = inf | mu, sigma |
| gamma | f(x) = x^(k-1) exp(-x/theta) / (Gamma(k) theta^k) | k, scale theta |
| Weibull | P(X > x) = exp(-(x/scale)^k) | k, scale |
| exponential | P(X > x) = exp(-x/scale) | scale |

The mean of a log-t is infinite for every finite nu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scheduler_core.errors import InputError
from scheduler_core.lengths import log_t_scores
from scheduler_core.lengths.distribution import (
    LengthDistribution,
    Rows,
    broadcast,
    parameter,
    probability,
    tokens,
    unwrap,
)
from scheduler_core.lengths.log_gamma import LogExponential, LogGamma
from scheduler_core.lengths.standard import FloatArray, StandardDistribution, StandardNormal
from scheduler_core.lengths.student_t import StudentT


@dataclass(frozen=True, eq=False)
class LogT(LengthDistribution):
    """Log-t distribution(s) of output length; parameters broadcast against each other and the arguments.

    Attributes:
        mu: Location of ln X (ln tokens); exp(mu) is the median length.
        sigma: Scale of ln X, > 0, dimensionless.
        nu: Degrees of freedom, > 0; 3.5 is TIE's fixed choice (section 3.1, appendix D), inf the log-normal.
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

    def _location_and_scale(self) -> tuple[FloatArray, FloatArray]:
        return self.mu, self.sigma

    def _shape_parameter(self) -> FloatArray:
        return np.asarray(self.nu)

    def _standard_rows(self, parameter: FloatArray) -> Iterator[tuple[Rows, StandardDistribution]]:
        limit = np.isinf(parameter[:, 0])
        if limit.all():
            yield slice(None), StandardNormal()
        elif not limit.any():
            yield slice(None), StudentT(parameter)
        else:
            yield np.flatnonzero(limit), StandardNormal()
            yield np.flatnonzero(~limit), StudentT(parameter[~limit])

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
        """E[min(X, M)] = G(-inf, z_M) + M (1 - F(z_M)) in tokens (TIE, Eq. 9)."""
        if not self._on_lattice(np.asarray(0.5)):
            return super().expected(max_tokens)
        return self.expected_and_cvar(0.5, max_tokens)[0]

    def cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> FloatArray:
        """CVaR_alpha(min(X, M)): mean of the worst fraction 1 - alpha of censored lengths, in tokens (TIE, Eq. 10).

        M where the alpha-quantile reaches M, else [G(z_alpha, z_M) + M (1 - F(z_M))] / (1 - alpha)."""
        if not self._on_lattice(np.asarray(alpha)):
            return super().cvar(alpha, max_tokens)
        return self.expected_and_cvar(alpha, max_tokens)[1]

    def expected_and_cvar(self, alpha: ArrayLike, max_tokens: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(`expected`, `cvar`) with expected <= cvar <= max_tokens; the vectorized fast path for one nu and alpha."""
        level = probability("alpha", alpha, below_one=True)
        if not self._on_lattice(level):
            return super().expected_and_cvar(level, max_tokens)
        top = tokens("max_tokens", max_tokens, positive=True)
        wide = broadcast({**self._parameters(), "alpha": level, "max_tokens": top})
        shape = wide[0].shape
        mu, sigma, top = (
            np.ascontiguousarray(np.broadcast_to(array, shape)).ravel()
            for array in (self.mu, self.sigma, top)
        )
        mean, tail_mean = log_t_scores.expected_and_cvar_rows(mu, sigma, top, self.nu.item(), level.item())
        hard = np.isnan(mean)
        if hard.any():
            rows = LogT(mu[hard], sigma[hard], self.nu.item())
            tail_mean[hard] = LengthDistribution.cvar(rows, level.item(), top[hard])
            mean[hard] = np.minimum(LengthDistribution.expected(rows, top[hard]), tail_mean[hard])
        return unwrap(mean.reshape(shape)), unwrap(tail_mean.reshape(shape))

    def _on_lattice(self, alpha: FloatArray) -> bool:
        """Whether all rows share one nu and one alpha for which there is a lattice."""
        return self.nu.size == 1 == alpha.size and log_t_scores.covers(self.nu.item(), alpha.item())


@dataclass(frozen=True, eq=False)
class LogNormal(LogT):
    """Log-normal distribution(s) of output length.

    Attributes:
        mu: Mean of ln X (ln tokens); exp(mu) is the median length.
        sigma: Standard deviation of ln X, > 0, dimensionless.
    """

    nu: Any = field(default=math.inf, init=False)


@dataclass(frozen=True, eq=False)
class _ShapeAndScale(LengthDistribution):
    k: Any
    scale: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", parameter("k", self.k, positive=True))
        object.__setattr__(self, "scale", parameter("scale", self.scale, positive=True))
        broadcast(self._parameters())

    def _parameters(self) -> dict[str, FloatArray]:
        return {"k": self.k, "scale": self.scale}


@dataclass(frozen=True, eq=False)
class Gamma(_ShapeAndScale):
    """Gamma distribution(s) of output length.

    Attributes:
        k: Shape, > 0, dimensionless.
        scale: theta > 0, in tokens; the mean is k theta.
    """

    def _location_and_scale(self) -> tuple[FloatArray, FloatArray]:
        return np.log(self.k) + np.log(self.scale), np.ones(())

    def _shape_parameter(self) -> FloatArray:
        return np.asarray(self.k)

    def _standard_rows(self, parameter: FloatArray) -> Iterator[tuple[Rows, StandardDistribution]]:
        yield slice(None), LogGamma(parameter)

    def _draws(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        return np.asarray(
            rng.gamma(np.broadcast_to(self.k, self.shape), np.broadcast_to(self.scale, self.shape), size)
        )


@dataclass(frozen=True, eq=False)
class Weibull(_ShapeAndScale):
    """Weibull distribution(s) of output length.

    Attributes:
        k: Shape, > 0, dimensionless; below 1 the tail is heavier than an exponential's.
        scale: Quantile of level 1 - 1/e, > 0, in tokens.
    """

    def _location_and_scale(self) -> tuple[FloatArray, FloatArray]:
        # (X/scale)^k is exponential with mean 1.
        return np.log(self.scale), 1.0 / np.asarray(self.k)

    def _standard_rows(self, parameter: FloatArray) -> Iterator[tuple[Rows, StandardDistribution]]:
        yield slice(None), LogExponential()

    def _draws(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        return np.asarray(self.scale * rng.weibull(np.broadcast_to(self.k, self.shape), size))


@dataclass(frozen=True, eq=False)
class Exponential(Weibull):
    """Exponential distribution(s) of output length: the Weibull with shape 1.

    Attributes:
        scale: Mean, > 0, in tokens.
    """

    k: Any = field(default=1.0, init=False)
    scale: Any


#: The families by the names that commands and files use.
FAMILIES: dict[str, type[LengthDistribution]] = {
    "log-t": LogT,
    "log-normal": LogNormal,
    "gamma": Gamma,
    "weibull": Weibull,
    "exponential": Exponential,
}


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
    """
    if not (-math.inf < mu < math.inf and 0 < sigma < math.inf and nu > 0):
        raise InputError("mu, sigma, nu", (mu, sigma, nu), "finite mu, finite sigma > 0, nu > 0")
    if not (0 < max_tokens < math.inf and 0.5 <= alpha < 1):
        raise InputError(
            "max_tokens, alpha", (max_tokens, alpha), "a finite max_tokens > 0 and alpha in [0.5, 1)"
        )
    if log_t_scores.covers(nu, alpha):
        scores = log_t_scores.expected_and_cvar_one(mu, sigma, max_tokens, nu, alpha)
        if scores is not None:
            return scores
    mean, tail_mean = LogT(mu, sigma, nu).expected_and_cvar(alpha, max_tokens)
    return float(mean), float(tail_mean)
