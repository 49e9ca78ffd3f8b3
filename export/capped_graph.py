"""The small graph `length.onnx`: expectation, CVaR and quantiles of min(X, max_tokens), X log-t distributed.

The numbers of `scheduler_core.lengths.LogT`, within 1e-4 and mostly within float32's rounding. In the coordinate
t = asinh(T / sqrt(nu)), where Student's t has the density q(t) = C sech(t)^nu,

    E[min(X, M)] = integral over t < t_M of x(t) q(t) dt + M P(T > t_M),
    CVaR_alpha = (integral over t_alpha < t < t_M of x(t) q(t) dt + M P(T > t_M)) / (1 - alpha), or M if t_alpha >= t_M,

by tanh-sinh quadrature with the nodes and the pieces of `scheduler_core.lengths`, in double precision (the parameters
come in single precision, but what is summed must not be rounded on the way). What depends on nu alone (ln C, the
quantiles of t) is a constant where nu is fixed; where it is predicted, it is interpolated in ln nu between Chebyshev
points (Berrut & Trefethen, "Barycentric Lagrange interpolation", SIAM Review 46 (2004), 501-517).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import CappedLengths
from scheduler_core.lengths import LogT
from scheduler_core.lengths.law import CUT
from scheduler_core.lengths.quadrature import NODES, WEIGHTS
from scheduler_core.lengths.student_law import log_normaliser

if TYPE_CHECKING:
    from torch import Tensor, nn

# Where nu is predicted: the range it comes from (`predictors.modules.config.NU_RANGE`), a little widened for rounding.
NU_LOW, NU_HIGH = 0.999, 100.1
NUM_POINTS = 40
# A far end that is below exp(-30) of the integrand's peak is left out.
_UNSEEN = 30.0
_LN2 = math.log(2.0)


def export_capped_graph(capped: CappedLengths, nu: float | None, path: Path) -> None:
    """Writes the graph.

    Args:
        capped: Levels, and whether nu is an input.
        nu: Degrees of freedom where they are fixed; None: an input, in [1, 100].
        path: File to write.
    """
    import torch

    from export.graph import quiet_export, save_clean

    values = {
        "mu": torch.tensor([5.0, 6.0]),
        "sigma": torch.tensor([0.5, 1.0]),
        "nu": torch.tensor([3.5, 4.0]),
        "max_tokens": torch.tensor([100, 5000]),
    }
    names = [tensor.name for tensor in capped.inputs]
    tensors = (*capped.inputs, *capped.outputs)
    with quiet_export(), torch.no_grad():
        torch.onnx.export(
            _module(capped, nu),
            tuple(values[name] for name in names),
            path,
            dynamo=False,
            input_names=names,
            output_names=[tensor.name for tensor in capped.outputs],
            dynamic_axes={tensor.name: {0: "batch"} for tensor in tensors},
            verbose=False,
        )
    save_clean(path)


def constants_of(nu: float, levels: tuple[float, ...]) -> NDArray[np.float64]:
    """ln C, then t = asinh(T / sqrt(nu)) at the quantiles of T: all that depends on nu alone [1 + len(levels)]."""
    quantiles = LogT(0.0, 1.0, nu).logppf(np.asarray(levels))
    return np.concatenate([[log_normaliser(nu)], np.arcsinh(quantiles / math.sqrt(nu))])


def _module(capped: CappedLengths, fixed_nu: float | None) -> nn.Module:
    import torch

    def double(values: Any) -> Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.float64)

    levels = (capped.cvar_level, *capped.quantile_levels)
    points, weights, table = _interpolation(levels)

    class Capped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes, self.weights = double(NODES)[None], double(WEIGHTS)
            if fixed_nu is not None:
                self.constants = double(constants_of(fixed_nu, levels))[None]
            else:
                self.points, self.point_weights = double(points)[None], double(weights)[None]
                self.table = double(table)

        def forward(self, mu: Tensor, sigma: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            location, spread = mu.double()[:, None], sigma.double()[:, None]
            cap = rest[-1].double()[:, None]
            log_cap = torch.log(cap)
            if fixed_nu is not None:
                nu, found = double([[fixed_nu]]), self.constants
            else:
                nu = rest[0].double()[:, None]
                found = self._interpolated(torch.log(nu))
            root = torch.sqrt(nu)
            log_c, t_alpha, t_levels = found[:, :1], found[:, 1:2], found[:, 2:]
            width = CUT / nu + _LN2
            slope = spread * root
            end_sinh = (log_cap - location) / slope
            end = _asinh(end_sinh)

            def density(t: Tensor) -> Tensor:
                return log_c - nu * _log_cosh(t)

            def integral(low: Tensor, high: Tensor) -> Tensor:
                """Of x(t) q(t)."""
                t = low + (high - low) * self.nodes
                logs = location + slope * _sinh(t) + density(t)
                return (high - low) * torch.matmul(torch.exp(logs), self.weights)[:, None]

            # P(T > t_M) = mass beyond |t_M| on the same side, or one less that.
            distance = torch.abs(end)
            beyond = distance + width * self.nodes
            tail = width * torch.matmul(torch.exp(density(beyond)), self.weights)[:, None]
            over = torch.where(end < 0, 1.0 - tail, tail)

            high = self._seen(end, torch.zeros_like(end), width, slope, nu)
            # Left of this the density or the length is negligible against what is right of it.
            middle = torch.minimum(end, torch.zeros_like(end))
            lowest = _asinh(torch.minimum(end_sinh, torch.zeros_like(end)) - CUT / slope)
            low = torch.minimum(torch.maximum(lowest, middle - width), middle)
            expected = integral(low, middle) + integral(middle, torch.maximum(middle, high)) + cap * over
            start = torch.minimum(t_alpha, end)
            split = torch.minimum(torch.maximum(start, torch.zeros_like(end)), end)
            last = torch.maximum(split, self._seen(end, split, width, slope, nu))
            tail_sum = integral(start, split) + integral(split, last) + cap * over
            cvar = torch.where(t_alpha < end, tail_sum / (1.0 - capped.cvar_level), cap)
            quantiles = torch.exp(torch.minimum(location + slope * _sinh(t_levels), log_cap))
            expected = torch.minimum(expected, cap)
            cvar = torch.minimum(torch.maximum(cvar, expected), cap)
            nothing = torch.full_like(cap, float("nan"))
            outputs = (expected, cvar, torch.minimum(quantiles, cap))
            checked = [torch.where(cap >= 1, values, nothing).float() for values in outputs]
            return checked[0][:, 0], checked[1][:, 0], checked[2]

        def _interpolated(self, log_nu: Tensor) -> Tensor:
            gap = log_nu - self.points
            near = torch.abs(gap) < 1e-13
            shares = self.point_weights / torch.where(near, torch.full_like(gap, 1e-13), gap)
            return torch.matmul(shares, self.table) / torch.sum(shares, dim=1, keepdim=True)

        def _seen(self, end: Tensor, origin: Tensor, width: Tensor, slope: Tensor, nu: Tensor) -> Tensor:
            """The end, or where all that lies between is negligible, origin + width.

            ln of the integrand is concave, then convex: what is negligible at both is so between them.
            """

            def gain(t: Tensor) -> Tensor:
                return slope * (_sinh(t) - _sinh(origin)) - nu * (_log_cosh(t) - _log_cosh(origin))

            near = torch.minimum(end, origin + width)
            lifted = torch.maximum(gain(near), gain(end))
            return torch.where(lifted < -_UNSEEN, near, end)

    return Capped().eval()


def _interpolation(
    levels: tuple[float, ...],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Chebyshev points of the second kind in ln nu, their barycentric weights, the constants at each."""
    number = np.arange(NUM_POINTS)
    low, high = math.log(NU_LOW), math.log(NU_HIGH)
    points = low + (high - low) * (1 - np.cos(np.pi * number / (NUM_POINTS - 1))) / 2
    weights = np.where(number % 2 == 0, 1.0, -1.0)
    weights[[0, -1]] /= 2
    table = np.stack([constants_of(math.exp(point), levels) for point in points])
    return points, weights, table


def _sinh(t: Tensor) -> Tensor:
    import torch

    growth = torch.exp(t)
    return (growth - 1.0 / growth) / 2.0


def _asinh(x: Tensor) -> Tensor:
    """Of moderate relative accuracy at 0, where the absolute one counts."""
    import torch

    size = torch.abs(x)
    return torch.sign(x) * torch.log(size + torch.sqrt(size * size + 1.0))


def _log_cosh(t: Tensor) -> Tensor:
    import torch

    size = torch.abs(t)
    return size + torch.log(1.0 + torch.exp(-2.0 * size)) - _LN2
