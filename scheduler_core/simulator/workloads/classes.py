"""Who sends requests: tiers, tenants, kinds of work, each with its share, targets and lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.request import MAX_TIERS
from scheduler_core.simulator.workloads.lengths import Lengths

MIXES = ("uniform", "gaussian", "gaussian_released", "enterprise")

_ENTERPRISE = {
    1: (1.0,),
    2: (0.10, 0.90),
    3: (0.10, 0.30, 0.60),
    4: (0.10, 0.15, 0.15, 0.60),
    5: (0.10, 0.30, 0.50, 0.08, 0.02),
}
_GAUSSIAN_RELEASED = {2: (0.3, 0.7), 3: (0.15, 0.70, 0.15), 5: (0.05, 0.2, 0.5, 0.2, 0.05)}


def tier_weights(mix: str, num_tiers: int) -> NDArray[np.float64]:
    """Share of each tier, the most urgent first; shape [K], of sum 1 (multi-tier paper, section 4.2).

    - uniform: 1/K each.
    - gaussian: the paper's words: a bell around the middle tier with standard deviation K/4.
    - gaussian_released: its code's: fixed shares for K = 2, 3, 5 and exp(-2 d^2 / K) at distance d from the middle else.
    - enterprise: its code's shares for K = 3, 4, 5; beyond that 10 % for the first tier, 70 % over the middle ones, 20 %
      for the last, as the paper says in words.

    Raises:
        InputError: There is no such mix, or K is below 1.
    """
    if not 1 <= num_tiers <= MAX_TIERS:
        raise InputError("num_tiers", num_tiers, f"integers from 1 to {MAX_TIERS}")
    distance = np.arange(num_tiers) - (num_tiers - 1) / 2
    if mix == "uniform":
        weights = np.ones(num_tiers)
    elif mix == "gaussian":
        weights = np.exp(-0.5 * (distance / (num_tiers / 4)) ** 2)
    elif mix == "gaussian_released":
        fixed = _GAUSSIAN_RELEASED.get(num_tiers)
        weights = np.exp(-2 * distance**2 / num_tiers) if fixed is None else np.array(fixed)
    elif mix == "enterprise":
        named = _ENTERPRISE.get(num_tiers)
        middle = (0.70 / (num_tiers - 2),) * (num_tiers - 2) if num_tiers > 2 else ()
        weights = np.array((0.10, *middle, 0.20) if named is None else named)
    else:
        raise InputError("tier_mix", mix, ", ".join(MIXES))
    return np.asarray(weights / weights.sum())


@dataclass(frozen=True, kw_only=True)
class RequestClass:
    """One class of requests.

    Raises:
        InputError: The share is not above 0.
    """

    share: float = 1.0
    """Its share of the requests, in any unit: shares are divided by their sum."""
    tenant: str = ""
    """Who sends it, such as paying or free."""
    category: str = ""
    """What it is, such as reasoning or chat."""
    tier: int | None = None
    """Declared urgency, 0 the most urgent. Unset: by the workload's tiers, or 2."""
    priority: int = 0
    """Declared priority, smaller first."""
    ttft_slo_s: float | None = None
    """Wanted time to the first token."""
    tbt_slo_s: float | None = None
    """Wanted time between two tokens."""
    ttlt_slo_s: float | None = None
    """Wanted time to the last token."""
    lengths: Lengths | None = None
    """Its own lengths. Unset: the workload's."""

    def __post_init__(self) -> None:
        if not self.share > 0:
            raise InputError("share", self.share, "numbers > 0")


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Tiers drawn for every request, independently of everything else.

    Raises:
        InputError: There is no such mix, or K is below 1.
    """

    num_tiers: int = 1
    """K; tiers are 0 (the most urgent) to K - 1."""
    mix: Literal["uniform", "gaussian", "gaussian_released", "enterprise"] = "uniform"
    """Their shares: uniform; gaussian (a bell around the middle, standard deviation K/4); gaussian_released (as in the
    multi-tier paper's code); enterprise (10 % critical, most in the middle or last)."""

    def __post_init__(self) -> None:
        tier_weights(self.mix, self.num_tiers)


def paying_and_free(paying_share: float) -> tuple[RequestClass, ...]:
    """SLAI's two classes: paying users want 0.1 s between tokens, free ones 0.5 s (section 7).

    Raises:
        InputError: The share is not between 0 and 1.
    """
    if not 0 < paying_share < 1:
        raise InputError("paying_share", paying_share, "numbers between 0 and 1")
    return (
        RequestClass(share=paying_share, tenant="paying", tier=0, tbt_slo_s=0.1),
        RequestClass(share=1 - paying_share, tenant="free", tier=1, tbt_slo_s=0.5),
    )
