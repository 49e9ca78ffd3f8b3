"""Adaptive headroom: more where targets are missed, less where it is of no use (multi-tier, section 6.5: future work)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler_core.errors import InputError
from scheduler_core.routing.headroom import Headroom, exponential_headroom


@dataclass(kw_only=True, slots=True)
class AdaptiveHeadroom:
    """Each tier's share follows its own rate of missed targets: additive increase, multiplicative decrease.

    every period_s, for each tier p with at least `min_observed` requests done in the period:
        v_p = missed / done
        v_p > target:  share_p <- share_p + step
        else:          share_p <- share_p * decay
    Raising stops where the sum of all shares would exceed `max_total`: the more urgent tiers are raised first.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | v_p | share of the tier's finished requests that missed a target | - |
    | target | tolerated v_p | - |
    | step, decay | how fast a share rises and falls; the fall makes unused headroom go away | - |
    | max_total | most of the KV cache that headroom may claim | - |
    | period_s | time between two changes | s |

    Increase by a constant and decrease by a factor is the rule that converges to fair shares of a common limit (Chiu
    and Jain 1989, "Analysis of the increase and decrease algorithms").

    Raises:
        InputError: A parameter is outside its range.
    """

    initial: Headroom = field(default_factory=exponential_headroom)
    target: float = 0.01
    step: float = 0.02
    decay: float = 0.9
    max_total: float = 0.5
    period_s: float = 5.0
    min_observed: int = 20
    _shares: list[float] = field(init=False, repr=False)
    _done: list[int] = field(init=False, repr=False)
    _missed: list[int] = field(init=False, repr=False)
    _since_s: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("target", "step", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(name, getattr(self, name), "numbers in [0, 1]")
        if not math.fsum(self.initial.shares) <= self.max_total <= 1:
            allowed = f"from the sum of the initial shares, {math.fsum(self.initial.shares):.4g}, to 1"
            raise InputError("max_total", self.max_total, allowed)
        if not 0 < self.period_s < math.inf:
            raise InputError("period_s", self.period_s, "seconds > 0")
        if self.min_observed < 1:
            raise InputError("min_observed", self.min_observed, "integers > 0")
        self._shares = list(self.initial.shares)
        self._forget()

    @property
    def headroom(self) -> Headroom:
        """The shares as they are now."""
        return Headroom(tuple(self._shares))

    def observe(self, tier: int, *, missed: bool) -> None:
        """A request of the tier is done.

        Args:
            tier: Its tier.
            missed: It missed one of its targets.

        Raises:
            InputError: There is no such tier.
        """
        if not 0 <= tier < len(self._shares):
            raise InputError("tier", tier, f"0 to {len(self._shares) - 1}")
        self._done[tier] += 1
        self._missed[tier] += missed

    def update(self, now: float) -> Headroom:
        """The shares from now on; they change only when a period is over.

        Args:
            now: Time in seconds; the first call starts the first period.
        """
        if self._since_s is None:
            self._since_s = now
        elif now - self._since_s >= self.period_s:
            self._change()
            self._since_s = now
            self._forget()
        return self.headroom

    def _change(self) -> None:
        seen = [tier for tier, done in enumerate(self._done) if done >= self.min_observed]
        violating = [tier for tier in seen if self._missed[tier] > self.target * self._done[tier]]
        for tier in seen:
            if tier not in violating:
                self._shares[tier] *= self.decay
        for tier in violating:
            room = self.max_total - math.fsum(self._shares)
            self._shares[tier] += max(0.0, min(self.step, room))

    def _forget(self) -> None:
        self._done = [0] * len(self._shares)
        self._missed = [0] * len(self._shares)
