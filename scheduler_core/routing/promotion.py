"""Promotion of starved tiers: who has waited longer than its tier's quota counts as one tier more urgent (the feedback
queues of Corbato et al. 1962, named as future work in the multi-tier paper, section 6.5)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler_core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPromotion:
    """A request rises by one tier after each quota of waiting.

    tier_eff(t) = p - max{ n : Q_p + Q_{p-1} + ... + Q_{p-n+1} <= t },   never above `highest`

    | symbol | meaning | unit |
    | --- | --- | --- |
    | p | declared tier, 0 the most urgent | - |
    | t | time since arrival | s |
    | Q_p | quota_s: longest wait in tier p; infinite: nobody rises from it | s |
    | highest | most urgent tier that can be reached by waiting | - |

    With finite quotas from the last tier to `highest` + 1 nobody waits behind later arrivals of any tier below
    `highest` for longer than their sum. `highest` = 1 keeps tier 0 for those that were given it.

    Raises:
        InputError: A quota is not above 0, or `highest` is no tier.
    """

    quota_s: tuple[float, ...] = (math.inf, 10.0, 10.0, 20.0, 40.0)
    highest: int = 1

    def __post_init__(self) -> None:
        if not self.quota_s or not all(quota > 0 for quota in self.quota_s):
            raise InputError("quota_s", self.quota_s, "one number of seconds > 0 for each tier")
        if not 0 <= self.highest < len(self.quota_s):
            raise InputError("highest", self.highest, f"a tier from 0 to {len(self.quota_s) - 1}")

    def tier(self, declared: int, waited_s: float) -> int:
        """The tier that a request counts as, after so long.

        Raises:
            InputError: There is no such tier, or the wait is negative.
        """
        if not 0 <= declared < len(self.quota_s):
            raise InputError("tier", declared, f"0 to {len(self.quota_s) - 1}")
        if not waited_s >= 0:
            raise InputError("waited_s", waited_s, "seconds >= 0")
        tier, left_s = declared, waited_s
        while tier > self.highest and left_s >= self.quota_s[tier]:
            left_s -= self.quota_s[tier]
            tier -= 1
        return tier

    def next_change_s(self, declared: int, waited_s: float) -> float:
        """Seconds until the request rises again; infinite if it never will. For queues keyed by event."""
        self.tier(declared, waited_s)
        ends_s, tier = 0.0, declared
        while tier > self.highest:
            ends_s += self.quota_s[tier]
            if ends_s > waited_s:
                return ends_s - waited_s
            tier -= 1
        return math.inf
