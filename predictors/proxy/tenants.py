"""Whose a request is, and how much of the engine one tenant may have."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from predictors.proxy.metrics import ProxyMetrics
from predictors.proxy.problems import Refusal
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS

#: Idle tenants beyond this number are forgotten, the longest idle first.
MAX_TENANTS = 10_000
#: Label of all tenants whose limits have no entry of their own: metrics are as many as entries.
OTHERS = "others"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may do; None: as much as it likes.

    Attributes:
        max_concurrent: Requests inside at a time.
        rate_per_s: Requests per second in the long run.
        burst: Requests at once after a pause.
        max_waiting: Requests in the proxy's own queue at a time.
        most_urgent_tier: The most urgent tier that it may declare; None: what all clients may.
        weight: Its share of the places that the proxy's own queue gives out, beside others' (see `shares.py`); None: 1.

    Raises:
        InputError: A limit is outside its range.
    """

    max_concurrent: int | None = None
    rate_per_s: float | None = None
    burst: int = 10
    max_waiting: int | None = None
    most_urgent_tier: int | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise InputError("tenant_max_concurrent", self.max_concurrent, "an integer >= 1, or unset")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise InputError("tenant_rate_per_s", self.rate_per_s, "requests per second > 0, or unset")
        if self.burst < 1:
            raise InputError("tenant_burst", self.burst, "an integer >= 1")
        if self.max_waiting is not None and self.max_waiting < 1:
            raise InputError("tenant_max_waiting", self.max_waiting, "an integer >= 1, or unset")
        if self.most_urgent_tier is not None and not 0 <= self.most_urgent_tier < len(LEVELS):
            raise InputError("tenant_most_urgent_tier", self.most_urgent_tier, f"0 to {len(LEVELS) - 1}")
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise InputError("tenant_weight", self.weight, "a finite number > 0, or unset")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBook:
    """The limits of every tenant.

    Attributes:
        default: Of tenants without an entry; each of them has these limits for itself.
        named: Entries by name.
    """

    default: TenantLimits = field(default_factory=TenantLimits)
    named: Mapping[str, TenantLimits] = field(default_factory=dict)

    def limits(self, name: str) -> TenantLimits:
        """Of one tenant."""
        return self.named.get(name, self.default)

    def weight(self, name: str) -> float:
        """Of one tenant."""
        found = self.limits(name).weight
        return 1.0 if found is None else found

    def label(self, name: str) -> str:
        """Its name in metrics: its own only where it has an entry."""
        return name if name in self.named else OTHERS

    @property
    def needs_queue(self) -> str | None:
        """A limit that only the proxy's own queue can keep; None if there is none."""
        every = (self.default, *self.named.values())
        if any(limits.max_waiting is not None for limits in every):
            return "max_waiting"
        return "weight" if self.has_weights else None

    @property
    def has_weights(self) -> bool:
        """Whether any tenant has a weight: then places are shared out by weight."""
        return any(limits.weight is not None for limits in (self.default, *self.named.values()))


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
        book: The limits of each.
        clock: Monotonic seconds.
        metrics: Gets requests and refusals by tenant; None: nobody does.
    """

    def __init__(
        self, book: TenantBook, clock: Callable[[], float], metrics: ProxyMetrics | None = None
    ) -> None:
        self.book = book
        self._clock = clock
        self._metrics = metrics
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def enter(self, name: str) -> None:
        """A request comes in.

        Raises:
            Refusal: One of the limits is reached (429); nothing is counted then.
        """
        limits, now = self.book.limits(name), self._clock()
        use = self._uses.setdefault(name, _Use(0, float(limits.burst), now))
        self._uses.move_to_end(name)
        if limits.max_concurrent is not None and use.inside >= limits.max_concurrent:
            found = f"concurrent requests: got {use.inside + 1}; allowed: {limits.max_concurrent}"
            raise limit_reached(found, "tenant_concurrency", 1)
        if limits.rate_per_s is not None:
            earned = (now - use.seen_s) * limits.rate_per_s
            use.allowance, use.seen_s = min(use.allowance + earned, float(limits.burst)), now
            if use.allowance < 1:
                wait_s = math.ceil((1 - use.allowance) / limits.rate_per_s)
                found = (
                    f"requests per second: got more; allowed: {limits.rate_per_s:g}, {limits.burst} at once"
                )
                raise limit_reached(found, "tenant_rate", wait_s)
            use.allowance -= 1
        use.inside += 1
        if self._metrics is not None:
            self._metrics.tenant_inside.labels(self.book.label(name)).inc()
        self._forget()

    def leave(self, name: str) -> None:
        """The request is answered, or gone."""
        self._uses[name].inside -= 1
        if self._metrics is not None:
            self._metrics.tenant_inside.labels(self.book.label(name)).dec()

    def count(self, name: str, outcome: str) -> None:
        """Notes what came of a request: `passed`, `broken` (no whole answer), or the code of the proxy's refusal."""
        if self._metrics is not None:
            self._metrics.tenant_requests.labels(self.book.label(name), outcome).inc()

    def _forget(self) -> None:
        for name in list(self._uses) if len(self._uses) > MAX_TENANTS else ():
            if len(self._uses) <= MAX_TENANTS:
                return
            if self._uses[name].inside == 0:
                del self._uses[name]


def limit_reached(found: str, code: str, retry_after_s: int) -> Refusal:
    """429 for one of a tenant's limits."""
    return Refusal(
        429,
        f"this tenant's {found}; retry after {retry_after_s} s",
        kind="rate_limit_exceeded",
        code=code,
        retry_after_s=retry_after_s,
    )
