"""Student-t density and tails as differentiable torch functions, in float64.

Separate from the numpy distribution of scheduler_core.lengths, because training needs autograd and torch has no
incomplete beta function. The tail I_x(nu/2, 1/2) / 2 with x = nu / (nu + t^2) is computed by the continued fraction of
DLMF 8.17.22 (modified Lentz method), on the side where it converges fast.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# Maximum number of terms, sufficient for 1 <= nu <= 1000; the required number grows with the square root of nu.
NUM_TERMS = 120
# Relative step of the numerical derivative by nu.
NU_STEP = 1e-4
_TINY = 1e-300


def log_density(t: Tensor, nu: Tensor) -> Tensor:
    """ln of the Student-t density; t and nu are broadcast."""
    half = 0.5 * (nu + 1)
    constant = torch.lgamma(half) - torch.lgamma(0.5 * nu) - 0.5 * torch.log(math.pi * nu)
    return constant - half * torch.log1p(t * t / nu)


def _fraction(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The continued fraction f with I_x(a, b) = x^a (1 - x)^b / (a B(a, b)) * f."""
    d = 1 - (a + b) * x / (a + 1)
    d = 1 / torch.where(d.abs() < _TINY, _TINY, d)
    c = torch.ones_like(d)
    value = d
    for m in range(1, NUM_TERMS):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + factor * d
            d = 1 / torch.where(d.abs() < _TINY, _TINY, d)
            c = 1 + factor / c
            c = torch.where(c.abs() < _TINY, _TINY, c)
            value = value * (d * c)
        if m % 16 == 0 and bool(((d * c - 1).abs() < 1e-15).all()):
            break
    return value


def _log_tail(size: Tensor, nu: Tensor) -> Tensor:
    """ln P(T > size) for size >= 0."""
    a, b = 0.5 * nu, torch.full_like(nu, 0.5)
    ratio = size * size / nu
    log_x = -torch.log1p(ratio)
    log_y = torch.where(size > 0, -torch.log1p(1 / ratio.clamp_min(_TINY)), -math.inf)
    log_beta = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
    x, y = torch.exp(log_x), torch.exp(log_y)
    direct = x < (a + 1) / (a + b + 2)
    # Both sides are computed everywhere, with a safe argument for elements that use the other side.
    tail = a * log_x + torch.where(direct, b * log_y, 0.0) - torch.log(a) - log_beta
    tail = tail + torch.log(_fraction(torch.where(direct, x, 0.1), a, b))
    complement = a * torch.where(direct, 0.0, log_x) - torch.log(b) - log_beta + b * log_y
    complement = torch.exp(complement) * _fraction(torch.where(direct, 0.1, y), b, a)
    return math.log(0.5) + torch.where(direct, tail, torch.log1p(-torch.where(direct, 0.0, complement)))


def log_tail(t: Tensor, nu: Tensor) -> Tensor:
    """ln P(T > t), without derivatives; float64 tensors of one shape."""
    tail = _log_tail(t.abs(), nu)
    return torch.where(t >= 0, tail, torch.log1p(-torch.exp(tail)))


class _LogTail(torch.autograd.Function):
    """ln P(T > t); its derivative by t is minus the hazard, and by nu a central difference."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, nu: Tensor) -> Tensor:
        value = log_tail(t, nu)
        ctx.save_for_backward(t, nu, value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (gradient,) = gradients
        t, nu, value = ctx.saved_tensors
        by_nu = None
        if ctx.needs_input_grad[1]:
            up, down = log_tail(t, nu * (1 + NU_STEP)), log_tail(t, nu * (1 - NU_STEP))
            by_nu = gradient * (up - down) / (2 * NU_STEP * nu)
        return -gradient * torch.exp(log_density(t, nu) - value), by_nu


def log_survival(t: Tensor, nu: Tensor) -> Tensor:
    """ln P(T > t) of the Student-t distribution, differentiable.

    The derivative by t is exact (minus the hazard); by nu it is a central difference with relative step 1e-4.

    Args:
        t: Real numbers.
        nu: Degrees of freedom from 1 to 1000; broadcast with t.

    Returns:
        float64 tensor of the broadcast shape.
    """
    t, nu = torch.broadcast_tensors(t.double(), nu.double())  # type: ignore[no-untyped-call]
    return _LogTail.apply(t.contiguous(), nu.contiguous())  # type: ignore[no-any-return,no-untyped-call]
