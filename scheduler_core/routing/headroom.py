"""Headroom: KV memory that is counted as used on a replica because urgent tiers are there (multi-tier, section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS


@dataclass(frozen=True, slots=True)
class Headroom:
    """Share of the KV cache counted as used for each tier that is present.

    Attributes:
        shares: H_p / M by tier, the most urgent first; each in [0, 1].

    Raises:
        InputError: No tier, or a share outside its range.
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares:
            raise InputError("headroom shares", self.shares, "at least one tier")
        for share in self.shares:
            if not 0 <= share <= 1:
                raise InputError("headroom share", share, "numbers in [0, 1]")

    @property
    def num_tiers(self) -> int:
        """K, the number of tiers."""
        return len(self.shares)

    def blocks(self, tiers: Iterable[int], num_kv_blocks: int) -> float:
        """V_headroom = sum of H_p over the tiers that are present, each once (Eq. 4), in blocks.

        Args:
            tiers: Tiers of the requests on the replica.
            num_kv_blocks: M, blocks in its KV cache.

        Raises:
            InputError: There is no such tier.
        """
        return num_kv_blocks * math.fsum(self.shares[self._checked(tier)] for tier in set(tiers))

    def _checked(self, tier: int) -> int:
        if not 0 <= tier < self.num_tiers:
            raise InputError("tier", tier, f"0 to {self.num_tiers - 1}")
        return tier


def exponential_headroom(
    num_tiers: int = len(LEVELS), max_share: float = 0.20, decay: float = 1.0
) -> Headroom:
    """H_p = M h_max exp(-lambda p) (Eq. 3), without rounding.

    Args:
        num_tiers: K, > 0.
        max_share: h_max, share of tier 0, in [0, 1].
        decay: lambda >= 0, per tier; 1 in the paper's figure 3. Its released code uses 2.5/(K - 1) and rounds the
            blocks down: `released_decay`.

    Raises:
        InputError: An argument is outside its range.
    """
    if num_tiers < 1:
        raise InputError("num_tiers", num_tiers, "integers > 0")
    if not 0 <= max_share <= 1:
        raise InputError("max_share", max_share, "numbers in [0, 1]")
    if not 0 <= decay < math.inf:
        raise InputError("decay", decay, "numbers >= 0")
    return Headroom(tuple(max_share * math.exp(-decay * tier) for tier in range(num_tiers)))


def released_decay(num_tiers: int) -> float:
    """lambda of the paper's released code: 2.5/(K - 1), so that the last tier gets 8 % of the first one's share.

    Raises:
        InputError: K is not above 1.
    """
    if num_tiers < 2:
        raise InputError("num_tiers", num_tiers, "integers > 1")
    return 2.5 / (num_tiers - 1)
