"""Two quadrature rules on [0, 1], as nodes u and weights w with sum(w * f(u)) = integral of f.

`NODES`, `WEIGHTS`: tanh-sinh, 93 nodes. They crowd double-exponentially at both ends, so an integrand whose features
sit at the ends of the interval (that is how `law` and `mean_excess` choose their pieces) is resolved whatever their
scale. Source: Takahasi & Mori, "Double exponential formulas for numerical integration", Publ. RIMS 9 (1974), 721-741.

`GAUSS_NODES`, `GAUSS_WEIGHTS`: Gauss-Legendre, 12 nodes, for panels on which the integrand is smooth (`panels`).
Source: Abramowitz & Stegun, section 25.4.29.
"""

from __future__ import annotations

import numpy as np

from scheduler_core.lengths.arrays import FloatArray

_STEP = 0.07
_HALF_COUNT = 46
NUM_GAUSS = 12


def _tanh_sinh() -> tuple[FloatArray, FloatArray]:
    t = _STEP * np.arange(-_HALF_COUNT, _HALF_COUNT + 1)
    nodes = 1.0 / (1.0 + np.exp(-np.pi * np.sinh(t)))
    weights = _STEP * np.pi * np.cosh(t) * nodes * nodes[::-1]
    return nodes, weights


def _gauss() -> tuple[FloatArray, FloatArray]:
    nodes, weights = np.polynomial.legendre.leggauss(NUM_GAUSS)
    return (nodes + 1.0) / 2.0, weights / 2.0


NODES, WEIGHTS = _tanh_sinh()
GAUSS_NODES, GAUSS_WEIGHTS = _gauss()
for _array in (NODES, WEIGHTS, GAUSS_NODES, GAUSS_WEIGHTS):
    _array.setflags(write=False)
