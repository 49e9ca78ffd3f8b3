"""Cost of E[min(X, M)] and CVaR_0.9(min(X, M)) of log-t lengths; all methods are interleaved in one process.

    python -m benchmarks.scheduling.length_scores [--repeats 9] [--requests 10000]

X = exp(mu + sigma T), T ~ Student-t(3.5), mu ~ N(5, 1) and sigma ~ U(0.2, 1.2) for each request, M = 2048:

- Monte Carlo, 10,000 draws per request (TIE's estimator), vectorized over the draws: standard_t, exp,
  mean, and the mean of the upper tenth by partition;
- `expected_and_cvar`, one call per request, as in the scheduler;
- `LogT.expected_and_cvar`, one call for all requests;
- the same with a separate nu for each request, U(2, 10): the general method.

Times are medians over the repeats of CPU time per request; Monte Carlo and the general method run on some
requests. The error is the relative RMS difference of E + 0.3 CVaR from the general method, which shares
no quadrature nodes with the first three.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.command import Parser
from benchmarks.shared.timing import interleaved
from scheduler_core.lengths import LogT, expected_and_cvar
from scheduler_core.report.page import markdown_table

NU, CAP, ALPHA, BETA = 3.5, 2048.0, 0.9, 0.3
NUM_DRAWS = 10_000

Scores = NDArray[np.float64]


def monte_carlo(mu: Scores, sigma: Scores, rng: np.random.Generator) -> Scores:
    """E + beta CVaR of each request from its own draws."""
    scores = np.empty_like(mu)
    first = round(ALPHA * NUM_DRAWS)
    for index, (location, scale) in enumerate(zip(mu.tolist(), sigma.tolist(), strict=True)):
        lengths = np.minimum(np.exp(location + scale * rng.standard_t(NU, NUM_DRAWS)), CAP)
        scores[index] = lengths.mean() + BETA * np.partition(lengths, first)[first:].mean()
    return scores


def scalar(mu: Scores, sigma: Scores) -> Scores:
    """E + beta CVaR, one request after another."""
    pairs = [
        expected_and_cvar(location, scale, NU, CAP, ALPHA)
        for location, scale in zip(mu.tolist(), sigma.tolist(), strict=True)
    ]
    return np.array([mean + BETA * tail_mean for mean, tail_mean in pairs])


def vectorised(mu: Scores, sigma: Scores, nu: float | Scores) -> Scores:
    """E + beta CVaR of all requests at once."""
    mean, tail_mean = LogT(mu, sigma, nu).expected_and_cvar(ALPHA, CAP)
    return np.asarray(mean + BETA * tail_mean)


def exact(mu: Scores, sigma: Scores) -> Scores:
    """E + beta CVaR by the general method, which shares no quadrature nodes with the others."""
    length = LogT(mu, sigma, NU)
    mean, tail_mean = length.expected_and_cvar(np.full_like(mu, ALPHA), CAP)
    return np.asarray(mean + BETA * tail_mean)


def measure(repeats: int, num_requests: int) -> None:
    """Prints the table."""
    rng = np.random.default_rng(0)
    mu, sigma = rng.normal(5.0, 1.0, num_requests), rng.uniform(0.2, 1.2, num_requests)
    few, some = slice(0, 100), slice(0, min(1000, num_requests))
    free_nu = rng.uniform(2.0, 10.0, num_requests)
    sides: dict[str, tuple[int, Callable[[], Scores]]] = {
        f"Monte Carlo, {NUM_DRAWS:,} draws": (100, lambda: monte_carlo(mu[few], sigma[few], rng)),
        "scalar": (num_requests, lambda: scalar(mu, sigma)),
        f"vectorized, {num_requests:,} requests": (num_requests, lambda: vectorised(mu, sigma, NU)),
        "vectorized, a nu for each request": (
            len(mu[some]),
            lambda: vectorised(mu[some], sigma[some], free_nu[some]),
        ),
    }
    for _, call in sides.values():
        call()
    scores: dict[str, Scores] = {}

    def kept(name: str) -> None:
        scores[name] = sides[name][1]()

    seconds = interleaved({name: partial(kept, name) for name in sides}, repeats)
    times = {name: [1e6 * one / sides[name][0] for one in values] for name, values in seconds.items()}
    slowest = median(next(iter(times.values())))
    true = exact(mu[:1000], sigma[:1000])
    rows = []
    for name, values in times.items():
        estimates = scores[name][:1000]
        error = float(np.sqrt(np.mean((estimates / true[: len(estimates)] - 1) ** 2)))
        cells = (
            f"{median(values):.2f}",
            f"{slowest / median(values):,.0f}",
            "-" if "a nu" in name else f"{error:.0e}",
        )
        rows.append((name, *cells))
    print(markdown_table(("method", "microseconds per request", "times faster", "relative error"), rows))


def main() -> None:
    """Prints the table."""
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, seed 0\n")
    measure(options.repeats, options.requests)


if __name__ == "__main__":
    main()
