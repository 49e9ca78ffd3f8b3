"""Whose a request is, and how much of the engine one tenant may have."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from predictors.proxy.problems import Refusal
from scheduler_core.errors import InputError

#: Idle tenants beyond this number are forgotten, the longest idle first.
MAX_TENANTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may do; None: as much as it likes.

    Attributes:
        max_concurrent: Requests inside at a time.
        rate_per_s: Requests per second in the long run.
        burst: Requests at once after a pause.

    Raises:
        InputError: A limit is outside its range.
    """

    max_concurrent: int | None = None
    rate_per_s: float | None = None
    burst: int = 10

    def __post_init__(self) -> None:
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise InputError("tenant_max_concurrent", self.max_concurrent, "an integer >= 1, or unset")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise InputError("tenant_rate_per_s", self.rate_per_s, "requests per second > 0, or unset")
        if self.burst < 1:
            raise InputError("tenant_burst", self.burst, "an integer >= 1")


def tenant_of(headers: Mapping[str, str], header: str) -> str:
    """The tenant's name: the header's value, else a hash of the API key, else empty.

    Only twelve digits of the hash are kept: keys are in no log and no metric.
    """
    named = headers.get(header, "").strip()
    if named:
        return named
    key = headers.get("Authorization", "") or headers.get("api-key", "")
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:12] if key else ""


@dataclass(slots=True)
class _Use:
    inside: int
    allowance: float
    seen_s: float


class Tenants:
    """Counts what tenants do; those without a name share the empty one.

    Args:
        limits: Of each tenant.
        clock: Monotonic seconds.
    """

    def __init__(self, limits: TenantLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def enter(self, name: str) -> None:
        """A request comes in.

        Raises:
            Refusal: One of the limits is reached (429); nothing is counted then.
        """
        limits, now = self._limits, self._clock()
        use = self._uses.setdefault(name, _Use(0, float(limits.burst), now))
        self._uses.move_to_end(name)
        if limits.max_concurrent is not None and use.inside >= limits.max_concurrent:
            found = f"concurrent requests: got {use.inside + 1}; allowed: {limits.max_concurrent}"
            raise _limited(found, "tenant_concurrency", 1)
        if limits.rate_per_s is not None:
            earned = (now - use.seen_s) * limits.rate_per_s
            use.allowance, use.seen_s = min(use.allowance + earned, float(limits.burst)), now
            if use.allowance < 1:
                wait_s = math.ceil((1 - use.allowance) / limits.rate_per_s)
                found = (
                    f"requests per second: got more; allowed: {limits.rate_per_s:g}, {limits.burst} at once"
                )
                raise _limited(found, "tenant_rate", wait_s)
            use.allowance -= 1
        use.inside += 1
        self._forget(now)

    def leave(self, name: str) -> None:
        """The request is answered, or gone."""
        self._uses[name].inside -= 1

    def _forget(self, now: float) -> None:
        for name in list(self._uses) if len(self._uses) > MAX_TENANTS else ():
            if len(self._uses) <= MAX_TENANTS:
                return
            if self._uses[name].inside == 0:
                del self._uses[name]


def _limited(found: str, code: str, retry_after_s: int) -> Refusal:
    return Refusal(429, found, kind="rate_limit_exceeded", code=code, retry_after_s=retry_after_s)
