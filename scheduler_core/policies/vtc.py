"""VTC (virtual token counters): fair sharing of tokens among tenants (Sheng et al. 2024, "Fairness in Serving
Large Language Models", OSDI, algorithm 2)."""

from collections import Counter
from dataclasses import dataclass, field

from scheduler_core.policies.base import Policy
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.request import RequestState

#: Number of tenants with counters: their names may be invented by clients.
MAX_TENANTS = 10_000


@dataclass(kw_only=True, slots=True)
class Vtc(Policy):
    """Tenant with the least service first; requests of a tenant by arrival.

    on admission c_u += w_p n;   with every output token c_u += w_q;   key = c_u + w_p (prompts of u waiting before it)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | c_u | counter of tenant u | weighted tokens |
    | w_p, w_q | weight of a prompt token (1) and of an output token (2) | - |
    | n | prompt tokens not in the prefix cache | tokens |

    The counter of a tenant without waiting requests is raised to the minimum of the others at its next
    arrival, so that idle time earns no credit. The counters of two tenants that always have waiting requests
    thus differ by at most 2 max(w_p L_input, w_q M) (paper, theorem 4.4).

    Differs from the paper: the second term of the key anticipates the counter at the admission of the request, so that
    several admissions in one step are fair; a request that is admitted again after a preemption is not charged again; of
    more than 10,000 tenants those without requests and with the least service are forgotten.
    """

    key_changes = "with_time"
    progress = "in_runs"
    inputs = frozenset({"tenant"})

    prompt_weight: float = 1.0
    output_weight: float = 2.0
    _counter: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _joined: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _admitted: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _before: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    #: Waiting requests of the tenants that have any; number of requests of the tenants that have any.
    _queued: dict[str, set[str]] = field(default_factory=dict, init=False, repr=False)
    _num_requests: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _last_left: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, prompt_weight=(POSITIVE, FINITE), output_weight=(POSITIVE, FINITE))

    def counter(self, tenant: str) -> float:
        """c_u: weighted tokens of the tenant; 0 for an unknown tenant."""
        return self._counter.get(tenant, 0.0)

    def on_arrival(self, state: RequestState, now: float) -> None:
        tenant = state.request.tenant
        if tenant not in self._queued:
            others = [self.counter(name) for name in self._queued]
            least = min(others) if others else self.counter(self._last_left)
            self._counter[tenant] = max(self.counter(tenant), least)
        self._queued.setdefault(tenant, set()).add(state.request_id)
        self._num_requests[tenant] += 1
        self._before[state.request_id] = self._joined.get(tenant, 0.0)
        self._joined[tenant] = self._joined.get(tenant, 0.0) + self._charge(state)

    def on_admit(self, state: RequestState, now: float) -> None:
        if self._leave_queue(state):
            self._counter[state.request.tenant] += self._charge(state)

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        if state.num_computed_tokens > state.prefill_target_tokens:
            self._counter[state.request.tenant] += self.output_weight * num_tokens
        elif state.num_computed_tokens == state.prefill_target_tokens:
            self._counter[state.request.tenant] += self.output_weight

    def on_preempt(self, state: RequestState, now: float) -> None:
        self._queued.setdefault(state.request.tenant, set()).add(state.request_id)

    def on_finish(self, state: RequestState) -> None:
        self._leave_queue(state)
        tenant = state.request.tenant
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            # All of its requests have been admitted or have left, so both sums are equal.
            for totals in (self._num_requests, self._joined, self._admitted):
                totals.pop(tenant, None)
            if len(self._counter) > 2 * MAX_TENANTS:
                self._forget()

    def key(self, state: RequestState, now: float) -> float:
        tenant = state.request.tenant
        before = self._before.get(state.request_id)
        ahead = 0.0 if before is None else max(before - self._admitted.get(tenant, 0.0), 0.0)
        return self.counter(tenant) + ahead

    def _charge(self, state: RequestState) -> float:
        return self.prompt_weight * (state.request.prompt_tokens - state.cached_tokens)

    def _leave_queue(self, state: RequestState) -> bool:
        """Removes a request from the queue; returns whether it had not been admitted before."""
        tenant = state.request.tenant
        if queued := self._queued.get(tenant):
            queued.discard(state.request_id)
            if not queued:
                del self._queued[tenant]
        self._last_left = tenant
        if self._before.pop(state.request_id, None) is None:
            return False
        self._admitted[tenant] = self._admitted.get(tenant, 0.0) + self._charge(state)
        return True

    def _forget(self) -> None:
        """Drops counters of tenants without requests, the smallest first; the last tenant that left is kept."""
        kept = {*self._num_requests, self._last_left}
        idle = sorted((name for name in self._counter if name not in kept), key=self.counter)
        for name in idle[: len(self._counter) - MAX_TENANTS]:
            del self._counter[name]
