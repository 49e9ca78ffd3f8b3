"""The step that a batch former builds."""

from collections.abc import Iterable

from scheduler_core.engine.lockstep import LockstepGroup
from scheduler_core.engine.plan import KVTransfer, PrefillChunk, StepPlan
from scheduler_core.engine.pool import Pool
from scheduler_core.request import RequestState, Status


class Batch:
    """The requests of one step, with admissions and evictions.

    Attributes:
        budget: Number of tokens that can still be added.
        prefills: Requests, each with its chunk to process.
        decodes: Requests that generate one token.
        admitted: Requests that left the waiting queue.
        preempted: Requests that returned to the waiting queue.
        swapped_out: Copies of preempted requests to the host.
        swapped_in: Copies of admitted requests back to the device.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prefills: list[tuple[RequestState, PrefillChunk]] = []
        self.decodes: list[RequestState] = []
        self._owns_decodes = True
        self.admitted: list[str] = []
        self.preempted: list[str] = []
        self.swapped_out: list[KVTransfer] = []
        self.swapped_in: list[KVTransfer] = []

    def plan(self, step: int, group: LockstepGroup | None) -> StepPlan:
        """The plan for the engine. `group`: the requests in lockstep, None without lockstep."""
        decodes: tuple[str, ...] = ()
        context_tokens = 0
        if self.decodes:
            if group is None:
                decodes = tuple([state.request_id for state in self.decodes])
                context_tokens = sum([state.num_computed_tokens for state in self.decodes])
            else:
                decodes, context_tokens = group.ids(), group.context_tokens
        chunks = tuple([chunk for _, chunk in self.prefills]) if self.prefills else ()
        for chunk in chunks:
            context_tokens += chunk.start_token
        admitted, preempted = tuple(self.admitted), tuple(self.preempted)
        swaps = tuple(self.swapped_out), tuple(self.swapped_in)
        return StepPlan(step, chunks, decodes, context_tokens, admitted, preempted, *swaps)

    def add_chunk(self, state: RequestState, max_tokens: int | None = None) -> None:
        """Adds a chunk of a running request, as long as the budget and `max_tokens` allow, at least one token."""
        start = state.num_computed_tokens
        tokens = remaining = state.prefill_target_tokens - start
        if tokens > self.budget:
            tokens = self.budget
        if max_tokens is not None and tokens > max_tokens:
            tokens = max_tokens
        assert tokens > 0
        chunk = PrefillChunk(state.request_id, start, tokens, tokens == remaining)
        self.prefills.append((state, chunk))
        self.budget -= tokens

    def add_rest(self, prefilling: list[RequestState]) -> None:
        """Adds what is left of prompts planned as a whole, of which an engine has processed a part or nothing."""
        for state in prefilling:
            if self.budget > 0:
                self.add_chunk(state)

    def add_decodes(self, states: list[RequestState]) -> None:
        """Adds decodes of running requests that have memory for one more token; the list is not copied."""
        self._owns_decodes = bool(self.decodes)
        self.decodes = [*self.decodes, *states] if self.decodes else states
        self.budget -= len(states)

    def own_decodes(self) -> list[RequestState]:
        """`decodes` as a list that may be extended."""
        if not self._owns_decodes:
            self.decodes, self._owns_decodes = [*self.decodes], True
        return self.decodes

    def add(self, state: RequestState) -> None:
        """Adds the next chunk of a running request, or its decode."""
        if state.num_computed_tokens < state.prefill_target_tokens:
            self.add_chunk(state)
        else:
            self.own_decodes().append(state)
            self.budget -= 1

    def admit(self, pool: Pool, state: RequestState, now: float, reserve_tokens: int | None = None) -> bool:
        """Admits a waiting request if a slot and memory are free, see `Pool.admit`; adds no tokens."""
        copied_tokens = state.num_computed_tokens
        if not pool.admit(state, now, reserve_tokens):
            return False
        self.admitted.append(state.request_id)
        copied_tokens = copied_tokens or state.host_cached_tokens
        if copied_tokens:
            self.swapped_in.append(KVTransfer(state.request_id, copied_tokens))
        return True

    def fill(self, pool: Pool, prefilling: list[RequestState], now: float) -> None:
        """Adds chunks of running, then of waiting requests in order, until the budget, slots or memory are used up.

        Admits no request after a preemption.
        """
        for state in prefilling:
            if self.budget == 0:
                return
            self.add_chunk(state)
        while self.budget > 0 and not self.preempted:
            head = pool.waiting.peek()
            if head is None or not self.admit(pool, head, now):
                return
            self.add(head)

    def displace(self, pool: Pool, state: RequestState, now: float) -> bool:
        """Admits a waiting request, evicting running ones that the policy lets it displace."""
        if state.request_id in self.preempted:
            return False  # it was preempted in this step
        if self.admit(pool, state, now):
            return True
        victims = pool.victims_for(state, now)
        if victims is None:
            return False
        for victim in victims:
            self.evict(pool, victim, now)
        admitted = self.admit(pool, state, now)
        assert admitted, "the evictions did not free enough memory"
        return True

    def evict(self, pool: Pool, state: RequestState, now: float, offload_tokens: int | None = None) -> None:
        """Preempts a running request, see `Pool.preempt`, and removes its tokens from the batch."""
        self._drop(state)
        self.preempted.append(state.request_id)
        offload_tokens = pool.preempt(state, now, offload_tokens)
        if offload_tokens:
            self.swapped_out.append(KVTransfer(state.request_id, offload_tokens))

    def allocate(
        self, pool: Pool, decodes: list[RequestState], now: float, spare_block: bool = False
    ) -> list[RequestState]:
        """Takes blocks for the next token of each request, in order; evicts victims if necessary (possibly
        the request itself). Returns the requests that still run. `spare_block`: a decode without a new block
        also needs a free one (Vidur's rule)."""
        group = pool.lockstep
        if group is None:
            return self._allocate_individually(pool, decodes, now, spare_block)
        if not decodes:
            return decodes
        free = pool.kv.num_free_blocks
        if not (spare_block and free <= len(decodes)) and group.allocate_step(free):
            return decodes
        group.sync_all()
        decodes = self._allocate_individually(pool, decodes, now, spare_block)
        if decodes:
            group.mark_allocated()
        return decodes

    def _allocate_individually(
        self, pool: Pool, decodes: list[RequestState], now: float, spare_block: bool
    ) -> list[RequestState]:
        before = len(self.preempted)
        if spare_block and pool.kv.num_free_blocks <= len(decodes):
            for state in decodes:
                while state.status is Status.RUNNING and not (
                    pool.kv.num_free_blocks and pool.grow(state, state.num_computed_tokens + 1)
                ):
                    self.evict(pool, pool.memory_victim(now), now)
            return list(still_running(decodes))
        for state in [state for state in decodes if state.num_computed_tokens >= state.kv_tokens]:
            while state.status is Status.RUNNING and not pool.grow(state, state.num_computed_tokens + 1):
                self.evict(pool, pool.memory_victim(now), now)
        return decodes if len(self.preempted) == before else list(still_running(decodes))

    def _drop(self, state: RequestState) -> None:
        if state in self.decodes:
            self.decodes = [other for other in self.decodes if other is not state]
            self.budget += 1
        for index, (other, chunk) in enumerate(self.prefills):
            if other is state:
                del self.prefills[index]
                self.budget += chunk.num_tokens
                return


def still_running(states: Iterable[RequestState]) -> Iterable[RequestState]:
    """The requests that were not evicted."""
    return (state for state in states if state.status is Status.RUNNING)


def prefill_tokens_ahead(pool: Pool, state: RequestState) -> int:
    """Tokens that a waiting request must process after its admission before its next output token."""
    if state.num_computed_tokens >= state.prefill_target_tokens:
        return 0
    return state.known_tokens - max(state.num_computed_tokens, pool.find_tokens(state))
