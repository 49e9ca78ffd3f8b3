"""Boosts: by how many seconds a request is moved ahead of its arrival (Yu & Scully 2024, "Strongly tail-optimal
scheduling in the light-tailed M/G/1", Proc. ACM Meas. Anal. Comput. Syst. 8(2); Harlev, Yu & Scully 2025, "A Gittins policy
for optimizing tail latency", 9(2)).

Least arrival - boost first. To make P(response > t) fall fastest, sum exp(gamma * response) is to be small. Exchanging
two neighbours of known work w shows which boost does that, and with work unknown but for its distribution W, worked on
until b at most, the same exchange gives the second line:

    b(w) = (1/gamma) ln( 1 / (1 - exp(-gamma w)) )
    b(W) = (1/gamma) ln( sup over b of  E[exp(gamma W); W <= b] / (E[exp(gamma min(W, b))] - 1) )

| symbol | meaning | unit |
| --- | --- | --- |
| gamma | rate at which P(response > t) falls | 1/s |
| w, W | work: engine time that the request still needs, alone | s |
"""

from __future__ import annotations

import math

import numpy as np

from scheduler_core.indices.length_table import LengthTable

_LARGEST_EXPONENT = 600.0


def boost_s(work_s: float, gamma_per_s: float) -> float:
    """b_gamma(w) = (1/gamma) ln(1/(1 - exp(-gamma w))), in seconds; falls from infinity (w = 0) to 0.

    Args:
        work_s: w > 0, in seconds.
        gamma_per_s: gamma > 0.
    """
    return -math.log(-math.expm1(-gamma_per_s * work_s)) / gamma_per_s


def predicted_boost_s(
    length: LengthTable,
    gamma_per_s: float,
    token_s: float,
    *,
    prefill_s: float = 0.0,
    preemptive: bool = True,
) -> float:
    """b_gamma(W), in seconds, of W = prefill_s + X token_s under a predicted length X.

    A length table is a mixture of known lengths (its points), so both expectations are sums over it. Without
    preemption b is the cap, and the boost is (1/gamma) ln(E[exp(gamma W)] / (E[exp(gamma W)] - 1)).

    Args:
        length: Predicted length.
        gamma_per_s: gamma > 0.
        token_s: Engine time per output token, in seconds > 0.
        prefill_s: Engine time of the prompt, in seconds >= 0.
        preemptive: Whether the request can be stopped before it ends.
    """
    mass = -np.diff(length.survival)
    middle = np.maximum(0.5 * (length.points[1:] + length.points[:-1]), 0.5)
    exponent = np.minimum(gamma_per_s * (prefill_s + token_s * middle), _LARGEST_EXPONENT)
    growth = np.expm1(exponent)
    finished = np.cumsum(mass * np.exp(exponent))
    spent = np.cumsum(mass * growth) + length.survival[1:] * growth
    ratio = finished / spent
    best = float(ratio.max() if preemptive else ratio[-1])
    return math.log(max(best, 1.0)) / gamma_per_s
