"""The waiting requests of several tenants, of whom each gets its share of the places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState
from scheduler_core.waiting_queue import WaitingQueue

#: Tenants without requests beyond this number are forgotten, and with them what they have had.
MAX_IDLE = 10_000


@dataclass(slots=True)
class _Share:
    queue: WaitingQueue
    running: int = 0
    had: float = 0.0  # seat seconds / weight, up to `at_s`
    at_s: float = 0.0


class SharedQueue:
    """Next is the tenant that has had least for its weight, and of its requests the policy's first.

    had_u = seconds that requests of tenant u have occupied places / weight_u. It grows while they run, so nothing has to be
    predicted. A tenant that comes back with nothing waiting or running is lifted to the least of those that have: idling
    saves up nothing (as in VTC, Sheng et al. 2024, "Fairness in Serving Large Language Models", OSDI, algorithm 2, which
    counts tokens instead of time). Among tenants that always have requests waiting, places are in proportion to weights.

    Args:
        policy: Order within a tenant.
        weight: Of a tenant, above 0.
        clock: Seconds that never step back.
    """

    def __init__(self, policy: Policy, weight: Callable[[str], float], clock: Callable[[], float]) -> None:
        self._policy, self._weight, self._clock = policy, weight, clock
        self._shares: dict[str, _Share] = {}
        self._owners: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._owners

    def push(self, state: RequestState, now: float) -> None:
        """Puts a request in, or moves it to where it now belongs."""
        name = state.request.tenant
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = _Share(WaitingQueue(self._policy), at_s=now)
        if not share.queue and not share.running:
            share.had, share.at_s = max(share.had, self._least(now)), now
        share.queue.push(state, now)
        self._owners[state.request_id] = name

    def remove(self, state: RequestState) -> None:
        """Takes a request out."""
        self._shares[self._owners.pop(state.request_id)].queue.remove(state)

    def peek(self) -> RequestState | None:
        """The next request; None if there is none."""
        now = self._clock()
        waiting = [(name, share) for name, share in self._shares.items() if share.queue]
        if not waiting:
            return None

        def place(item: tuple[str, _Share]) -> tuple[float, float]:
            name, share = item
            return self._had(name, share, now), share.running / self._weight(name)

        return min(waiting, key=place)[1].queue.peek()

    def rekey_all(self, now: float) -> None:
        """Places every request anew within its tenant."""
        for share in self._shares.values():
            share.queue.rekey_all(now)

    def let_through(self, state: RequestState) -> None:
        """A request, already taken out, occupies a place from now on."""
        self._settle(state.request.tenant).running += 1

    def left(self, state: RequestState) -> None:
        """It does not any more."""
        self._settle(state.request.tenant).running -= 1
        self._forget()

    def had(self, tenant: str) -> float:
        """Seat seconds per weight that a tenant has had; 0 for one that is not known."""
        share = self._shares.get(tenant)
        return 0.0 if share is None else self._had(tenant, share, self._clock())

    def _had(self, name: str, share: _Share, now: float) -> float:
        return share.had + share.running * (now - share.at_s) / self._weight(name)

    def _settle(self, name: str) -> _Share:
        share, now = self._shares[name], self._clock()
        share.had, share.at_s = self._had(name, share, now), now
        return share

    def _least(self, now: float) -> float:
        busy = [
            self._had(name, share, now)
            for name, share in self._shares.items()
            if share.queue or share.running
        ]
        return min(busy, default=0.0)

    def _forget(self) -> None:
        busy = {name: share for name, share in self._shares.items() if share.queue or share.running}
        if not busy or len(self._shares) - len(busy) > MAX_IDLE:
            self._shares = busy
