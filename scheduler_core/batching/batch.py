"""The step under construction."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_core.decode_cohort import DecodeCohort
from scheduler_core.plan import KVTransfer, PrefillChunk, StepPlan
from scheduler_core.pool import Pool
from scheduler_core.request import RequestState, Status


class Batch:
    """The requests of one step, and what had to be admitted and evicted for it.

    Args:
        budget: Most tokens in it.

    Attributes:
        budget: Tokens that may still be added.
        prefills: Requests and the chunk of each to process.
        decodes: Requests that generate one token.
        admitted: Requests that left the waiting queue.
        preempted: Requests that lost their place.
        swapped_out: What of the preempted is kept on the host.
        swapped_in: What of the admitted was there.
    """

    __slots__ = ("admitted", "budget", "decodes", "preempted", "prefills", "swapped_in", "swapped_out")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prefills: list[tuple[RequestState, PrefillChunk]] = []
        self.decodes: list[RequestState] = []
        self.admitted: list[str] = []
        self.preempted: list[str] = []
        self.swapped_out: list[KVTransfer] = []
        self.swapped_in: list[KVTransfer] = []

    def plan(self, step: int, cohort: DecodeCohort | None) -> StepPlan:
        """What is to be carried out.

        Args:
            step: Its number.
            cohort: Those who decode, if they are counted together.
        """
        decodes: tuple[str, ...] = ()
        context_tokens = 0
        if self.decodes:
            if cohort is None:
                decodes = tuple([state.request_id for state in self.decodes])
                context_tokens = sum([state.num_computed_tokens for state in self.decodes])
            else:
                decodes, context_tokens = cohort.ids(), cohort.context_tokens
        chunks = tuple([chunk for _, chunk in self.prefills]) if self.prefills else ()
        for chunk in chunks:
            context_tokens += chunk.start_token
        return StepPlan(
            step,
            chunks,
            decodes,
            context_tokens,
            tuple(self.admitted),
            tuple(self.preempted),
            tuple(self.swapped_out),
            tuple(self.swapped_in),
        )

    def add_chunk(self, state: RequestState, most_tokens: int | None = None) -> None:
        """A running request processes as many tokens as the budget (and `most_tokens`) allow; one at least."""
        start = state.num_computed_tokens
        tokens = left = state.prefill_target_tokens - start
        if tokens > self.budget:
            tokens = self.budget
        if most_tokens is not None and tokens > most_tokens:
            tokens = most_tokens
        assert tokens > 0
        chunk = PrefillChunk(state.request_id, start, tokens, tokens == left)
        self.prefills.append((state, chunk))
        self.budget -= tokens

    def add_decodes(self, states: list[RequestState]) -> None:
        """Running requests with room for one more token generate it; the list is kept."""
        self.decodes = [*self.decodes, *states] if self.decodes else states
        self.budget -= len(states)

    def add(self, state: RequestState) -> None:
        """A running request does what comes next for it."""
        if state.num_computed_tokens < state.prefill_target_tokens:
            self.add_chunk(state)
        else:
            self.add_decodes([state])

    def admit(self, pool: Pool, state: RequestState, now: float, reserve_tokens: int | None = None) -> bool:
        """Admits a waiting request if there is a seat and memory, see `Pool.admit`; adds no tokens of it."""
        offloaded_tokens = state.num_computed_tokens
        if not pool.admit(state, now, reserve_tokens):
            return False
        self.admitted.append(state.request_id)
        if offloaded_tokens:
            self.swapped_in.append(KVTransfer(state.request_id, offloaded_tokens))
        return True

    def displace(self, pool: Pool, state: RequestState, now: float) -> bool:
        """Admits a waiting request, evicting running ones that the policy lets it displace."""
        if state.request_id in self.preempted:
            return False  # it has just lost its own place
        if self.admit(pool, state, now):
            return True
        victims = pool.victims_for(state, now)
        if victims is None:
            return False
        for victim in victims:
            self.evict(pool, victim, now)
        admitted = self.admit(pool, state, now)
        assert admitted, "the victims did not suffice"
        return True

    def evict(self, pool: Pool, state: RequestState, now: float, kept_tokens: int | None = None) -> None:
        """Takes a running request's place away, see `Pool.preempt`, and its tokens out of the batch."""
        self._drop(state)
        self.preempted.append(state.request_id)
        kept_tokens = pool.preempt(state, now, kept_tokens)
        if kept_tokens:
            self.swapped_out.append(KVTransfer(state.request_id, kept_tokens))

    def make_room(
        self, pool: Pool, decodes: list[RequestState], now: float, spare_block: bool = False
    ) -> list[RequestState]:
        """Gets the block for the next token of each, in this order, evicting victims if need be (perhaps the request
        itself); those that still run then.

        Args:
            pool: Live requests.
            decodes: Run and decode.
            now: Time in seconds.
            spare_block: When its turn comes, there must be a free block also for a decode that needs none (Vidur's rule).
        """
        cohort = pool.cohort
        if cohort is None:
            return self._make_room_singly(pool, decodes, now, spare_block)
        if not decodes:
            return decodes
        free = pool.kv.num_free_blocks
        if not (spare_block and free <= len(decodes)) and cohort.make_room(free):
            return decodes
        cohort.settle_all()
        decodes = self._make_room_singly(pool, decodes, now, spare_block)
        if decodes:
            cohort.room_made()
        return decodes

    def _make_room_singly(
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
        for place, (other, chunk) in enumerate(self.prefills):
            if other is state:
                del self.prefills[place]
                self.budget += chunk.num_tokens
                return


def still_running(states: Iterable[RequestState]) -> Iterable[RequestState]:
    """Those that have not been evicted."""
    return (state for state in states if state.status is Status.RUNNING)


def prefill_tokens_ahead(state: RequestState) -> int:
    """Tokens that a waiting request has to process between its admission and its next output token."""
    if state.first_scheduled_s is None:
        return state.request.prompt_tokens - state.request.cached_prefix_tokens
    if state.num_computed_tokens >= state.prefill_target_tokens:
        return 0
    return state.known_tokens - state.num_computed_tokens
