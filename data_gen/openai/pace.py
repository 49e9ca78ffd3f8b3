"""How fast servers are asked: additive increase and multiplicative decrease per server, back-off, a dead one put aside.

Nothing here knows a clock or a socket: times (seconds of any one clock) come in as arguments.
"""

from __future__ import annotations

import contextlib
import email.utils
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC

CUT = 0.5
"""Factor on the limit when a server is overloaded, as in TCP."""
STEPS_TO_FULL = 50
"""Rounds of successes that take the limit from nothing back to its maximum."""
CREDIT_PER_SUCCESS = 0.25
"""Retry budget: a server earns this for an answer and pays 1 for a failure; without credit it is put aside."""
MAX_CREDIT = 100.0


@dataclass(slots=True, eq=False)
class Server:
    """One address: how many requests it gets at a time, and since when it is put aside.

    Attributes:
        url: Its base address.
        max_limit: Most requests in flight.
        limit: Requests in flight that it is given now.
        in_flight: Requests in flight.
        paused_until: It gets no request before this time (Retry-After).
        aside_since: When it was put aside; None while it is in use.
        strikes: Cuts since its last answer; the pause after a cut grows with it.
        absences: How often it was put aside since its last answer; the back-off of trying it again grows with it.
        credit: What is left of its retry budget.
    """

    url: str
    max_limit: int
    limit: float = 0.0
    in_flight: int = 0
    paused_until: float = float("-inf")
    aside_since: float | None = None
    strikes: int = 0
    absences: int = 0
    credit: float = MAX_CREDIT
    _cut_at: float = float("-inf")

    def __post_init__(self) -> None:
        self.limit = self.limit or float(self.max_limit)

    def has_room(self, now: float) -> bool:
        """Whether one more request may be sent."""
        return self.aside_since is None and self.in_flight < int(self.limit) and now >= self.paused_until

    def succeeded(self) -> None:
        """An answer came: room grows by max_limit / STEPS_TO_FULL in a round of answers."""
        self.absences = self.strikes = 0
        self.credit = min(MAX_CREDIT, self.credit + CREDIT_PER_SUCCESS)
        if self.limit < self.max_limit:
            step = max(1.0, self.max_limit / STEPS_TO_FULL)
            self.limit = min(float(self.max_limit), self.limit + step / self.limit)

    def overloaded(self, sent_at: float, now: float) -> bool:
        """It answered 429 or 5xx, or not in time: halves the limit, once for all requests sent before the last cut.

        Returns:
            Whether the limit was cut; then a pause is due.
        """
        if sent_at < self._cut_at:
            return False
        self.limit = max(1.0, min(self.limit, self.in_flight) * CUT)
        self._cut_at = now
        self.strikes += 1
        return True

    def pause(self, until: float) -> None:
        """No request is sent before `until`."""
        self.paused_until = max(self.paused_until, until)

    def failed(self) -> bool:
        """Pays for a failure from the retry budget; True if that is used up."""
        self.credit = max(0.0, self.credit - 1.0)
        return self.credit == 0.0

    def put_aside(self, now: float) -> None:
        """It gets no requests until `bring_back`."""
        if self.aside_since is None:
            self.aside_since = now
            self.absences += 1

    def bring_back(self, *, at_full: bool = False) -> None:
        """It answers again: it starts with little and earns the rest, or goes on as before if it never was away."""
        self.aside_since = None
        if at_full:
            return
        self.credit = max(self.credit, MAX_CREDIT / 4)
        self.limit = min(self.limit, max(1.0, self.max_limit / 4))


@dataclass(slots=True)
class Pool:
    """All servers of one run."""

    servers: Sequence[Server]
    _first: int = field(default=0)

    def pick(self, now: float) -> Server | None:
        """The server with room and the fewest requests in flight; None if none has room. Equal ones take turns."""
        best: Server | None = None
        count = len(self.servers)
        for offset in range(count):
            server = self.servers[(self._first + offset) % count]
            if server.has_room(now) and (best is None or server.in_flight < best.in_flight):
                best = server
        if count > 1:
            self._first = (self._first + 1) % count
        return best

    def next_wake(self, now: float) -> float | None:
        """When the earliest pause ends that keeps a server with room from being used; None if there is none."""
        times = [
            server.paused_until
            for server in self.servers
            if server.aside_since is None
            and server.paused_until > now
            and server.in_flight < int(server.limit)
        ]
        return min(times, default=None)

    def all_aside_since(self) -> float | None:
        """Since when no server is in use; None if one is."""
        since = [server.aside_since for server in self.servers]
        return None if None in since else max(time for time in since if time is not None)


def backoff_s(attempt: int, base_s: float, cap_s: float, rng: random.Random) -> float:
    """Wait after the failed try number `attempt` (from 1): exponential with full jitter, uniform on [0, end)."""
    return rng.random() * min(cap_s, base_s * 2.0 ** min(attempt - 1, 60))


def retry_after_s(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """Seconds that the server asks to wait: Retry-After in seconds or as an HTTP date, or retry-after-ms.

    None if it does not say, or nothing that can be read.
    """
    for name, unit_s in (("retry-after-ms", 1e-3), ("Retry-After", 1.0)):
        with contextlib.suppress(ValueError):
            seconds = float(headers.get(name, "")) * unit_s
            if math.isfinite(seconds):
                return max(0.0, seconds)
    try:
        moment = email.utils.parsedate_to_datetime(headers.get("Retry-After", ""))
    except (TypeError, ValueError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, moment.timestamp() - now_unix_s)
