"""Time of fitting one log-t per prompt; all methods are interleaved in one process.

    python -m benchmarks.training.fit_dist [--prompts 45000] [--samples 20] [--subset 150] [--repeats 5]

One fit per prompt with fixed nu = 3.5 and no censoring, to synthetic lengths. scipy.stats.t.fit of the log lengths, and
SciPy's L-BFGS-B with the gradient, fit one prompt after another on a subset of the prompts. `training.fitting.estimate`
fits all prompts on one core, from integer lengths to standard errors. The largest differences of mu and ln sigma from
L-BFGS-B show that both find the same optimum.

Times are the minimum CPU time of the repeats; compiled kernels are loaded before timing starts.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats
from threadpoolctl import threadpool_limits

from benchmarks.shared.command import Parser
from benchmarks.shared.timing import interleaved
from scheduler_core.report.page import markdown_table
from training.fitting.estimate import SortedLengths, estimate, family_of

NU = 3.5
Lengths = NDArray[np.int64]


def synthetic(prompts: int, samples: int, seed: int) -> Lengths:
    """[prompts, samples] integer lengths; mu ~ N(5, 1), ln sigma ~ N(-1, 0.5)."""
    rng = np.random.default_rng(seed)
    mu, sigma = rng.normal(5.0, 1.0, (prompts, 1)), np.exp(rng.normal(-1.0, 0.5, (prompts, 1)))
    x = np.exp(np.minimum(mu + sigma * rng.standard_t(NU, (prompts, samples)), 16.0))
    return np.maximum(np.rint(x), 1.0).astype(np.int64)


def objective(theta: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Negative log-likelihood of (mu, ln sigma), and its gradient."""
    sigma = math.exp(theta[1])
    z = (y - theta[0]) / sigma
    square = z * z
    slope = (NU + 1.0) * z / (NU + square)
    value = 0.5 * (NU + 1.0) * np.log1p(square / NU).sum() + len(y) * theta[1]
    return float(value), np.array([-slope.sum() / sigma, len(y) - (slope * z).sum()])


def by_lbfgsb(rows: Lengths) -> NDArray[np.float64]:
    """(mu, ln sigma) of each row, fitted one after another."""
    solutions = []
    for row in rows:
        y = np.log(row)
        first = np.array([np.median(y), math.log(max(y.std(), 1e-2))])
        result = optimize.minimize(
            objective,
            first,
            args=(y,),
            jac=True,
            method="L-BFGS-B",
            bounds=[(None, None), (math.log(1e-3), None)],
            options={"ftol": 1e-13, "gtol": 1e-8},
        )
        solutions.append(result.x)
    return np.array(solutions)


def by_scipy_fit(rows: Lengths) -> NDArray[np.float64]:
    """scipy.stats.t.fit with fixed degrees of freedom."""
    fits = [stats.t.fit(np.log(row), fdf=NU) for row in rows]
    return np.array([(fit[1], math.log(max(fit[2], 1e-3))) for fit in fits])


def ours(rows: Lengths) -> NDArray[np.float64]:
    """(mu, ln sigma) of all rows at once."""
    ends = np.arange(len(rows) + 1) * rows.shape[1]
    sample = SortedLengths.of(rows.ravel(), np.ones(rows.size, dtype=bool), ends)
    at = estimate(sample, family_of("log-t", NU)).solution
    return np.column_stack([at.m, at.s])


def compare(rows: Lengths, subset: int, repeats: int) -> None:
    """Prints the table."""
    distinct = np.array([len(np.unique(row)) for row in rows[: 4 * subset]])
    few = rows[: 4 * subset][distinct > 4][:subset]  # all methods have a maximum of the likelihood there
    sides: dict[str, tuple[Callable[[], object], int]] = {
        "scipy.stats.t.fit, fixed nu": (
            lambda: by_scipy_fit(few[: max(subset // 5, 1)]),
            max(subset // 5, 1),
        ),
        "L-BFGS-B with the gradient": (lambda: by_lbfgsb(few), len(few)),
        "tailcast, one core": (lambda: ours(rows), len(rows)),
    }
    ours(rows[:100])
    seconds = interleaved({side: action for side, (action, _) in sides.items()}, repeats)
    best = {side: min(seconds[side]) / count for side, (_, count) in sides.items()}
    mine = best["tailcast, one core"]
    print(f"\n{len(rows)} prompts x {rows.shape[1]} samples\n")
    lines = [
        (side, f"{1e6 * one:.2f}", f"{one * len(rows):.3f}", f"{one / mine:.0f} x")
        for side, one in best.items()
    ]
    print(markdown_table(("one fit", "us / prompt", "all prompts, s", "tailcast is"), lines))
    gap = np.abs(ours(few) - by_lbfgsb(few)).max(axis=0)
    print(f"largest difference from L-BFGS-B: mu {gap[0]:.1e}, ln sigma {gap[1]:.1e}")


def main() -> None:
    """Prints the tables."""
    parser = Parser(__doc__)
    parser.add_argument("--prompts", type=int, default=45_000)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--subset", type=int, default=150, help="prompts of the methods that loop")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    )
    with threadpool_limits(limits=1, user_api="blas"):
        compare(synthetic(args.prompts, args.samples, args.seed), args.subset, args.repeats)


if __name__ == "__main__":
    main()
