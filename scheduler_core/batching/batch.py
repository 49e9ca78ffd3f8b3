"""The step under construction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler_core.plan import KVTransfer, PrefillChunk
from scheduler_core.pool import Pool
from scheduler_core.request import RequestState, Status


@dataclass(slots=True)
class Batch:
    """The requests of one step, and what had to be admitted and evicted for it.

    Attributes:
        budget: Tokens that may still be added.
        prefills: Requests and the chunk of each to process.
        decodes: Requests that generate one token.
        admitted: Requests that left the waiting queue.
        preempted: Requests that lost their place.
        swapped_out: What of the preempted is kept on the host.
        swapped_in: What of the admitted was there.
    """

    budget: int
    prefills: list[tuple[RequestState, PrefillChunk]] = field(default_factory=list)
    decodes: list[RequestState] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    swapped_out: list[KVTransfer] = field(default_factory=list)
    swapped_in: list[KVTransfer] = field(default_factory=list)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of all its requests that are in the cache already."""
        prefills = sum([state.num_computed_tokens for state, _ in self.prefills])
        return prefills + sum([state.num_computed_tokens for state in self.decodes])

    def add_chunk(self, state: RequestState, most_tokens: int | None = None) -> None:
        """A running request processes as many tokens as the budget (and `most_tokens`) allow; one at least."""
        left = state.prefill_target_tokens - state.num_computed_tokens
        tokens = min(left, self.budget if most_tokens is None else min(most_tokens, self.budget))
        assert tokens > 0
        chunk = PrefillChunk(state.request_id, state.num_computed_tokens, tokens, tokens == left)
        self.prefills.append((state, chunk))
        self.budget -= tokens

    def add_decodes(self, states: Sequence[RequestState]) -> None:
        """Running requests with room for one more token generate it."""
        self.decodes += states
        self.budget -= len(states)

    def add(self, state: RequestState) -> None:
        """A running request does what comes next for it."""
        if state.num_computed_tokens < state.prefill_target_tokens:
            self.add_chunk(state)
        else:
            self.add_decodes((state,))

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
            self.decodes.remove(state)
            self.budget += 1
        for place, (other, chunk) in enumerate(self.prefills):
            if other is state:
                del self.prefills[place]
                self.budget += chunk.num_tokens
                return


def still_running(states: Iterable[RequestState]) -> Iterable[RequestState]:
    """Those that have not been evicted."""
    return (state for state in states if state.status is Status.RUNNING)


def split_by_phase(pool: Pool) -> tuple[list[RequestState], list[RequestState]]:
    """The running requests in prefill and those that decode, each in order of admission."""
    running = pool.running.values()
    decodes = [s for s in running if s.num_computed_tokens >= s.prefill_target_tokens]
    if len(decodes) == len(running):
        return [], decodes
    return [s for s in running if s.num_computed_tokens < s.prefill_target_tokens], decodes


def prefill_tokens_ahead(state: RequestState) -> int:
    """Tokens that a waiting request has to process between its admission and its next output token."""
    if state.first_scheduled_s is None:
        return state.request.prompt_tokens - state.request.cached_prefix_tokens
    if state.num_computed_tokens >= state.prefill_target_tokens:
        return 0
    return state.known_tokens - state.num_computed_tokens
